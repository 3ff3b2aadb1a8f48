"""Copies tensors to the host while the GPU continues, through reused pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class CopyStream:
    """The stream that copies results to the host, after the stream that computes them.

    Created once, by the thread that launches steps. Asking torch for the current stream, pinned
    memory and a stream context in every step would cost a small model a tenth of its step time.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.main = torch.cuda.current_stream()  # the stream of the steps
        self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.pinned = PinnedPool()

    def copy(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> torch.cuda.Event:
        """Copy `tensors` to `hosts` after all work launched so far; the event marks the end."""
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
    """Page-locked host tensors for reuse, by type and row shape. It grows with demand."""

    def __init__(self, pin: bool = True) -> None:
        self._pin = pin
        self._free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """An uninitialised tensor of the type and shape of `like`, perhaps with more rows."""
        if like.dim() == 0:
            return torch.empty((), dtype=like.dtype, pin_memory=self._pin)
        rows, free = like.shape[0], self._free.get((like.dtype, like.shape[1:]), [])
        while free:
            tensor = free.pop()
            if tensor.shape[0] >= rows:
                return tensor
        # Powers of two, so that few sizes exist. A tensor that was too small has been dropped.
        size = (1 << max(0, rows - 1).bit_length(), *like.shape[1:])
        return torch.empty(size, dtype=like.dtype, pin_memory=self._pin)

    def give(self, tensor: Tensor) -> None:
        """Return a tensor for reuse. No copy may still write it, and nobody may still read it."""
        if tensor.dim():
            self._free.setdefault((tensor.dtype, tensor.shape[1:]), []).append(tensor)


class HostCopy:
    """A copy of tensors to the host in progress. Keeps its sources alive until it has ended."""

    def __init__(self, tensors: Sequence[Tensor], stream: CopyStream | None) -> None:
        """Start the copies on `stream`; CPU tensors need no copy."""
        self._sources: Sequence[Tensor] = tensors
        # At the end of the copy; before it, the sources must not change. None on a CPU.
        self.event: torch.cuda.Event | None = None
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
            self.event = stream.copy(tensors, self._host)

    def wait(self) -> list[Tensor]:
        """Wait for the copy and return the host tensors."""
        if self.event is not None:
            self.event.synchronize()
        self._sources = ()
        return self._host

    def release(self) -> None:
        """Let the memory of the host tensors be reused.

        Call after `wait`, and read them no more.
        """
        if self._pool is not None:
            for taken in self._taken:
                self._pool.give(taken)
        self._pool, self._taken, self._host = None, [], []
