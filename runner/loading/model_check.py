"""Checks a model before it uses memory: builds it on meta tensors from its config, and compares
sizes with the machine's memory."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from ...kernels.quant.packed import PackedWeight
from ..errors import ModelLoadError, RunnerError, first_line
from ..models.base import TextModel
from ..models.formats.expert_stack import ExpertStack
from ..models.layers import Embedding, Linear, WeightFormat
from ..models.registry import build_model
from .dummy import random_outline
from .inspection import Stored
from .matching import slots_of_one_form
from .quantised.delivery import fitting, own_part
from .weights import ResolvedModel, open_checkpoint

# Exceptions that building or filling a model from a malformed config can raise.
_MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    *(AssertionError, RuntimeError),
)
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class NotEnoughMemory(RunnerError):
    """The model or the configuration needs more memory than the machine has."""


def outline_model(resolved: ResolvedModel, fmt: WeightFormat, max_model_len: int) -> TextModel:
    """Build the model from meta tensors, which use no memory.

    Raises ModelLoadError if the config describes no model that can be built, and NotEnoughMemory
    if the weights are larger than the machine's memory.
    """
    nowhere = WeightFormat(
        torch.device("meta"), fmt.dtype, packed=fmt.packed, ranks=fmt.ranks, experts=fmt.experts
    )
    try:
        model = build_model(resolved.hf_config, nowhere, max_model_len)
    except _MALFORMED as error:
        why = f"{type(error).__name__}: {first_line(error)}".rstrip(": .")
        raise ModelLoadError(
            f"the config of {resolved.path} does not describe a valid model ({why})."
        ) from error
    _refuse_too_large(model, resolved, fmt)
    return model


def weight_bytes(model: TextModel, resolved: ResolvedModel, fmt: WeightFormat) -> int:
    """Bytes of the weights of a model of meta tensors, as they will lie in memory."""
    needed = sum(tensor.nbytes for tensor in {id(b): b for b in model.buffers()}.values())
    if fmt.native and resolved.kind == "gguf" and resolved.opened is not None:
        return sum(resolved.opened.sizes().values()) // (1 if fmt.ranks is None else fmt.ranks.size)
    if fmt.native or fmt.pack_fp16:  # half the memory of float32
        return needed // 2
    if fmt.packed:  # linear layers have no tensors yet
        needed += _bytes_as_stored(model, resolved, fmt)
    return needed


def _refuse_too_large(model: TextModel, resolved: ResolvedModel, fmt: WeightFormat) -> None:
    needed, total = weight_bytes(model, resolved, fmt), memory_of(fmt.device)
    if total is not None and needed > total:
        raise NotEnoughMemory(
            f"the model's weights need {_gib(needed)}, but only {_gib(total)} of memory exist."
        )


def _bytes_as_stored(model: TextModel, resolved: ResolvedModel, fmt: WeightFormat) -> int:
    """Bytes of the weights that have no tensors before they arrive: quantised ones have the size
    that the checkpoint says, or the config if they are random. Reads only headers."""
    total = 0
    for module in model.modules():
        if module is model.lm_head and model.tied:
            continue
        if isinstance(module, Linear) and module.weight is None:
            total += module.out_features * module.in_features * fmt.dtype.itemsize
        elif isinstance(module, ExpertStack) and module.weight is None:
            plain = module.count * module.rows * module.columns * fmt.dtype.itemsize
            total += module.expected_bytes or plain
        elif isinstance(module, Embedding) and module.weight is None:
            total += math.prod(module.shape) * fmt.dtype.itemsize
    slots = model.checkpoint_slots()
    outlines: Iterable[tuple[str, Stored | None]]
    if resolved.kind == "dummy":
        said = resolved.quantisation
        drawn = slots_of_one_form(slots)
        outlines = ((name, random_outline(name, slot, said)) for name, slot in drawn.items())
    else:
        found = open_checkpoint(resolved).outlines()
        outlines = ((model.checkpoint_name(name) or "", weight) for name, weight in found)
    for name, weight in outlines:
        slot = slots.get(name)
        if slot is None or slot.takes_packed is None or slot.optional or weight is None:
            continue
        given = fitting(slot, weight, fmt.device)
        if slot.cut is not None:
            given = own_part(slot, given, slot.cut)
        if isinstance(given, PackedWeight):
            total += given.nbytes - math.prod(given.shape) * fmt.dtype.itemsize
    return total


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory of the GPU, or of the machine as far as this process may use it.

    None if unknown.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type != "cpu":
        return None
    limits = [int(psutil.virtual_memory().total)]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    return min(limit for limit in limits if limit > 0)


def used_memory(device: torch.device) -> int:
    """Bytes of the GPU's memory that are in use, by any process; 0 for other devices."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def refuse_large_cache(size: int | None, device: torch.device) -> None:
    """Raise NotEnoughMemory if --kv-cache-memory-bytes exceeds the memory."""
    total = memory_of(device)
    if size is not None and total is not None and size > total:
        raise NotEnoughMemory(
            f"--kv-cache-memory-bytes {size} ({_gib(size)}) exceeds the memory of {_gib(total)}"
        )


@contextmanager
def memory_faults(doing: str) -> Iterator[None]:
    """Turn out-of-memory errors inside into NotEnoughMemory. `doing` completes "memory for ..."."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _is_of_memory(error):
            raise
        raise NotEnoughMemory(
            f"there is not enough memory for {doing}: use a smaller model, or lower "
            "--kv-cache-memory-bytes, --max-num-seqs, --max-num-batched-tokens or --max-model-len"
        ) from error


def _is_of_memory(error: BaseException) -> bool:
    # torch's messages on a CPU for memory and for mapping a file; on a GPU it says more
    text = str(error)
    return "can't allocate memory" in text or "Cannot allocate memory" in text


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
