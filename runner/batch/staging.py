"""The pinned host buffers through which a step's small arrays are copied to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
