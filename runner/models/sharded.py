"""Layers of which each rank holds a part: outputs or inputs of projections, rows of tables.

The functions return the plain layers of `layers` for a model on one rank. Layers that are split by
outputs need no communication; those split by inputs add up what the ranks computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cpu.formats import StoredRows, with_zeros
from ...kernels.linear.head_sample import Draws, best_of_part, best_of_parts
from ...kernels.linear.linear import Norm
from ...kernels.packed.coded import Coding
from ...kernels.quant.packed import PackedWeight
from ...kernels.quant.part import with_empty_rows
from ..parallel.ranks import Cut, Ranks, stacked
from .formats.packed import Part
from .layers import CheckpointSlot, Embedding, Linear, WeightFormat, tensor_slot


def column_linear(
    in_features: int,
    outputs: int | Mapping[str, int],
    fmt: WeightFormat,
    bias: bool = False,
    role: str = "other",
    *,
    what: str = "intermediate features",
    groups: int | Mapping[str, int] | None = None,
) -> Linear:
    """A `Linear` with this rank's share of the outputs, or of the outputs of each fused part.

    `outputs` counts those of all ranks. They may be `groups` that are not divided, such as heads;
    `what` names them in errors.
    """
    if fmt.ranks is None:
        return Linear(in_features, outputs, fmt, bias, role)
    shards = {"": outputs} if isinstance(outputs, int) else dict(outputs)
    counts = groups if isinstance(groups, Mapping) else dict.fromkeys(shards, groups)
    cuts = {name: fmt.ranks.share(total, what, counts.get(name)) for name, total in shards.items()}
    return ColumnLinear(in_features, shards, cuts, fmt, bias, role)


def qkv_linear(
    hidden: int,
    heads: tuple[int, int],  # query heads and KV heads of all ranks
    head_dim: int,
    fmt: WeightFormat,
    bias: bool = False,
    role: str = "other",
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    gated: bool = False,
) -> Linear:
    """The fused projection of queries, keys and values, divided by heads.

    `names` may leave out keys and values. If `gated`, each query head has a gate as well.
    """
    queries, kv_heads = heads
    sizes = ((2 if gated else 1) * queries * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    shards = dict(zip(names, sizes, strict=False))
    groups = dict(zip(names, (queries, kv_heads, kv_heads), strict=False))
    return column_linear(hidden, shards, fmt, bias, role, what="heads", groups=groups)


def stacked_linear(
    in_features: int,
    sections: Sequence[tuple[int, int]],
    fmt: WeightFormat,
    role: str,
    what: str,
) -> Linear:
    """As `column_linear`, for a matrix whose outputs are several sections: (outputs, groups)."""
    totals = [total for total, _ in sections]
    if fmt.ranks is None:
        return Linear(in_features, sum(totals), fmt, False, role)
    cuts = [fmt.ranks.share(total, what, groups) for total, groups in sections]
    return StackedLinear(in_features, totals, cuts, fmt, False, role)


def row_linear(
    in_features: int,
    outputs: int,
    fmt: WeightFormat,
    bias: bool = False,
    role: str = "other",
    *,
    what: str = "intermediate features",
    groups: int | None = None,
    sums: bool = True,
) -> Linear:
    """A `Linear` with this rank's share of the inputs.

    Without `sums`, its output is this rank's part of the sum, which the caller must add up.
    """
    if fmt.ranks is None:
        return Linear(in_features, outputs, fmt, bias, role)
    cut = fmt.ranks.share(in_features, what, groups, dim=1)
    return RowLinear(in_features, outputs, cut, fmt.ranks, sums, fmt, bias, role)


def input_linear(
    in_features: int, outputs: int, fmt: WeightFormat, bias: bool = False, sums: bool = True
) -> Linear:
    """As `row_linear`, for an input that every rank has whole: each reads its own columns of it."""
    if fmt.ranks is None:
        return Linear(in_features, outputs, fmt, bias)
    cut = fmt.ranks.share(in_features, "input features", dim=1)
    return InputLinear(in_features, outputs, cut, fmt.ranks, sums, fmt, bias, "other")


class ColumnLinear(Linear):
    """A part of the outputs of a linear layer."""

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],  # outputs on all ranks, by name
        cuts: Mapping[str, Cut],
        fmt: WeightFormat,
        bias: bool,
        role: str,
    ) -> None:
        own = {name: cuts[name].size for name in shards}
        super().__init__(in_features, own, fmt, bias, role)
        self.totals, self.cuts = dict(shards), dict(cuts)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        own = dict(super().checkpoint_slots(parent, name))
        for shard, total in self.totals.items():
            for kind in ("weight", "bias"):
                path = f"{parent}{shard or name}.{kind}"
                if (slot := own.get(path)) is not None:
                    whole = (total, *slot.shape[1:])
                    yield path, replace(slot, shape=whole, cut=self.cuts[shard])


class StackedLinear(Linear):
    """A part of each section of the outputs of a linear layer that is stored as one matrix."""

    def __init__(
        self, in_features: int, totals: Sequence[int], cuts: Sequence[Cut], *rest: Any
    ) -> None:
        super().__init__(in_features, sum(cut.size for cut in cuts), *rest)
        self.totals, self.cuts = list(totals), list(cuts)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        cut = stacked(list(zip(self.totals, self.cuts, strict=True)))
        for path, slot in super().checkpoint_slots(parent, name):
            yield path, replace(slot, shape=(sum(self.totals), *slot.shape[1:]), cut=cut)


class RowLinear(Linear):
    """A part of the inputs of a linear layer, whose outputs are summed over the ranks."""

    def __init__(
        self,
        in_features: int,  # on all ranks
        outputs: int,
        cut: Cut,
        ranks: Ranks,
        sums: bool,
        fmt: WeightFormat,
        bias: bool,
        role: str,
    ) -> None:
        super().__init__(cut.size, outputs, fmt, bias, role)
        self.total, self.cut, self.ranks, self.sums = in_features, cut, ranks, sums

    def own(self, x: Tensor) -> Tensor:
        """The inputs [M, in_features] of this rank among those that every method takes."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(self.own(x))
        return self.ranks.sum(out) if self.sums else out

    def parts(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        assert norm is None, "a norm of a part of the features is not a norm of all"
        if not self.adds(x.shape[0]):
            return self.forward(x)
        return self.ranks.sum_parts(super().parts(self.own(x)), self.format.dtype)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if not self.adds(x.shape[0]):
            return residual + self.forward(x)
        return self.ranks.sum_parts(super().parts(self.own(x)), self.format.dtype, residual)

    def gated(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("an activation of a part of a sum is not that of the sum")

    def pick(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("the largest part of a sum is not the largest sum")

    @property
    def can_pick(self) -> bool:
        return False

    def norms(self, num_rows: int) -> bool:
        return False

    def adds(self, num_rows: int) -> bool:
        return self.sums and self.ranks.adds(num_rows, self.out_features, self.format.dtype)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        for path, slot in super().checkpoint_slots(parent, name):
            if path.endswith(".weight"):
                yield path, replace(slot, shape=(slot.shape[0], self.total), cut=self.cut)
            else:
                yield path, slot

    def _load_bias(self, shard: str, part: slice, tensor: Tensor) -> None:
        # The sum over ranks must hold the bias once.
        once = tensor if self.ranks.rank == 0 else torch.zeros_like(tensor)
        super()._load_bias(shard, part, once)


class InputLinear(RowLinear):
    """A `RowLinear` that takes this rank's inputs out of those of all ranks."""

    def own(self, x: Tensor) -> Tensor:
        """x: [M, in_features of all ranks] -> [M, in_features]."""
        return self.cut.of(x).contiguous()

    def coding(self, num_rows: int) -> Coding | None:
        return None  # codes of whole rows are not cut


def vocabulary_cut(ranks: Ranks, num_rows: int) -> Cut:
    """The rows of a table or head that a rank holds, of equal numbers; those from `num_rows` on
    are padding."""
    each = -(-num_rows // ranks.size)
    return Cut(0, ranks.rank * each, (ranks.rank + 1) * each)


def _stored(cut: Cut, num_rows: int) -> Cut:
    """The rows of a cut that a checkpoint has."""
    stop = min(cut.stop, num_rows)
    return Cut(0, min(cut.start, stop), stop)


def _filled(rows: Any, num_rows: int) -> Any:
    """A matrix with rows of zeros below its own, `num_rows` in all."""
    if isinstance(rows, PackedWeight):
        return with_empty_rows(rows, num_rows)
    missing = num_rows - rows.shape[0]
    if not missing:
        return rows
    if isinstance(rows, StoredRows):
        return with_zeros(rows, missing)
    return F.pad(rows, (0, 0, 0, missing))


class SplitHead(Linear):
    """An output head of which each rank computes a part of the vocabulary.

    Every rank gets all logits, or where tokens are drawn without them, the best token of each part;
    with equal bits, so that all ranks draw the same tokens.
    """

    def __init__(self, hidden: int, vocab_size: int, fmt: WeightFormat) -> None:
        assert fmt.ranks is not None
        cut = vocabulary_cut(fmt.ranks, vocab_size)
        super().__init__(hidden, cut.size, fmt, role="head")
        self.vocab_size, self.ranks, self.cut = vocab_size, fmt.ranks, cut

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.side_by_side(super().forward(x), self.vocab_size)

    def pick(
        self, x: Tensor, num_outputs: int | None = None, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor]:
        logits, first = super().forward(x), self.cut.start
        count = min(self.cut.stop, num_outputs or self.vocab_size) - first
        if count > 0:
            own = best_of_part(logits[:, :count], draws, first)
        else:  # this part is padding
            own = logits.new_full((len(x), 3), float("-inf"), dtype=torch.float32)
        return best_of_parts(self.ranks.gather(own))

    @property
    def can_pick(self) -> bool:
        return True

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        for path, slot in super().checkpoint_slots(parent, name):
            whole = (self.vocab_size, self.in_features)
            yield path, replace(slot, shape=whole, cut=_stored(self.cut, self.vocab_size))

    def _load_weight(self, shard: str, part: slice, tensor: Tensor) -> None:
        super()._load_weight(shard, part, _filled(tensor, self.cut.size))

    def _load_native(self, shard: str, weight: Tensor | StoredRows) -> None:
        super()._load_native(shard, _filled(weight, self.cut.size))

    def use_part(self, shard: str, weight: Part) -> None:
        super().use_part(shard, _filled(weight, self.cut.size))


class SplitEmbedding(Embedding):
    """An embedding table of which each rank holds some rows; their sum is each token's row."""

    whole = False

    def __init__(self, num_rows: int, size: int, fmt: WeightFormat) -> None:
        assert fmt.ranks is not None
        cut = vocabulary_cut(fmt.ranks, num_rows)
        super().__init__(cut.size, size, fmt)
        self.num_rows, self.ranks, self.cut = num_rows, fmt.ranks, cut

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self.cut.start
        absent = (own < 0) | (own >= self.cut.size)
        rows = super().forward(own.masked_fill(absent, 0))
        return self.ranks.sum(rows.masked_fill(absent.unsqueeze(-1), 0))

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        for path, slot in super().checkpoint_slots(parent, name):
            whole = (self.num_rows, self.shape[1])
            yield path, replace(slot, shape=whole, cut=_stored(self.cut, self.num_rows))

    def _load(self, table: Part | StoredRows) -> None:
        super()._load(_filled(table, self.cut.size))


def table(num_rows: int, size: int, fmt: WeightFormat) -> Embedding:
    kind = Embedding if fmt.ranks is None else SplitEmbedding
    return kind(num_rows, size, fmt)


def head(hidden: int, vocab_size: int, fmt: WeightFormat) -> Linear:
    if fmt.ranks is None:
        return Linear(hidden, vocab_size, fmt, role="head")
    return SplitHead(hidden, vocab_size, fmt)


def split_tensor(target: Tensor, total: int, cut: Cut) -> CheckpointSlot:
    """The slot of a tensor that holds the rows `cut` of a checkpoint's `total`."""
    return replace(tensor_slot(target), shape=(total, *target.shape[1:]), cut=cut)
