"""Finds a model's files: a local folder, a .gguf file, or a download from the hub."""

from __future__ import annotations

import os
from pathlib import Path

from ..configs.schema import ModelConfig
from .errors import ModelLoadError

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def find_model(config: ModelConfig) -> Path:
    """The folder or .gguf file that `config.model` names, downloaded if it is a hub id."""
    name = config.model
    path = Path(name).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is a file, but neither a model folder nor a .gguf file.")
        if path.is_dir() and config.load_format != "gguf" and not (path / "config.json").exists():
            raise ModelLoadError(f"{path} has no config.json, so it is not a model folder.")
        return path
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")):
        raise ModelLoadError(f"{path} does not exist.")
    if name.count("/") != 1:
        raise ModelLoadError(f"{name!r} is no folder, no .gguf file and no hub id (owner/name).")
    return _download(name, config.revision)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        path = Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"access to {name} must be requested on the hub and needs a token (HF_TOKEN)."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"{name} is neither a local folder nor a model on the hub.") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{name} has no revision {revision!r} on the hub.") from error
    except HFValidationError as error:
        raise ModelLoadError(f"{name!r} is neither a local folder nor a valid hub id.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise ModelLoadError(
            f"{name} is neither a local folder nor in the download cache, and {why}."
        ) from error
    if not (path / "config.json").exists():
        raise ModelLoadError(f"{name} on the hub has no config.json, so it cannot be served.")
    return path
