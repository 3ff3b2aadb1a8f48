"""Brings tensors to the host while the device works on, through pinned memory used over again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class CopyStream:
    """The stream on which results leave the device, behind the stream that computes them.

    Made once, where steps are launched: asking torch for the current stream, for pinned memory and
    for a stream's context costs a small model's step a tenth of its time.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.main = torch.cuda.current_stream()  # that computes
        self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.pinned = PinnedPool()

    def copy(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> torch.cuda.Event:
        """Start the copies of what was launched so far; the event is reached when they are done."""
        self._computed.record(self.main)
        self.stream.wait_event(self._computed)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self.stream)
        try:
            for host, source in zip(hosts, tensors, strict=True):
                host.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(self.main)
        copied.record(self.stream)
        return copied


class PinnedPool:
    """Page-locked host tensors by kind, the newest given back first; as many as are in use."""

    def __init__(self, pin: bool = True) -> None:
        self._pin = pin
        self._free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Uninitialised, of the type and shape of `like`, but perhaps with more rows."""
        if like.dim() == 0:
            return torch.empty((), dtype=like.dtype, pin_memory=self._pin)
        rows, free = like.shape[0], self._free.get((like.dtype, like.shape[1:]), [])
        while free:
            tensor = free.pop()
            if tensor.shape[0] >= rows:
                return tensor
        # Powers of two, so that few sizes exist; one that has become too small is dropped.
        size = (1 << max(0, rows - 1).bit_length(), *like.shape[1:])
        return torch.empty(size, dtype=like.dtype, pin_memory=self._pin)

    def give(self, tensor: Tensor) -> None:
        """Let it be taken again: nobody reads it any more, and no copy writes it."""
        if tensor.dim():
            self._free.setdefault((tensor.dtype, tensor.shape[1:]), []).append(tensor)


class HostCopy:
    """Device tensors on their way to the host. Keeps the sources alive until they have arrived."""

    def __init__(self, tensors: Sequence[Tensor], stream: CopyStream | None) -> None:
        """Start the copies on `stream`; CPU tensors need no copy."""
        self._sources: Sequence[Tensor] = tensors
        self._event: torch.cuda.Event | None = None
        self._pool: PinnedPool | None = None
        self._taken: list[Tensor] = []
        self._host = list(tensors)
        if stream is not None:
            self._pool = stream.pinned
            self._taken = [self._pool.take(tensor) for tensor in tensors]
            self._host = [
                taken[: tensor.shape[0]] if tensor.dim() else taken
                for taken, tensor in zip(self._taken, tensors, strict=True)
            ]
            self._event = stream.copy(tensors, self._host)

    @property
    def event(self) -> torch.cuda.Event | None:
        """Until then the sources must stay as they are; None: they may change at once."""
        return self._event

    def wait(self) -> list[Tensor]:
        """The host tensors, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        self._sources = ()
        return self._host

    def release(self) -> None:
        """After `wait`: what it returned is not read any more, and may hold the next results."""
        if self._pool is not None:
            for taken in self._taken:
                self._pool.give(taken)
        self._pool, self._taken, self._host = None, [], []
