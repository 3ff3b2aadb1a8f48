"""Reads parts of files into tensors on a device, as fast as the disk allows.

Threads read large pieces into pinned memory, from which the GPU copies one piece while others are
being read. (A mapped file would be paged in and copied again by a single thread.) It knows no file
format.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from ..parallel.ranks import Cut

_PIECE_BYTES = 8 << 20
_NUM_READERS = 8  # one core copies about 5 GB/s out of the page cache
_AHEAD_BYTES = 512 << 20  # most bytes read before their tensors are requested


_MIN_ROW_BYTES = 1024  # of a part of a row, for which it is read by itself


@dataclass(frozen=True)
class Stretch:
    """The place of a tensor's bytes in a file.

    If `row_step` is given, they are rows of `row_bytes` that begin `row_step` bytes apart.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int = 0
    row_step: int = 0

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def place(self, at: int) -> tuple[int, int]:
        """The place in the file of byte `at` of the tensor, and how many follow it there."""
        if not self.row_step:
            return self.offset + at, self.num_bytes - at
        row, inside = divmod(at, self.row_bytes)
        return self.offset + row * self.row_step + inside, self.row_bytes - inside


def parts_of(stretch: Stretch, cut: Cut) -> list[Stretch] | None:
    """A part of a tensor by its spans.

    None if rows are cut into such small parts that reading all of them is faster.
    """
    outer, inner = stretch.shape[: cut.dim], stretch.shape[cut.dim + 1 :]
    each = math.prod(inner) * stretch.dtype.itemsize  # bytes of one index of the dimension
    parts = []
    for start, stop in cut.spans:
        part = replace(
            stretch,
            offset=stretch.offset + start * each,
            shape=(*outer, stop - start, *inner),
            row_bytes=(stop - start) * each,
            row_step=stretch.shape[cut.dim] * each,
        )
        if math.prod(outer) == 1:
            part = replace(part, row_bytes=0, row_step=0)
        elif part.row_bytes < _MIN_ROW_BYTES:
            return None
        parts.append(part)
    return parts


class _Lane:
    """A staging buffer that one thread at a time reads through."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        on_cuda = device.type == "cuda"
        self._buffer = torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._bytes = self._buffer.numpy().data
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]

    def fill(
        self, file: int, stretch: Stretch, at: int, target: Tensor, free: torch.cuda.Event | None
    ) -> None:
        """Read the bytes from `at` on into `target`, [n] uint8. Its memory may still be in use
        until the event `free`."""
        done, size = 0, len(target)
        while done < size:
            offset, most = stretch.place(at + done)
            count = os.preadv(file, [self._bytes[done : min(size, done + most)]], offset)
            if not count:
                raise OSError("the file ends before the tensor does")
            done += count
        if self._stream is None or free is None:
            target.copy_(self._buffer[:size])
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            target.copy_(self._buffer[:size], non_blocking=True)
        self._stream.synchronize()


def read_tensors(
    stretches: Sequence[Stretch],
    device: torch.device,
    num_readers: int = _NUM_READERS,
    piece_bytes: int = _PIECE_BYTES,
    ahead_bytes: int = _AHEAD_BYTES,
    count: Callable[[int, int], None] = lambda index, num_bytes: None,
) -> Iterator[Tensor]:
    """Yield each stretch as a tensor on `device`, in order, reading some ahead.

    `count` is called with a stretch's place in the list and the bytes of it that were read.
    Raises OSError if a file cannot be read or is too short.
    """
    lanes: SimpleQueue[_Lane] = SimpleQueue()
    for _ in range(num_readers):
        lanes.put(_Lane(device, piece_bytes))

    def fill(
        file: int, stretch: Stretch, at: int, target: Tensor, free: torch.cuda.Event | None
    ) -> None:
        lane = lanes.get()
        try:
            with torch.inference_mode():  # the mode is per thread
                lane.fill(file, stretch, at, target, free)
        finally:
            lanes.put(lane)

    with ExitStack() as opened:
        files: dict[Path, int] = {}
        readers = ThreadPoolExecutor(num_readers, "read-weights")
        opened.callback(readers.shutdown, cancel_futures=True)
        pending: deque[tuple[Tensor, list[Future[None]]]] = deque()
        started = num_pending = 0
        while pending or started < len(stretches):
            while started < len(stretches) and (not pending or num_pending < ahead_bytes):
                stretch = stretches[started]
                if stretch.path not in files:
                    files[stretch.path] = os.open(stretch.path, os.O_RDONLY)
                    opened.callback(os.close, files[stretch.path])
                tensor, flat, free = _allocate(stretch, device)
                pieces = [
                    readers.submit(
                        fill,
                        files[stretch.path],
                        stretch,
                        at,
                        flat[at : at + piece_bytes],
                        free,
                    )
                    for at in range(0, len(flat), piece_bytes)
                ]
                pending.append((tensor, pieces))
                num_pending += stretch.num_bytes
                started += 1
            tensor, pieces = pending.popleft()
            index = started - len(pending) - 1
            for number, piece in enumerate(pieces):
                piece.result()
                count(index, min(piece_bytes, tensor.nbytes - number * piece_bytes))
            num_pending -= tensor.nbytes
            yield tensor


def _allocate(
    stretch: Stretch, device: torch.device
) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
    """Allocate a tensor: (tensor, its bytes [n], the event after which its memory is free).

    The allocator may return memory that a running kernel still uses; the event waits for it.
    """
    tensor = torch.empty(stretch.shape, dtype=stretch.dtype, device=device)
    free = None
    if device.type == "cuda":
        free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        free.record()
    return tensor, tensor.reshape(-1).view(torch.uint8), free
