"""Finds a model's files: a local folder, a .gguf file, or a download from the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ...configs.model.hub import HubError, Progress, download, download_config
from ...configs.model.model_config import OTHER_WEIGHTS
from ...configs.paths import PathError, local_path
from ...configs.schema import ModelConfig, SpeculativeConfig
from ...configs.speculative import METHODS
from ..errors import ModelLoadError

_SMALL_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]
_OTHER_FOLDERS = "*/*"  # these hold the same weights for other engines
Check = Callable[[Path], None]  # gets a folder with a config.json; raises ModelLoadError


def find_model(
    config: ModelConfig, check: Check | None = None, progress: Progress | None = None
) -> Path:
    """The folder or .gguf file that `config.model` names. A hub id is downloaded first.

    `check` is called before a model's weights are downloaded; `progress` gets the bytes done.
    Raises ModelLoadError.
    """
    name = config.model
    try:
        path = local_path(name)
    except PathError as error:
        raise ModelLoadError(f"{error}.") from None
    if path is not None:
        if path.is_file() and path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is neither a model folder nor a .gguf file.")
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
        raise ModelLoadError(f"{name!r} is not a folder, a .gguf file or a hub id (owner/name).")
    return _download(config, check, progress)


def find_drafter(config: SpeculativeConfig, progress: Progress | None = None) -> None:
    """Find or download the drafter's files before anything is loaded. Raises ModelLoadError."""
    # a custom drafter finds its own files
    if config.model is not None and config.method in METHODS:
        try:
            model = ModelConfig(model=config.model, load_format=config.load_format)
            find_model(model, progress=progress)
        except ModelLoadError as error:
            raise ModelLoadError(f"the drafter {error}") from error


def _gguf_in(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(f"{folder} holds {len(files)} .gguf files; name one of them.")
    return files[0]


def _download(config: ModelConfig, check: Check | None, progress: Progress | None) -> Path:
    name, revision = config.model, config.revision
    try:
        download_config(name, revision)
        path = download(name, revision, _SMALL_FILES, [_OTHER_FOLDERS])
        if check is not None:
            check(path)
        if config.load_format == "dummy":
            return path
        ignored = [_OTHER_FOLDERS, OTHER_WEIGHTS]
        return download(name, revision, _weights(path), ignored, progress)
    except HubError as error:
        raise ModelLoadError(str(error)) from error


def _weights(folder: Path) -> list[str]:
    """Patterns of the weight files to download: the files in the index, or all safetensors.

    A malformed index is ignored here; reading the checkpoint reports it.
    """
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        files = {name for name in index["weight_map"].values() if isinstance(name, str)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        files = set()
    return sorted(files) or ["*.safetensors"]
