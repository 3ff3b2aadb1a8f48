"""Sums of small tensors over GPUs of one machine that read each other's memory over NVLink.

NCCL spends more time on starting a small sum than on the sum. Here every GPU writes its part to
memory that all can read (torch's symmetric memory), waits for the others' signal, and adds up all
parts itself. Every GPU adds in the same order, so that all get the same bits. NVLink multicast is
not used.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..process import end_now

logger = logging.getLogger(__name__)

Way = Literal["one_shot", "two_shot", "nccl"]
GiveUp = Callable[[str], object]  # ends the process; takes a sentence that says why
_DTYPES = (torch.bfloat16, torch.float32)  # which torch's kernels add
_KIB = 1 << 10
# Bytes up to which a GPU reads all parts whole ("one shot"), by the number of GPUs. Each part is
# read by every other GPU, so that the limit falls with their number.
_ONE_SHOT_BYTES = {2: 1024 * _KIB, 3: 512 * _KIB, 4: 512 * _KIB}
_ONE_SHOT_OF_MANY = 256 * _KIB
# Up to here a GPU adds up its share of the parts, and all read the shares ("two shots"). With two
# GPUs that moves as many bytes as one shot does.
_TWO_SHOT_BYTES = 4096 * _KIB
_MAX_SIZE = 8  # GPUs
_TRIAL = 4096  # numbers
_TRIAL_SECONDS = 120.0  # it takes less than one


def way_of(size: int, num_bytes: int, dtype: torch.dtype) -> Way:
    """How `size` GPUs add up tensors of `num_bytes`."""
    if dtype not in _DTYPES or not 2 <= size <= _MAX_SIZE or num_bytes % 16 or not num_bytes:
        return "nccl"
    if num_bytes <= _ONE_SHOT_BYTES.get(size, _ONE_SHOT_OF_MANY):
        return "one_shot"
    return "two_shot" if size > 2 and num_bytes <= _TWO_SHOT_BYTES else "nccl"


class SmallSums:
    """Sums through symmetric memory, on one stream at a time. May be recorded in graphs."""

    def __init__(self, size: int, buffer: Tensor, group: str) -> None:
        """buffer: uint8, symmetric memory that the ranks of `group` have exchanged."""
        self._size, self._group = size, group
        self._buffers = {dtype: buffer.view(dtype) for dtype in _DTYPES}
        self._ops: Any = torch.ops.symm_mem

    def sum(self, x: Tensor) -> Tensor | None:
        """The sum of x, contiguous, over the ranks; None if NCCL is faster or must add it."""
        way = way_of(self._size, x.nbytes, x.dtype)
        return None if way == "nccl" else self.by(way, x)

    def by(self, way: Way, x: Tensor) -> Tensor:
        """The sum by one of the ways, except "nccl"."""
        count = x.numel()
        shared = self._buffers[x.dtype].narrow(0, 0, count).view(x.shape)
        out: Tensor
        if way == "one_shot":  # the kernel copies x into the shared memory itself
            out = self._ops.one_shot_all_reduce_copy(shared, x, "sum", self._group)
            return out
        shared.copy_(x)
        out = torch.empty_like(x)
        self._ops.two_shot_all_reduce_out(shared, "sum", self._group, out)
        return out


def open_small_sums(
    size: int,
    device: torch.device,
    least: Callable[[Sequence[int]], list[int]],
    group: Any = None,
    give_up: GiveUp | None = None,
) -> SmallSums | None:
    """Exchange memory with the other ranks of a process group, and try it out.

    `least`: see `Communicator`; group: None for all ranks; `give_up`: see `all_can`. All ranks
    return None, and log why, if one of them cannot.
    """
    if device.type != "cuda" or not 2 <= size <= _MAX_SIZE:
        return None
    host = crc32(socket.gethostname().encode())
    lowest, highest = least([host, -host])
    if lowest != -highest:  # memory cannot be shared between machines
        return None
    # Every rank sees its own GPU as the first one, which torch would take for one GPU that all use.
    # With this setting torch makes no multicast objects either.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    made: list[Any] = []

    def allocate() -> None:
        import torch.distributed._symmetric_memory as symmetric

        made.append(symmetric)
        made.append(symmetric.empty(_TWO_SHOT_BYTES, dtype=torch.uint8, device=device))
        numbers = torch.arange(_TRIAL, device=device, dtype=torch.float32)
        made.append(numbers * (dist.get_rank(group) + 1))
        made.append(numbers * (size * (size + 1) // 2))

    def exchange() -> None:
        symmetric, buffer = made[:2]
        own: Any = dist.group.WORLD if group is None else group
        symmetric.rendezvous(buffer, own.group_name)
        made.append(SmallSums(size, buffer, own.group_name))

    def try_out() -> None:
        x, expected, small = made[2:]
        ways: list[Way] = ["one_shot", "two_shot"]
        found = [small.by(way, x) for way in ways]  # all, as the other ranks wait in each
        if not all(torch.equal(got, expected) for got in found):
            raise RuntimeError("the sums are wrong")

    if not all_can(
        (allocate, exchange, try_out),
        least,
        "small sums over the GPUs go through NCCL, which is slower",
        "another rank could not share its memory",
        give_up=give_up,
    ):
        return None
    small: SmallSums = made[-1]
    return small


def all_can(
    steps: Sequence[Callable[[], None]],
    least: Callable[[Sequence[int]], list[int]],
    loss: str,
    other: str,
    *,
    seconds: float | None = _TRIAL_SECONDS,
    give_up: GiveUp | None = None,
) -> bool:
    """Whether every rank can take all steps, one after the other; `least`: see `Communicator`.

    At the first step that some rank cannot take, all return False and log what is lost, `loss`, and
    why; `other` is the reason on ranks that could take it. A rank that waits for another one in a
    step cannot be stopped: after `seconds` in all, it calls `give_up` in a thread with a sentence
    for the server, and ends the process, and with it its kernels. Steps without a limit must not
    wait for other ranks.
    """
    with _limited(seconds, give_up or _end):
        for step in steps:
            fault = _fault(step)
            if not least([fault is None])[0]:
                logger.warning("%s: %s", loss, fault or other)
                return False
    return True


def _end(sentence: str) -> None:
    end_now(1)


@contextmanager
def _limited(seconds: float | None, give_up: GiveUp) -> Iterator[None]:
    """Call `give_up` if what is inside takes longer."""
    if seconds is None:
        yield
        return

    def end() -> None:
        sentence = (
            f"the GPUs did not finish the trial of sums through shared memory within {seconds:g} "
            "seconds; start with --disable-custom-all-reduce"
        )
        logger.critical("%s", sentence)
        give_up(sentence)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _fault(step: Callable[[], None]) -> str | None:
    """Why a step fails, in one line; None if it does not."""
    try:
        step()
    except Exception as error:  # whatever torch, Triton, the driver or a container refuses
        return (
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}"
        )
    return None
