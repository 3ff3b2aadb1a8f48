"""Counts the bytes of weights as they are read, and finds weights that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.formats import StoredRows
from ...kernels.quant.packed import PackedWeight

logger = logging.getLogger(__name__)

Stored = Tensor | StoredRows | PackedWeight  # a weight as a checkpoint gives it
Progress = Callable[[int, int], None]  # (bytes done, total bytes)
BytesRead = Callable[[str, int], None]  # (name of a stored tensor, bytes of it that were read)
_PIECE_VALUES = 4 << 20  # values inspected at once, so that they come from the CPU's cache
_PAGE_BYTES = 4096
_PIECE_BYTES = 8 << 20
_PIECE_BLOCKS = 1 << 16
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALES = {  # the bytes of a block that hold its fp16 scale, and its fp16 minimum if it has one
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0, 2)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 4)),
    "Q6_K": (208, 210),
}
_MAX_MESSAGES = 200  # about progress
_MAX_NAMED = 5  # tensor names in a warning


def ignore(name: str, num_bytes: int) -> None:
    """A `BytesRead` for those who do not count."""


class LoadMeter:
    """Counts the bytes of the tensors that are used. Call it from one thread only."""

    def __init__(self, sizes: dict[str, int], progress: Progress | None) -> None:
        """`sizes` holds the stored bytes of each tensor that is used.

        `progress` is called at once with 0, then at most about 200 times, the last time when all
        bytes are counted.
        """
        self._left = dict(sizes)
        self._done = self._told = 0
        self._total = sum(sizes.values())
        self._tell = progress or (lambda done, total: None)
        self._tell(0, self._total)

    def read(self, name: str, num_bytes: int) -> None:
        """Count bytes of a tensor that were just read, and report progress from time to time.

        May be called repeatedly for parts of a tensor. No tensor counts for more than its size, and
        tensors that are not in `sizes` do not count.
        """
        counted = min(num_bytes, self._left.get(name, 0))
        if counted:
            self._left[name] -= counted
            self._done += counted
            is_much = self._done - self._told >= self._total / _MAX_MESSAGES
            if is_much or self._done == self._total:
                self._told = self._done
                self._tell(self._done, self._total)

    def finish(self, name: str) -> None:
        """Count all bytes of a tensor that `read` has not counted: it was read whole."""
        self.read(name, self._left.get(name, 0))


def touch(stored: np.ndarray[Any, Any], name: str, read: BytesRead) -> None:
    """Have the pages of a tensor in a mapped file read, in order, and count them."""
    data = stored.reshape(-1).view(np.uint8)
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        piece[::_PAGE_BYTES].sum()
        read(name, len(piece))


class FiniteCheck:
    """Looks for NaN and infinity in weights. `inspect` may be called from several threads."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._ends: list[tuple[str, Tensor]] = []  # least and greatest value, perhaps on a GPU

    def inspect(self, name: str, weight: Stored) -> None:
        """Note the least and the greatest value, without waiting for the device.

        Both are NaN if one value is. This reads each value once: 20 GB/s on one core. It does
        nothing for meta tensors, integers and 8-bit floats. Of quantised weights it inspects the
        scales.
        """
        if isinstance(weight, PackedWeight):
            for tensor in weight.tensors:
                self.inspect(name, tensor)
            return
        if isinstance(weight, StoredRows):
            pieces = _pieces_of_rows(weight)
        elif weight.is_meta or not weight.is_floating_point() or weight.dtype.itemsize < 2:
            return  # 8-bit floats have no such operation
        else:
            flat = weight.reshape(-1)
            pieces = iter([flat] if weight.is_cuda else torch.split(flat, _PIECE_VALUES))
        ends = [torch.stack(piece.aminmax()).float() for piece in pieces if piece.numel()]
        if ends:
            self._ends.append((name, torch.cat(ends)))

    def report(self) -> list[str]:
        """The names, sorted, of the tensors with values that are not finite.

        If there are any, it logs a warning that names the first five. Waits for the device.
        """
        found = sorted(name for name, ends in self._ends if not bool(ends.isfinite().all()))
        if found:
            shown = ", ".join(found[:_MAX_NAMED])
            more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
            logger.warning(
                "%s holds NaN or infinite weights in %s%s: requests may fail with NaN",
                self._source,
                shown,
                more,
            )
        return found


def _pieces_of_rows(rows: StoredRows) -> Iterator[Tensor]:
    """The floats of a stored matrix: its values, or the scales of its blocks."""
    kind, blocks = rows.type, rows.data.reshape(-1, rows.type.block_bytes)
    if not kind.is_float and kind.name not in _SCALES:
        return  # scales are powers of two
    dtype = _FLOATS.get(kind.name, torch.float16)
    columns = slice(None) if kind.is_float else slice(*_SCALES[kind.name])
    for start in range(0, len(blocks), _PIECE_BLOCKS):
        # A copy, because torch does not accept read-only memory.
        piece = blocks[start : start + _PIECE_BLOCKS, columns].copy()
        yield torch.from_numpy(piece).view(dtype)
