"""Copies tensors between host and GPU while both go on, through reused pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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


_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class StagingPool:
    """Copies host arrays to the device without waiting.

    A pinned buffer is reused only after the copy from it has ended, so the pool grows to what the
    steps in flight need. On the CPU no staging is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy: list[tuple[torch.cuda.Event, Tensor]] = []  # oldest first
        self._free: list[Tensor] = []

    def upload(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copy `array` to the device on the current stream, into `out` if given, and return it."""
        if self._device.type in ("cpu", "meta"):
            host = torch.from_numpy(array)
            return host.to(self._device) if out is None else out.copy_(host)
        nbytes = array.nbytes
        pinned = self._take(nbytes)
        host = pinned[:nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        host.copy_(torch.from_numpy(array))
        if out is None:
            out = torch.empty(array.shape, dtype=host.dtype, device=self._device)
        out.copy_(host, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._busy.append((event, pinned))
        return out

    def _take(self, nbytes: int) -> Tensor:
        """A pinned buffer of at least `nbytes` that no pending copy reads."""
        while self._busy and self._busy[0][0].query():  # type: ignore[no-untyped-call]
            self._free.append(self._busy.pop(0)[1])
        for index, pinned in enumerate(self._free):
            if pinned.numel() >= nbytes:
                return self._free.pop(index)
        size = max(4096, 1 << (nbytes - 1).bit_length())  # powers of two, so that few sizes exist
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
