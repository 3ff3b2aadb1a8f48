"""Finds a model's files: a local folder, a .gguf file, or a download from the hub.

The server finds its tokenizer through it, too, so nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..configs.schema import ModelConfig, SpeculativeConfig
from ..configs.speculative import METHODS
from .errors import ModelLoadError

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


class HubError(ModelLoadError):
    """The hub does not give what was asked for."""


def find_model(config: ModelConfig) -> Path:
    """The folder or .gguf file that `config.model` names, downloaded if it is a hub id."""
    name = config.model
    path = Path(name).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is a file, but neither a model folder nor a .gguf file.")
        if path.is_dir() and config.load_format == "gguf":
            return _gguf_in(path)
        if path.is_dir() and not (path / "config.json").exists():
            if config.load_format == "auto" and any(path.glob("*.gguf")):
                return _gguf_in(path)
            raise ModelLoadError(f"{path} has no config.json, so it is not a model folder.")
        return path
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")):
        raise ModelLoadError(f"{path} does not exist.")
    if name.count("/") != 1:
        raise ModelLoadError(f"{name!r} is no folder, no .gguf file and no hub id (owner/name).")
    return _download(name, config.revision)


def find_drafter(config: SpeculativeConfig) -> None:
    """Find the drafter's files, or download them, before anything is loaded; ModelLoadError."""
    if config.model is not None and config.method in METHODS:  # not those of one's own
        find_model(ModelConfig(model=config.model, load_format=config.load_format))


def _gguf_in(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(f"{folder} holds {len(files)} .gguf files; name one of them.")
    return files[0]


def _download(name: str, revision: str | None) -> Path:
    path = download(name, revision, _HUB_FILES)
    if not (path / "config.json").exists():
        raise ModelLoadError(f"{name} on the hub has no config.json, so it cannot be served.")
    return path


def download(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder with a repository's files of these patterns, from the cache or from the hub.

    HubError, one sentence, if it cannot be had.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = repo if revision is None else f"{repo} at {revision}"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise HubError(f"{repo!r} is neither a local folder nor a hub id (owner/name).") from error
    except GatedRepoError as error:
        raise HubError(
            f"{repo} is gated: ask for access on the hub, and set HF_TOKEN to a token of yours."
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(f"{repo} is neither a local folder nor a model on the hub.") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repo} has no revision {revision!r} on the hub.") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise HubError(
            f"{where} is neither a local folder nor in the download cache, and {why}."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise HubError(f"{where} could not be fetched from the hub: {reason}.") from error
