"""Owns what is checked before a model takes memory: its shape, from its config and the headers of
its files, against both and against the memory that there is."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from ..errors import ModelLoadError, RunnerError, first_line
from ..models.base import TextModel
from ..models.layers import WeightFormat
from ..models.registry import build_model
from .weights import ResolvedModel

# What building or filling a model of odd numbers ends in.
_ODD_CONTENT = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    *(AssertionError, RuntimeError),
)
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class NotEnoughMemory(RunnerError):
    """The machine has less memory than the server was told to use."""


def outline_model(resolved: ResolvedModel, fmt: WeightFormat, max_model_len: int) -> TextModel:
    """The model of meta tensors, which takes no memory.

    ModelLoadError if the config describes no model that can be built; NotEnoughMemory if its
    weights are larger than the memory of the machine.
    """
    nowhere = replace(fmt, device=torch.device("meta"), pack_fp16=False, linear=None)
    try:
        model = build_model(
            resolved.hf_config, nowhere.device, nowhere.dtype, max_position=max_model_len
        )
    except _ODD_CONTENT as error:
        why = f"{type(error).__name__}: {first_line(error)}".rstrip(": .")
        raise ModelLoadError(
            f"the config of {resolved.path} does not describe a model that can be built ({why})."
        ) from error
    _refuse_too_large(model, fmt)
    return model


def _refuse_too_large(model: TextModel, fmt: WeightFormat) -> None:
    needed = sum(tensor.nbytes for tensor in {id(b): b for b in model.buffers()}.values())
    total = memory_of(fmt.device)
    # Packed for a CPU, weights take half of what they do in float32.
    if total is not None and needed // (2 if fmt.pack_fp16 else 1) > total:
        raise NotEnoughMemory(
            f"the model's weights need {_gib(needed)}, but there are only {_gib(total)} of memory."
        )


def memory_of(device: torch.device) -> int | None:
    """Bytes that the GPU has, or that this process may use of the machine's; None if unknown."""
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


def refuse_large_cache(size: int | None, device: torch.device) -> None:
    """NotEnoughMemory if --kv-cache-memory-bytes is more than there is."""
    total = memory_of(device)
    if size is not None and total is not None and size > total:
        raise NotEnoughMemory(
            f"--kv-cache-memory-bytes {size} ({_gib(size)}) is more than the {_gib(total)} of "
            "memory that there are"
        )


@contextmanager
def memory_faults(doing: str) -> Iterator[None]:
    """Turn what running out of memory raises into one sentence: it happened while `doing` this."""
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
    return "can't allocate memory" in str(error)  # torch's words on a CPU; on a GPU it says more


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
