"""What all layers of a pass with sparse attention share: the rows that tokens see."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ....kernels.attention.compressed.pages import (
    Pages,
    SlotList,
    TokenRows,
    entry_slots,
    requests_of,
    window_slots,
)
from ...attention.base import AttentionLayer, AttentionState, SparseAttend


@dataclass(frozen=True)
class Tables:
    """The rotary tables, [positions, rot_dim] float32."""

    main: Tensor  # of layers without a compressor
    compressed: Tensor  # of all others


class ListedRows:
    """One pass. Lists of rows are computed once, and its attention is planned once; a later pass
    makes its own, because lengths have changed by then (vllm#42444)."""

    def __init__(self, positions: Tensor, attention: AttentionState, layer_id: int) -> None:
        """positions: [M]; `layer_id`: any attention layer of the model."""
        starts = attention.compressed(layer_id).common.query_start_loc
        self.tokens = TokenRows(positions, requests_of(starts, positions.shape[0]))
        self.attention = attention
        self._lists: dict[tuple[int, int], SlotList] = {}  # by KV group, and width
        self._attend: dict[int, SparseAttend] = {}  # by KV group of the entries, or of raw rows

    def pages(self, layer: AttentionLayer) -> Pages:
        return self.attention.pages(layer.layer_id)

    def window(self, layer: AttentionLayer) -> SlotList:
        """The raw rows that each token sees."""
        assert layer.sliding_window is not None
        key = (self.attention.group_of_layer[layer.layer_id], layer.sliding_window)
        if key not in self._lists:
            self._lists[key] = window_slots(self.pages(layer), self.tokens, layer.sliding_window)
        return self._lists[key]

    def most_entries(self, layer: AttentionLayer) -> int:
        """A bound on the entries of a request."""
        common = self.attention.compressed(layer.layer_id).common
        return common.max_seq_len // layer.entry_tokens

    def all_entries(self, layer: AttentionLayer) -> SlotList:
        """All entries that each token sees."""
        most = self.most_entries(layer)
        key = (self.attention.group_of_layer[layer.layer_id], most)
        if key not in self._lists:
            self._lists[key] = entry_slots(self.pages(layer), self.tokens, most)
        return self._lists[key]

    def attend(self, layer: AttentionLayer) -> SparseAttend:
        """The attention function for layers whose entries, or else raw rows, are `layer`."""
        group = self.attention.group_of_layer[layer.layer_id]
        if group not in self._attend:
            self._attend[group] = self.attention.compressed(layer.layer_id).create_attend()
        return self._attend[group]


class Step(ListedRows):
    """One pass of DeepSeek V4, which chooses some experts by token id."""

    def __init__(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionState, layer_id: int
    ) -> None:
        super().__init__(positions, attention, layer_id)
        self.input_ids = input_ids  # [M]
