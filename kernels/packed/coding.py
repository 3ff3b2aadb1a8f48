"""The layout of a coded row, see `packed.coded`."""

from __future__ import annotations

from dataclasses import dataclass

SPAN = 128  # columns of a span: those of a group that shares a scale


@dataclass(frozen=True)
class Coding:
    """What a layer wants its input rows to be coded as."""

    columns: int  # K
    by_group: bool  # a scale for each 128 columns, else one for the row

    @property
    def spans(self) -> int:
        return -(-self.columns // SPAN)

    @property
    def num_codes(self) -> int:
        """Bytes of codes of a row."""
        return self.spans * SPAN

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 16."""
        scales = self.spans if self.by_group else 1
        return self.num_codes + -(-4 * scales // 16) * 16
