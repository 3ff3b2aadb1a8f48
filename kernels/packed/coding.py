"""The layout of a coded row, see `packed.coded`."""

from __future__ import annotations

from dataclasses import dataclass

SPAN = 128  # columns of a span: those of a group that shares a scale


@dataclass(frozen=True)
class Coding:
    """What a layer wants its input rows to be coded as."""

    columns: int  # K
    by_group: bool  # a scale for each 128 columns, else one for the row
    # The codes of all rows, then the scales of the first group of all rows, and so on, as torch
    # wants them. The rows of the tensor are not those of the input then, only as many.
    planar: bool = False

    def in_planes(self, num_rows: int) -> int:
        """Rows of planes for `num_rows` rows. With scales of groups, torch wants a multiple of 4;
        the rows that this adds may hold anything."""
        return -(-num_rows // 4) * 4 if self.by_group else num_rows

    @property
    def spans(self) -> int:
        return -(-self.columns // SPAN)

    @property
    def num_codes(self) -> int:
        """Bytes of codes of a row."""
        return self.spans * SPAN

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; a multiple of 16, unless it is planar."""
        scales = 4 * (self.spans if self.by_group else 1)
        return self.num_codes + (scales if self.planar else -(-scales // 16) * 16)

    def width(self, num_rows: int) -> int:
        """Bytes of a row of a tensor that holds `num_rows`; a multiple of 4."""
        if not self.planar:
            return self.row_bytes
        words = self.in_planes(num_rows) * self.row_bytes // 4
        return 4 * -(-words // max(num_rows, 1))

    @property
    def code_stride(self) -> int:
        """Bytes from the codes of a row to those of the next."""
        return self.num_codes if self.planar else self.row_bytes

    def scales_at(self, num_rows: int) -> tuple[int, int]:
        """Where the first row's scales are, and the next row's after them, in float32."""
        if self.planar:
            return self.in_planes(num_rows) * self.num_codes // 4, 1
        return self.num_codes // 4, self.row_bytes // 4
