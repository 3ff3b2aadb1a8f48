"""Reads a model's config, and fills a model with the weights of its checkpoint."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...configs.model.model_config import (
    NotServed,
    check_numbers,
    check_quantisation,
    eos_token_ids,
    merged,
    served_architecture,
    text_config,
)
from ...configs.schema import ModelConfig
from ...kernels.cpu.formats import StoredRows
from ..errors import ModelLoadError
from ..models.base import TextModel
from ..models.layers import CheckpointSlot
from .hub import find_model
from .inspection import BytesRead, FiniteCheck, LoadMeter, Progress, ignore
from .plain_config import plain_config

_LOADERS = 2  # threads that load slots; packing weights on a CPU uses one core each
_MAX_PENDING_BYTES = 256 << 20  # of tensors that are read but not loaded yet
_PLAIN_WINDOW = ("llama", "mistral")  # types in which all layers have the same window
_MAX_NAMED = 5  # tensor names in an error message


class Checkpoint(Protocol):
    """A checkpoint's weights, under the names of transformers."""

    names: list[str]

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor in its stored form. Reads only headers."""

    def tensors(self, read: BytesRead = ...) -> Iterator[tuple[str, Tensor | StoredRows]]:
        """Yield (name, tensor). `read` is called with the bytes of each tensor as they are read."""

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Like `tensors`, but yields meta tensors in any order and reads only headers."""

    def release(self) -> None:
        """Give back the memory of a reading that is over; another one may follow."""


class _Outlines:
    """Wraps a checkpoint so that only its names, shapes and dtypes are read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.names, self.outlines = list(checkpoint.names), checkpoint.outlines

    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(self.names, 0)  # nothing is read

    def tensors(self, read: BytesRead = ignore) -> Iterator[tuple[str, Tensor]]:
        wanted = set(self.names)
        return ((name, tensor) for name, tensor in self.outlines() if name in wanted)

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
        raw = merged(_read_json(folder / "config.json"), _overrides(config))
        return make_hf_config(raw, str(folder), check_architecture)

    path = find_model(config, read_config, downloading)
    if path.suffix == ".gguf":
        return _resolve_gguf(path, config)
    hf_config = read_config(path)
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = getattr(hf_config, "eos_token_id", None)
    try:
        eos_ids = eos_token_ids(eos, str(path))
    except NotServed as error:
        raise ModelLoadError(f"{path} cannot be served: {error}") from error
    kind = "dummy" if config.load_format == "dummy" else "safetensors"
    return ResolvedModel(path, kind, hf_config, eos_ids, config.seed)


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
    try:
        if check_architecture:
            served_architecture(raw)
        check_quantisation(raw)
        check_numbers(text_config(raw))
    except NotServed as error:
        raise ModelLoadError(f"{source} cannot be served: {error}") from error
    if (plain := plain_config(raw, needs_eos=check_architecture)) is not None:
        return plain
    from transformers import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if model_type is None:
        raise ModelLoadError(f"the config of {source} has no model_type.")
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
        load_random(slots, model.format.device, resolved.seed, progress)
        return
    checkpoint = open_checkpoint(resolved, model.format.device)
    load_checkpoint(slots, checkpoint, model.checkpoint_name, str(resolved.path), progress)


def open_checkpoint(resolved: ResolvedModel, device: torch.device | None = None) -> Checkpoint:
    """Open the stored weights of a model that is not "dummy"; `device` is where they are needed."""
    checkpoint = resolved.opened
    if checkpoint is None:
        from .safetensors_weights import SafetensorsCheckpoint

        checkpoint = SafetensorsCheckpoint(resolved.path, resolved.hf_config, device)
    return _Outlines(checkpoint) if device is not None and device.type == "meta" else checkpoint


def load_checkpoint(
    slots: Mapping[str, CheckpointSlot],
    checkpoint: Checkpoint,
    checkpoint_name: Callable[[str], str | None],
    source: str,
    progress: Progress | None = None,
) -> None:
    """Fill `slots`. `checkpoint_name` maps a stored tensor to its slot, or to None to skip it."""
    targets = match_names(slots, checkpoint.names, checkpoint_name, source)
    sizes = checkpoint.sizes()
    jobs: deque[tuple[Future[None], int]] = deque()  # and the bytes of its tensor
    used = {name: sizes[name] for name, target in targets.items() if target is not None}
    meter, check = LoadMeter(used, progress), FiniteCheck(source)
    pending_bytes = 0

    def finish_oldest() -> None:
        nonlocal pending_bytes
        job, size = jobs.popleft()
        job.result()
        pending_bytes -= size

    with _one_thread_each(), ThreadPoolExecutor(_LOADERS, "load-weights") as loaders:
        for name, tensor in checkpoint.tensors(meter.read):
            meter.finish(name)
            target = targets[name]
            if target is None:
                continue
            slot = slots[target]
            _check_shape(name, tensor, slot, source)
            jobs.append((loaders.submit(_load, slot, name, tensor, check), tensor.nbytes))
            pending_bytes += tensor.nbytes
            while jobs and (pending_bytes > _MAX_PENDING_BYTES or jobs[0][0].done()):
                finish_oldest()
        while jobs:
            finish_oldest()
    checkpoint.release()
    check.report()


def match_names(
    slots: Mapping[str, CheckpointSlot],
    names: Sequence[str],
    checkpoint_name: Callable[[str], str | None],
    source: str,
) -> dict[str, str | None]:
    """Map each stored tensor to its slot. Raises ModelLoadError unless they match one to one.

    Optional slots may stay empty, and tensors that map to None are skipped.
    """
    targets = {name: checkpoint_name(name) for name in names}
    wanted = [target for target in targets.values() if target is not None]
    _complain(
        f"{source} has unexpected tensors", [n for n, t in targets.items() if t and t not in slots]
    )
    twice = [name for name, count in Counter(wanted).items() if count > 1]
    _complain(f"{source} has several tensors for", twice)
    given = set(wanted)
    needed = slots_of_one_form(slots, given)
    missing = [n for n, slot in needed.items() if not slot.optional and n not in given]
    _complain(f"{source} lacks tensors", missing)
    _complain(f"{source} has tensors of a second form", [n for n in given if n not in needed])
    return targets


def slots_of_one_form(
    slots: Mapping[str, CheckpointSlot], given: Collection[str] = ()
) -> dict[str, CheckpointSlot]:
    """Leave out the slots of forms that a checkpoint with the tensors `given` does not use.

    Of what may be stored in several forms, it uses the form of the first tensor that is given, or
    else the first form.
    """
    used: dict[str, str] = {}
    for names in ([name for name in slots if name in given], slots):
        for name in names:
            if (form := slots[name].form) is not None:
                used.setdefault(*form)
    return {
        n: slot
        for n, slot in slots.items()
        if slot.form is None or used[slot.form[0]] == slot.form[1]
    }


def check_outlines(model: TextModel, resolved: ResolvedModel) -> None:
    """Raise ModelLoadError unless names and shapes of the checkpoint fit. Reads only headers."""
    if resolved.kind == "dummy":
        return
    slots, checkpoint = model.checkpoint_slots(), open_checkpoint(resolved)
    source = str(resolved.path)
    targets = match_names(slots, checkpoint.names, model.checkpoint_name, source)
    for name, tensor in checkpoint.outlines():
        if (target := targets.get(name)) is not None:
            _check_shape(name, tensor, slots[target], source)


def _check_shape(name: str, tensor: Tensor | StoredRows, slot: CheckpointSlot, source: str) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise ModelLoadError(
            f"tensor {name} of {source} has shape {list(tensor.shape)}, but the config "
            f"requires {list(slot.shape)}."
        )


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let torch use one thread per operation, so that loading threads do not multiply."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _load(slot: CheckpointSlot, name: str, weight: Tensor | StoredRows, check: FiniteCheck) -> None:
    with torch.no_grad():  # the mode is per thread
        check.inspect(name, weight)
        slot.load(weight if slot.takes_rows else widened(weight))


def widened(weight: Tensor | StoredRows) -> Tensor:
    """A stored weight as a float tensor."""
    if isinstance(weight, Tensor):
        return weight
    from .gguf_values import values_of

    return values_of(weight)


def _complain(what: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_MAX_NAMED])
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        raise ModelLoadError(f"{what}: {shown}{more}.")


def load_random(
    slots: Mapping[str, CheckpointSlot],
    device: torch.device,
    seed: int,
    progress: Progress | None = None,
    std: float = 0.02,
) -> None:
    """Fill `slots` with seeded random weights, drawn on the device; norms get ones, biases
    zeros."""
    slots = slots_of_one_form(slots)
    has_memory = device.type != "meta"
    generator = torch.Generator(device).manual_seed(seed) if has_memory else None
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    done, total = 0, sum(math.prod(slot.shape) for slot in slots.values()) * dtype.itemsize
    tell = progress or (lambda done, total: None)
    tell(0, total)
    with torch.no_grad():
        for slot in slots.values():
            tensor = torch.empty(slot.shape, dtype=dtype, device=device)
            if slot.init == "normal" and has_memory:
                tensor.normal_(0, std, generator=generator)
            else:
                tensor.fill_(1.0 if slot.init == "ones" else 0.0)
            slot.load(tensor)
            done += tensor.nbytes
            tell(done, total)
