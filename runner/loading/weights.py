"""Reads a model's config, and fills a model with the weights of its checkpoint."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from ...configs.model.model_config import (
    eos_token_ids,
    merged,
    refused_as,
    served_architecture,
    text_config,
)
from ...configs.model.numbers import check_numbers
from ...configs.model.quantisation import (
    MODELOPT_FILE,
    Quantisation,
    from_modelopt_file,
    parse_quantisation,
)
from ...configs.schema import ModelConfig
from ...kernels.device import is_card
from ..errors import ModelLoadError
from ..models.base import TextModel
from ..models.layers import CheckpointSlot, WeightFormat
from .dummy import load_random
from .hub import find_model
from .inspection import BytesRead, FiniteCheck, LoadMeter, Progress, Stored, ignore
from .matching import WantedParts, check_shape, is_part, match_names
from .plain_config import plain_config
from .quantised.delivery import Deliveries, as_meta

_LOADERS = 2  # threads that load slots; packing weights on a CPU uses one core each
_MAX_PENDING_BYTES = 256 << 20  # of tensors that are read but not loaded yet
_SMALL_GGUF = 256 << 20  # bytes
_PLAIN_WINDOW = ("llama", "mistral")  # types in which all layers have the same window


class Checkpoint(Protocol):
    """A checkpoint's weights, under the names of transformers."""

    names: list[str]
    spare: frozenset[str]  # names that a model may have no slot for

    @property
    def is_quantised(self) -> bool:
        """Whether any weight is a quantised matrix."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor in its stored form. Reads only headers."""

    def tensors(self, read: BytesRead = ...) -> Iterator[tuple[str, Stored]]:
        """Yield (name, weight). `read` is called with the bytes of each tensor as they are read."""

    def outlines(self) -> Iterator[tuple[str, Stored]]:
        """Like `tensors`, but yields meta tensors in any order and reads only headers."""

    def keep_parts(self, parts: WantedParts) -> None:
        """Say which parts of which tensors are wanted. Tensors of which none is wanted need not be
        yielded; of others, it yields that part or the whole."""

    def release(self) -> None:
        """Give back the memory of a reading that is over; another one may follow."""


class _Outlines:
    """Wraps a checkpoint so that only its names, shapes and dtypes are read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.names, self.outlines = list(checkpoint.names), checkpoint.outlines
        self.spare, self.is_quantised = checkpoint.spare, checkpoint.is_quantised

    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(self.names, 0)  # nothing is read

    def tensors(self, read: BytesRead = ignore) -> Iterator[tuple[str, Stored]]:
        wanted = set(self.names)
        return ((name, as_meta(weight)) for name, weight in self.outlines() if name in wanted)

    def keep_parts(self, parts: WantedParts) -> None:
        pass  # nothing is read

    def release(self) -> None:
        pass  # nothing was read


@dataclass(frozen=True)
class ResolvedModel:
    """A model's files and config. `kind` is "safetensors", "gguf" or "dummy"."""

    path: Path  # folder, or the .gguf file
    kind: str
    hf_config: Any  # a transformers config, or an object with the same attributes
    eos_token_ids: list[int] = field(default_factory=list)
    seed: int = 0  # for dummy weights
    opened: Checkpoint | None = None  # the checkpoint, if reading the config opened it
    quantisation: Quantisation | None = None  # what the config says about quantised weights

    @property
    def text_config(self) -> Any:
        """The language part of `hf_config`."""
        return getattr(self.hf_config, "text_config", None) or self.hf_config

    @property
    def checkpoint_dtype(self) -> object:
        """The dtype that the config names, or None."""
        return getattr(self.text_config, "dtype", None) or getattr(self.hf_config, "dtype", None)


def resolve_model(
    config: ModelConfig, check_architecture: bool = True, downloading: Progress | None = None
) -> ResolvedModel:
    """Find the model, downloading it if necessary, and read its config.

    Raises ModelLoadError, for a config that cannot be served before its weights are downloaded.
    `downloading` is called with a download's bytes.
    """

    def read_config(folder: Path) -> Any:
        return make_hf_config(_raw_config(folder, config), str(folder), check_architecture)

    path = find_model(config, read_config, downloading)
    if path.suffix == ".gguf":
        return _resolve_gguf(path, config)
    hf_config = read_config(path)
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = getattr(hf_config, "eos_token_id", None)
    with refused_as(ModelLoadError, path):
        eos_ids = eos_token_ids(eos, str(path))
    kind = "dummy" if config.load_format == "dummy" else "safetensors"
    quantisation = stated_quantisation(_raw_config(path, config), str(path))
    return ResolvedModel(path, kind, hf_config, eos_ids, config.seed, quantisation=quantisation)


def _raw_config(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The content of config.json, with what --hf-overrides and ModelOpt's own file add."""
    raw, stated = _read_json(folder / "config.json"), folder / MODELOPT_FILE
    if stated.exists() and not raw.get("quantization_config"):
        with refused_as(ModelLoadError, folder):
            raw["quantization_config"] = from_modelopt_file(_read_json(stated))
    return merged(raw, _overrides(config))


def stated_quantisation(raw: dict[str, Any], source: str) -> Quantisation | None:
    """What a config.json's content says about quantised weights. Raises ModelLoadError."""
    with refused_as(ModelLoadError, source):
        return parse_quantisation(raw)


def _resolve_gguf(path: Path, config: ModelConfig) -> ResolvedModel:
    from .gguf_weights import GGUFFile

    file = GGUFFile(path)
    raw = file.config()
    rope = raw.pop("rope_parameters")
    # transformers would reject some of our rope types, so these are set after its validation
    standard = rope if rope.get("rope_type") != "divisors" else None
    overrides = _overrides(config)
    if not overrides and (raw["model_type"] in _PLAIN_WINDOW or "sliding_window" not in raw):
        # The header states every value, and importing transformers would take two seconds.
        hf_config: Any = SimpleNamespace(**raw, rope_parameters=rope)
    else:
        raw = merged(raw | ({"rope_parameters": standard} if standard else {}), overrides)
        hf_config = make_hf_config(raw, str(path))
        if standard is None:
            hf_config.rope_parameters = rope
    kind = "dummy" if config.load_format == "dummy" else "gguf"
    return ResolvedModel(path, kind, hf_config, file.eos_token_ids, config.seed, file)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelLoadError(f"{path.parent} has no {path.name}.") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise ModelLoadError(f"{path} is nested too deeply.") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object.")
    return value


def _overrides(config: ModelConfig) -> dict[str, Any]:
    if not config.hf_overrides:
        return {}
    try:
        value = json.loads(config.hf_overrides)
    except ValueError as error:
        raise ModelLoadError(f"--hf-overrides is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelLoadError("--hf-overrides must be a JSON object.")
    return value


def make_hf_config(raw: dict[str, Any], source: str, check_architecture: bool = True) -> Any:
    """Make a transformers config, or the like (see `plain_config`), from a config.json's content.

    Raises ModelLoadError if the model cannot be served.
    """
    with refused_as(ModelLoadError, source):
        if check_architecture:
            served_architecture(raw)
        parse_quantisation(raw)
        check_numbers(text_config(raw))
    if (plain := plain_config(raw, needs_eos=check_architecture)) is not None:
        return plain
    from transformers import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ModelLoadError(f"the config of {source} has no model_type that is a name.")
    if model_type not in CONFIG_MAPPING:
        raise ModelLoadError(f"transformers does not know the model_type {model_type!r}.")
    try:
        hf_config = CONFIG_MAPPING[model_type].from_dict(dict(raw))
    except Exception as error:  # each config class validates in its own way
        reason = " ".join(str(error).split()).rstrip(".")
        raise ModelLoadError(f"the config of {source} is not valid: {reason}.") from error
    return hf_config


# --- weights ----------------------------------------------------------------------------------


def load_weights(
    model: TextModel, resolved: ResolvedModel, progress: Progress | None = None
) -> None:
    """Fill `model` with the stored weights, each of which must be used exactly once.

    Raises ModelLoadError with the names of tensors that are missing or left over.
    """
    slots = model.checkpoint_slots()
    if resolved.kind == "dummy":
        device, said = model.format.device, resolved.quantisation
        load_random(slots, device, resolved.seed, progress, quantisation=said)
        return
    checkpoint = open_checkpoint(resolved, model.format.device)
    load_checkpoint(slots, checkpoint, model.checkpoint_name, str(resolved.path), progress)


def load_kv_scales(
    resolved: ResolvedModel, num_layers: int, wanted: bool
) -> dict[int, tuple[float, float]]:
    """The scales of keys and values that the checkpoint holds for an fp8 KV cache, by layer.

    Reads nothing but these. If they are not `wanted`, it logs that they exist and returns none.
    """
    if resolved.kind != "safetensors":
        return {}
    from .kv_scales import note_unused, read_kv_scales
    from .safetensors_weights import SafetensorsCheckpoint

    files = SafetensorsCheckpoint(resolved.path, resolved.quantisation).cache_scales
    if wanted:
        return read_kv_scales(resolved.path, files, resolved.hf_config, num_layers)
    note_unused(resolved.path, files)
    return {}


def open_checkpoint(resolved: ResolvedModel, device: torch.device | None = None) -> Checkpoint:
    """Open the stored weights of a model that is not "dummy"; `device` is where they are needed."""
    checkpoint = resolved.opened
    if checkpoint is None:
        from .safetensors_weights import SafetensorsCheckpoint

        checkpoint = SafetensorsCheckpoint(resolved.path, resolved.quantisation, device)
    return _Outlines(checkpoint) if device is not None and device.type == "meta" else checkpoint


def keeps_formats(resolved: ResolvedModel, fmt: WeightFormat) -> bool:
    """Whether the model has quantised weights that may stay so in the memory of its device.

    Those of small GGUF files do not: launches take most of their steps, and kernels for plain
    weights are tuned for them.
    """
    if not is_card(fmt.device) or fmt.torch_only:
        return False
    if resolved.kind == "dummy":
        return resolved.quantisation is not None
    checkpoint = resolved.opened or open_checkpoint(resolved)
    if resolved.kind == "gguf" and sum(checkpoint.sizes().values()) < _SMALL_GGUF:
        return False
    # gpt-oss stores its experts as stacks of MXFP4, which are no matrices.
    return checkpoint.is_quantised or any(name.endswith("_blocks") for name in checkpoint.names)


def load_checkpoint(
    slots: Mapping[str, CheckpointSlot],
    checkpoint: Checkpoint,
    checkpoint_name: Callable[[str], str | None],
    source: str,
    progress: Progress | None = None,
) -> None:
    """Fill `slots`. `checkpoint_name` maps a stored tensor to its slot, or to None to skip it."""
    targets = match_names(slots, checkpoint.names, checkpoint_name, source, checkpoint.spare)
    checkpoint.keep_parts(
        {
            name: (slots[target].shape, cut)
            for name, target in targets.items()
            if target is not None and (cut := slots[target].cut) is not None
        }
    )
    sizes = checkpoint.sizes()
    jobs: deque[tuple[Future[None], int]] = deque()  # and the bytes of its tensor
    used = {name: sizes[name] for name, target in targets.items() if target is not None}
    meter, check, into = LoadMeter(used, progress), FiniteCheck(source), Deliveries(source)
    pending_bytes = 0

    def finish_oldest() -> None:
        nonlocal pending_bytes
        job, size = jobs.popleft()
        job.result()
        pending_bytes -= size

    with _one_thread_each(), ThreadPoolExecutor(_LOADERS, "load-weights") as loaders:
        for name, tensor in checkpoint.tensors(meter.read):
            meter.finish(name)
            target = targets.get(name)
            if target is None:
                continue
            slot = slots[target]
            if not is_part(tensor, slot):
                check_shape(name, tensor, slot, source)
            jobs.append((loaders.submit(_load, slot, name, tensor, check, into), tensor.nbytes))
            pending_bytes += tensor.nbytes
            while jobs and (pending_bytes > _MAX_PENDING_BYTES or jobs[0][0].done()):
                finish_oldest()
        while jobs:
            finish_oldest()
    checkpoint.release()
    check.report()
    into.report()


def check_outlines(model: TextModel, resolved: ResolvedModel) -> None:
    """Raise ModelLoadError unless names and shapes of the checkpoint fit. Reads only headers."""
    if resolved.kind == "dummy":
        return
    slots, checkpoint = model.checkpoint_slots(), open_checkpoint(resolved)
    source = str(resolved.path)
    names, spare = checkpoint.names, checkpoint.spare
    targets = match_names(slots, names, model.checkpoint_name, source, spare)
    for name, tensor in checkpoint.outlines():
        if (target := targets.get(name)) is not None:
            check_shape(name, tensor, slots[target], source)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let torch use one thread per operation, so that loading threads do not multiply."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _load(
    slot: CheckpointSlot, name: str, weight: Stored, check: FiniteCheck, into: Deliveries
) -> None:
    with torch.no_grad():  # the mode is per thread
        check.inspect(name, weight)
        into.deliver(slot, name, weight)
