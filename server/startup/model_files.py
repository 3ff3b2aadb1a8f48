"""Checks a model's files before anything is loaded: are they complete, do they suit the flags?

It reads only headers, in a fraction of a second, so that a broken download is reported at once
instead of after minutes of loading. The worker checks the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...configs.model.hub import HubError, download_config
from ...configs.model.model_config import (
    GGUF_NUMBERS,
    OTHER_WEIGHTS,
    NotServed,
    check_gguf_architecture,
    check_weights,
    context_length,
    eos_token_ids,
    is_file_name,
    merged,
    refused_as,
    served_architecture,
    short,
    text_config,
)
from ...configs.model.numbers import check_numbers
from ...configs.model.quantisation import MODELOPT_FILE, check_quantisation, from_modelopt_file
from ...configs.paths import PathError, local_path
from ...configs.schema import Config
from ...configs.speculative import METHODS
from ..text.gguf_metadata import GGUFError, check_gguf_tensors, read_gguf_metadata

_MAX_HEADER = 100 << 20  # safetensors' own limit


class ModelFilesError(Exception):
    """The model cannot be served from its files. The message is one sentence for the user."""


def check_model_files(config: Config) -> None:
    """Check the files of the model and of its drafter. Raises ModelFilesError.

    Refuses unsupported architectures and quantisations, broken or missing files, and a
    --max-model-len above the model's context length. For a model on the hub, only config.json is
    downloaded and checked.
    """
    model, drafts = config.model, config.speculative
    overrides = json.loads(model.hf_overrides) if model.hf_overrides else {}
    found = _checked(model.model, model.revision, model.load_format, overrides)
    _check_length(model.max_model_len, found)
    if drafts.method in METHODS and drafts.method != "off" and drafts.model:
        whole = drafts.method == "draft_model"
        _checked(drafts.model, None, drafts.load_format, {}, whole)


def _local(name: str) -> Path | None:
    try:
        return local_path(name)
    except PathError as error:
        raise ModelFilesError(str(error)) from None


def _checked(
    name: str, revision: str | None, load_format: str, overrides: dict[str, Any], whole: bool = True
) -> dict[str, Any]:
    """The model's config in the form of a config.json, after checks; empty if there is none.

    `whole` means a complete model. A draft head is not one and may name any architecture. Raises
    ModelFilesError.
    """
    path = _local(name)
    if path is None:
        if name.count("/") != 1 or name.startswith(("/", ".", "~")) or name.endswith(".gguf"):
            return {}  # not a hub id
        try:
            raw = merged(_json(download_config(name, revision)), overrides)
        except HubError as error:
            raise ModelFilesError(str(error)) from error
        return _served(name, raw, whole)
    named = load_format == "gguf" or (load_format == "auto" and not (path / "config.json").exists())
    if path.is_dir() and named:
        files = sorted(path.glob("*.gguf"))
        path = files[0] if len(files) == 1 else path
    if path.is_file():
        return merged(_checked_gguf(path), overrides)
    raw = {}
    if (path / "config.json").is_file():
        raw = _served(name, merged(_json(path / "config.json"), overrides), whole)
    if (path / MODELOPT_FILE).is_file():
        _check_modelopt(name, _json(path / MODELOPT_FILE))
    if load_format in ("auto", "safetensors"):
        _check_folder(path, raw if whole else {})
    return raw


def _check_modelopt(name: str, content: dict[str, Any]) -> None:
    with refused_as(ModelFilesError, name):
        check_quantisation({"quantization_config": from_modelopt_file(content)})


def _check_folder(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelFilesError if weights or configs in a folder are broken or contradict `config`.

    An empty `config` contradicts no weights.
    """
    counts = [_check_safetensors(file) for file in _safetensors(folder)]
    with refused_as(ModelFilesError, folder):
        if counts:
            check_weights(config, *(sum(column) for column in zip(*counts, strict=True)))
        for name in ("generation_config.json", "config.json"):
            if (folder / name).is_file():
                eos_token_ids(_json(folder / name).get("eos_token_id"), name)


def _served(name: str, raw: dict[str, Any], whole: bool) -> dict[str, Any]:
    """The config of the language model in `raw`, the content of a config.json.

    Raises ModelFilesError, with `name` in the message, if its quantisation is not supported, and
    for a `whole` model (see `_checked`) if its architecture or one of its numbers is not.
    """
    with refused_as(ModelFilesError, name):
        if whole:
            served_architecture(raw)
        check_quantisation(raw)
        config = text_config(raw)
        if whole:
            check_numbers(config)
    return config


def _checked_gguf(path: Path) -> dict[str, Any]:
    try:
        metadata = read_gguf_metadata(path, long_arrays=False)
        check_gguf_architecture(metadata.get("general.architecture"))
        num_tensors = check_gguf_tensors(path)
        config = _gguf_config(metadata)
        check_numbers(config)
        check_weights(config, num_tensors, path.stat().st_size)
    except GGUFError as error:
        raise ModelFilesError(str(error)) from error
    except NotServed as error:
        raise ModelFilesError(f"{path} cannot be served: {error}") from error
    return config


def _gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a GGUF header under the names that config.json uses."""
    architecture = metadata["general.architecture"]
    scaling = f"{architecture}.rope.scaling"
    rope = {
        "rope_type": metadata.get(f"{scaling}.type"),
        "factor": metadata.get(f"{scaling}.factor"),
        "original_max_position_embeddings": metadata.get(f"{scaling}.original_context_length"),
    }
    config = {name: metadata.get(f"{architecture}.{key}") for name, key in GGUF_NUMBERS.items()}
    return config | {"rope_parameters": rope}


def _check_length(wanted: int | None, model: dict[str, Any]) -> None:
    longest = context_length(model)
    if longest is not None and wanted is not None and wanted > longest:
        raise ModelFilesError(
            f"--max-model-len {wanted} exceeds the model's context length of {longest} tokens"
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} is not a JSON object.")
    return value


def _safetensors(folder: Path) -> Iterator[Path]:
    """The weight files to be loaded. Raises ModelFilesError if one is missing."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        found = sorted(folder.glob("*.safetensors"))
        own = [path for path in found if not path.match(OTHER_WEIGHTS)]
        yield from [single] if single.exists() else own or found
        return
    files = _json(index).get("weight_map")
    if not isinstance(files, dict) or not all(is_file_name(name) for name in files.values()):
        raise ModelFilesError(f"{index} is not a valid safetensors index.")
    paths = [folder / name for name in sorted(set(files.values()))]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ModelFilesError(f"{folder} is missing the weight file {', '.join(missing)}.")
    yield from paths


def _check_safetensors(path: Path) -> tuple[int, int]:
    """Check a file's header and size; returns the number of tensors and of their bytes."""

    def broken(reason: str) -> ModelFilesError:
        return ModelFilesError(f"{path} is not a readable safetensors file: {reason}.")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise broken("its header is truncated")
            header = json.loads(file.read(length))
        tensors = [value for key, value in header.items() if key != "__metadata__"]
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    except OSError as error:
        raise broken(error.strerror or "an input error") from error
    except (ArithmeticError, ValueError, RecursionError, TypeError, LookupError, AttributeError):
        raise broken("its header is malformed") from None
    if size != 8 + length + end:
        raise broken(f"it has {size} bytes, but its header implies {short(8 + length + end)}")
    return len(tensors), end
