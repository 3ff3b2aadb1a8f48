"""Triton experts whose matrices are quantised, in every format that linear layers have.

It works as `kernels.linear.triton.moe`, but a tile of words becomes tiles of numbers in registers,
so that a step reads 4 to 8 bits of each weight. Products are scaled as in `packed_skinny`: no
weight is rounded, unless a tile has 128 rows or more.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...launch import fits_tma, has_tma, hash_functions, pdl_options, wait_for_inputs
from ...linear.experts import PackedExperts
from ...linear.triton.expert_rows import (
    both_products,
    rows_of,
    store_products,
    work_for,
    work_of,
)
from ...linear.triton.moe import Tiles
from ...linear.triton.one_row_experts import activation_options
from ...quant.tiled import TiledWeight
from ...quant.triton.plane_codes import bits_of_step
from ...quant.triton.plane_scales import factors_of_slices, plane_factors
from ..planes.triton.plane_products import add_planes
from .arguments import scale_arguments
from .packed_products import add_products

_FEW_PROGRAMS = 264  # two for each processor of an H200


@triton.jit
def _load_words(
    source, row, inside, word, num_words, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if TMA:
        words = source.load([row, word])
    else:
        column = word + tl.arange(0, WIDTH)
        at = (row + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * num_words + column[None, :]
        there = inside[:, None]
        if MASKED:
            there = there & (column < num_words)[None, :]
        words = tl.load(source + at, mask=there, other=0)
    return words


@triton.jit
def _load_span(
    source, high_source, row, inside, start, num_words, num_high,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr, KIND: tl.constexpr,
    NARROW: tl.constexpr, TMA: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The words of the span from column `start`; of two planes a tuple, as of `plane_tiles`."""
    if KIND >= 4:
        word = start // 4
        a = _load_words(source, row, inside, word, num_words, BLOCK_N, 16, True, TMA)
        b = _load_words(source, row, inside, word + 16, num_words, BLOCK_N, 16, True, TMA)
        word = start // (256 if KIND == 4 else 128) * 16
        high = _load_words(high_source, row, inside, word, num_high, BLOCK_N, 16, True, TMA)
        tiles = a, b, bits_of_step(high, start, KIND, ASSEMBLY)
    else:
        word = start // SLICES
        tiles = _load_words(source, row, inside, word, num_words, BLOCK_N, WIDTH, NARROW, TMA)
    return tiles


@triton.jit(do_not_specialize=["most"])
def _packed_experts_kernel(
    source,  # descriptor of, or pointer to, the words [E * N, W]; gated: [E * 2 N, W]
    x,  # gated: [T, K]; else [T * k, K] by pair
    bias,  # [E, N] or [E, 2 N]
    experts,  # the fields of `expert_rows.Work`
    counts,
    order,
    pair_weights,
    out,  # gated: [T * k, N] by pair; else [k, T, N]
    most,  # T
    N,
    K,
    num_words,  # W
    scales,  # [groups, E * N / ROW_GROUP]; of "fp4" [E * N, groups]; gated: of 2 N rows each
    zeros,  # [groups, E * N] uint8, or offsets; gated: of 2 N rows each
    channel,  # [E * N] or [E * 2 N], factors of whole rows
    num_groups,
    stride,  # of `scales`
    zero_stride,
    super_scales,  # [ceil(K / 256), rows of `scales`], if `scales` are integers
    super_offsets,
    high_source,  # of two planes: descriptor of, or pointer to, the words of the second
    num_high,  # their words of a row
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,  # programs that share the rows of an expert
    ONE_ROW: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # groups in WIDTH * SLICES columns; 0 = the scales are in `channel`
    E8M0: tl.constexpr,
    STORED: tl.constexpr,  # of small groups, see `plane_scales`
    ZEROS: tl.constexpr,  # 0 = none, 1 = zeros, 2 = offsets
    CHANNEL: tl.constexpr,
    NARROW: tl.constexpr,  # WIDTH words are of 4 spans of 64 columns
    ASSEMBLY: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of N, candidate, split): the tile's weights times its share of the rows."""
    wait_for_inputs(PDL)
    candidate = tl.program_id(1)
    expert, count = work_of(experts, counts, candidate, ONE_ROW)
    begin = tl.program_id(2) * BLOCK_M
    if begin >= count:
        return
    COLUMNS: tl.constexpr = WIDTH * SLICES
    X_WIDTH: tl.constexpr = GROUP if KIND >= 4 else WIDTH
    HALVES: tl.constexpr = 2 if GATED else 1
    n_start = tl.program_id(0) * BLOCK_N
    n = n_start + tl.arange(0, BLOCK_N)
    first_row = expert * (HALVES * N) + n_start
    row_n = first_row + tl.arange(0, BLOCK_N)
    inside_n = n < N
    sizes = stride, zero_stride, num_groups, super_scales, super_offsets
    FACTORS: tl.constexpr = (KIND, GROUPS, GROUP, ROW_GROUP, ZEROS)
    FORM: tl.constexpr = (SLICES, GROUPS, KIND, GROUP, E8M0, ZEROS, BLOCK_M >= 128, ASSEMBLY)
    for first in range(begin, count, SPLITS * BLOCK_M):
        rows, pair, valid = rows_of(
            x, order, candidate, first, count, most, K, BLOCK_M, TOP_K, GATED, ONE_ROW
        )
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = acc
        s, z = plane_factors(scales, zeros, sizes, 0, row_n, inside_n, FACTORS, STORED, NARROW)
        s_up, z_up = s, z
        if GATED:
            s_up, z_up = plane_factors(
                scales, zeros, sizes, 0, row_n + N, inside_n, FACTORS, STORED, NARROW
            )
        for start in range(0, K, COLUMNS):
            words = _load_span(
                source, high_source, first_row, inside_n, start, num_words, num_high,
                BLOCK_N, WIDTH, SLICES, KIND, NARROW, TMA, ASSEMBLY,
            )  # fmt: skip
            xs = ()
            for i in tl.static_range(COLUMNS // X_WIDTH):
                word = tl.arange(0, X_WIDTH)
                column = start + i * X_WIDTH + word
                if NARROW:
                    column = start + word // 16 * 64 + i * 16 + word % 16
                there = valid[:, None] & (column < K)[None, :]
                xs += (tl.load(rows[:, None] + column[None, :], mask=there, other=0.0),)
            now, now_up, zero, zero_up = s, s_up, z, z_up
            ahead = start + COLUMNS
            more = inside_n & (ahead < K)
            if GROUPS > 0 or KIND == 3:  # loaded a step ahead
                s, z = plane_factors(
                    scales, zeros, sizes, ahead, row_n, more, FACTORS, STORED, NARROW
                )
                if GATED:
                    s_up, z_up = plane_factors(
                        scales, zeros, sizes, ahead, row_n + N, more, FACTORS, STORED, NARROW
                    )
            if KIND >= 4 and not GATED:
                acc = add_planes((acc,), (words,), xs, (now,), (zero,), FORM, STORED)[0]
            elif KIND < 4:
                now = factors_of_slices(now, GROUPS, STORED)
                if ZEROS == 2:
                    zero = factors_of_slices(zero, GROUPS, STORED)
                acc = add_products(acc, words, xs, now, zero, FORM)
            if GATED:
                words_up = _load_span(
                    source, high_source, first_row + N, inside_n, start, num_words, num_high,
                    BLOCK_N, WIDTH, SLICES, KIND, NARROW, TMA, ASSEMBLY,
                )  # fmt: skip
                if KIND >= 4:
                    acc, acc_up = add_planes(
                        *((acc, acc_up), (words, words_up), xs, (now, now_up), (zero, zero_up)),
                        *(FORM, STORED),
                    )
                else:
                    now_up = factors_of_slices(now_up, GROUPS, STORED)
                    if ZEROS == 2:
                        zero_up = factors_of_slices(zero_up, GROUPS, STORED)
                    acc_up = add_products(acc_up, words_up, xs, now_up, zero_up, FORM)
        if CHANNEL:
            acc *= tl.load(channel + row_n, mask=inside_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                factor = tl.load(channel + row_n + N, mask=inside_n, other=0.0).to(tl.float32)
                acc_up *= factor[:, None]
        store_products(
            acc, acc_up, bias, pair_weights, out, expert, pair, valid, n, inside_n, most, N,
            TOP_K, GATED, BIAS, ACTIVATION, ALPHA, LIMIT,
        )  # fmt: skip


def tiles_of(weight: TiledWeight, block_m: int, gated: bool, programs: int) -> Tiles:
    """The tiles of a product whose tiles of 64 rows are `programs` programs.

    Few programs become more by smaller tiles, whose products need no whole warp group.
    """
    columns = weight.slices * _tile_width(weight)
    if programs < _FEW_PROGRAMS and block_m <= 16:
        return Tiles(16, columns, 4, 1) if _tile_width(weight) == 64 else Tiles(32, columns, 4, 2)
    if block_m >= 128:
        return Tiles(128, columns, 2 if columns > 128 else 3, 8)
    # Scales of small groups need registers: more warps share the sums.
    warps = 8 if _tile_width(weight) < 64 and block_m >= 32 else 4
    return Tiles(64, columns, 3 if gated or block_m == 64 else 4, warps)


def _tile_width(weight: TiledWeight) -> int:
    """Words of a row in a tile: of a span, or of four narrow ones."""
    return 64 if weight.narrow else weight.slice_width


def _has_tall_tiles(weight: TiledWeight) -> bool:
    """Whether the registers hold tiles of 128 rows: not beside scales of small groups."""
    return weight.kind != "fp4" and weight.slice_width == 64


def expert_parts(
    x: Tensor,
    experts: PackedExperts,
    weights: Tensor,
    ids: Tensor,
    spare: int = 0,
    absent: bool = False,
    tiles: tuple[Tiles, Tiles] | None = None,
    tma: bool | None = None,
) -> Tensor:
    """See `kernels.packed.experts.packed_expert_parts`, and `run_experts` for `absent`.

    `tiles` (for both products) and `tma` (whether descriptors load the words) override what is
    chosen by shape. `block_k` of a tile is always a span of words.
    """
    count, one_row = experts.num_experts, x.shape[0] == 1
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, TiledWeight) and isinstance(down, TiledWeight)
    assert gate_up.order is None and down.order is None
    most = 128 if all(_has_tall_tiles(own) for own in (gate_up, down)) else 64
    work = work_for(weights, ids, count, most, one_row)

    def multiply(gated: bool, source: Tensor, out: Tensor) -> None:
        own, bias = (gate_up, experts.gate_up_bias) if gated else (down, experts.down_bias)
        outputs = own.shape[0] // (count * (2 if gated else 1))
        programs = triton.cdiv(outputs, 64) * len(work.experts) * work.splits
        size = tiles_of(own, work.block_m, gated, programs) if tiles is None else tiles[not gated]
        by_descriptor = has_tma(x) and fits_tma(own.words) if tma is None else tma
        block = [size.block_n, _tile_width(own)]
        high = own.words if own.high is None else own.high

        def described(words: Tensor) -> Any:
            return TensorDescriptor.from_tensor(words, block) if by_descriptor else words

        _packed_experts_kernel[work.grid(outputs, size.block_n)](
            described(own.words),
            source,
            x if bias is None else bias,
            work.experts,
            work.counts,
            work.order,
            work.weights,
            out,
            work.num_rows,
            outputs,
            own.columns,
            own.words.shape[1],
            **scale_arguments(own, x),
            high_source=described(high),
            num_high=high.shape[1],
            TOP_K=work.top_k,
            SPLITS=work.splits,
            ONE_ROW=work.one_row,
            GATED=gated,
            BIAS=bias is not None,
            **activation_options(experts),
            BLOCK_N=size.block_n,
            BLOCK_M=work.block_m,
            WIDTH=_tile_width(own),
            SLICES=own.slices,
            NARROW=own.narrow,
            ASSEMBLY=not x.is_cpu,
            TMA=by_descriptor,
            num_warps=size.num_warps,
            num_stages=size.stages,
            **pdl_options(x),
        )

    return both_products(x, down.columns, work, multiply, spare, absent)


hash_functions(globals())
