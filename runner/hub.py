"""Finds a model's files: a local folder, a .gguf file, or a download from the hub."""

from __future__ import annotations

from pathlib import Path

from ..configs.hub import HubError, download
from ..configs.paths import PathError, local_path
from ..configs.schema import ModelConfig, SpeculativeConfig
from ..configs.speculative import METHODS
from .errors import ModelLoadError

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def find_model(config: ModelConfig) -> Path:
    """The folder or .gguf file that `config.model` names, downloaded if it is a hub id."""
    name = config.model
    try:
        path = local_path(name)
    except PathError as error:
        raise ModelLoadError(f"{error}.") from None
    if path is not None:
        if path.is_file() and path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is a file, but neither a model folder nor a .gguf file.")
        if path.is_dir() and config.load_format == "gguf":
            return _gguf_in(path)
        if path.is_dir() and not (path / "config.json").is_file():
            if config.load_format == "auto" and any(path.glob("*.gguf")):
                return _gguf_in(path)
            raise ModelLoadError(f"{path} has no config.json, so it is not a model folder.")
        return path
    if name.endswith(".gguf") or name.startswith(("/", ".", "~")):
        raise ModelLoadError(f"{name} does not exist.")
    if name.count("/") != 1:
        raise ModelLoadError(f"{name!r} is no folder, no .gguf file and no hub id (owner/name).")
    return _download(name, config.revision)


def find_drafter(config: SpeculativeConfig) -> None:
    """Find the drafter's files, or download them, before anything is loaded; ModelLoadError."""
    if config.model is not None and config.method in METHODS:  # not those of one's own
        try:
            find_model(ModelConfig(model=config.model, load_format=config.load_format))
        except ModelLoadError as error:
            raise ModelLoadError(f"the drafter {error}") from error


def _gguf_in(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(f"{folder} holds {len(files)} .gguf files; name one of them.")
    return files[0]


def _download(name: str, revision: str | None) -> Path:
    try:
        path = download(name, revision, _HUB_FILES)
    except HubError as error:
        raise ModelLoadError(str(error)) from error
    if not (path / "config.json").exists():
        raise ModelLoadError(f"{name} on the hub has no config.json, so it cannot be served.")
    return path
