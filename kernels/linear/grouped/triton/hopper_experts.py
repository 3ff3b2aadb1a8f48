"""The two products of experts for Hopper GPUs, in Gluon: warps with roles of their own.

One warp copies tiles of weights into shared memory by the tensor memory accelerator, and one warp
the rows of x that an expert has. Four warps multiply them, with the weights as the left operand. As
many programs as the GPU has multiprocessors take (expert, tile) units in turn. The warps that copy
do not stop between units, so that the memory never waits for a program to start or to end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .... import launch
from ....launch import fits_tma, hash_functions, pdl_options
from ...experts import ExpertWeights
from ...triton import one_row_experts
from ...triton.expert_rows import Work
from ...triton.one_row_experts import activation_options

ROWS = gl.constexpr(64)  # weight rows of an instruction
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_REGISTERS, _COPIER = 128, 96  # a thread's on average, and of the warps that copy
_SHARED_MEMORY = 226 << 10  # bytes for stages and what turns results around
_MOST_CANDIDATES = 1024

wait_for_inputs = gluon.jit(launch.wait_for_inputs.fn)
activated = gluon.jit(one_row_experts.activated.fn)


@dataclass(frozen=True)
class Form:
    """The variable parts of the kernel."""

    block_k: int = 128  # columns of a stage
    stages: int = 6  # at most; as many as fit into shared memory
    fetch: int = 0  # columns that the first product prefetches into L2 while experts are listed


@gluon.jit
def _fetch_first(weight, N: gl.constexpr, K: gl.constexpr, TILES: gl.constexpr,
                 FETCH: gl.constexpr):  # fmt: skip
    """Prefetch the first columns of the unit that is this program's if every expert has rows. A
    wrong guess costs time only."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    row = gl.arange(0, 2 * ROWS, layout=layout)
    unit = gl.program_id(0)
    n = gl.minimum(unit % TILES * ROWS + row % ROWS, N - 1)
    at = gl.cast((unit // TILES * 2 + row // ROWS) * N + n, gl.int64) * K
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [weight + at, row * 0 + FETCH * 2],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _live_candidates(counts, num_candidates, BLOCK_C: gl.constexpr):
    """The running number [BLOCK_C] of candidates that have rows, and the number of all of them."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_C // 32], [32], [gl.num_warps()], [0])
    each = gl.arange(0, BLOCK_C, layout=layout)
    count = gl.load(counts + each, mask=each < num_candidates, other=0, cache_modifier=".cg")
    upto = gl.associative_scan(gl.cast(count > 0, gl.int32), 0, _add)
    return upto, gl.max(upto, 0)


@gluon.jit
def _find_unit(experts, counts, upto, unit, TILES: gl.constexpr):
    """The candidate of a unit, its expert, its number of rows, and the tile of weights."""
    candidate = gl.sum(gl.cast(upto <= unit // TILES, gl.int32), 0)
    expert = gl.load(experts + candidate, cache_modifier=".cg")
    count = gl.load(counts + candidate, cache_modifier=".cg")
    return candidate, expert, count, unit % TILES


@gluon.jit
def copy_weights(
    source, weight, experts, counts, w_tiles, full, empty, num_candidates, N: gl.constexpr,
    STEPS: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr, STAGES: gl.constexpr, FETCH: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Copy the weights of each unit: 64 rows of gate and 64 of up, or 128 rows of down.

    The second product's start while the first product ends. The rows of experts have been listed
    then, since the first product waited for that before it let the second one start.
    """
    if GATED:
        if FETCH > 0:
            _fetch_first(weight, N, STEPS * BLOCK_K, TILES, FETCH)
        wait_for_inputs(PDL)
    HALVES: gl.constexpr = 2 if GATED else 1
    WIDTH: gl.constexpr = ROWS if GATED else 2 * ROWS  # outputs of a tile
    APART: gl.constexpr = N if GATED else ROWS  # rows between the two halves
    upto, live = _live_candidates(counts, num_candidates, BLOCK_C)
    fill = 0  # stages filled
    for unit in range(gl.program_id(0), live * TILES, gl.num_programs(0)):
        _, expert, count, tile = _find_unit(experts, counts, upto, unit, TILES)
        row = expert * (HALVES * N) + tile * WIDTH
        for _first in range(0, count, BLOCK_M):
            for step in range(STEPS):
                slot, phase = fill % STAGES, (fill // STAGES) & 1
                mbarrier.wait(empty.index(slot), phase ^ 1)
                mbarrier.expect(full.index(slot), 2 * ROWS * BLOCK_K * 2)
                for half in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        source,
                        [row + half * APART, step * BLOCK_K],
                        full.index(slot),
                        w_tiles.index(slot * 2 + half),
                    )
                fill += 1


@gluon.jit
def copy_rows(
    x, experts, counts, order, x_tiles, full, empty, most, num_candidates, K: gl.constexpr,
    STEPS: gl.constexpr, TILES: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Copy the rows of x of each unit. What is beside them in shared memory stays as it is: it
    meets only columns of the products that nothing stores."""
    wait_for_inputs(PDL)
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (BLOCK_K // 8), BLOCK_K // 8], [1, 1], [1, 0]
    )  # fmt: skip
    place = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    upto, live = _live_candidates(counts, num_candidates, BLOCK_C)
    fill = 0
    for unit in range(gl.program_id(0), live * TILES, gl.num_programs(0)):
        candidate, _, count, _ = _find_unit(experts, counts, upto, unit, TILES)
        own = order + gl.cast(candidate, gl.int64) * most
        for first in range(0, count, BLOCK_M):
            valid = first + place < count
            row = gl.load(own + first + place, mask=valid, other=0)
            if GATED:
                row = row // TOP_K
            source = x + (gl.cast(row, gl.int64) * K)[:, None] + column[None, :]
            inside = valid[:, None] & (column >= 0)[None, :]
            for step in range(STEPS):
                slot, phase = fill % STAGES, (fill // STAGES) & 1
                mbarrier.wait(empty.index(slot), phase ^ 1)
                async_copy.async_copy_global_to_shared(
                    x_tiles.index(slot), source + step * BLOCK_K, mask=inside
                )  # fmt: skip
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                fill += 1


@gluon.jit
def _store(out, result, target, valid, row, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Store result [ROWS, BLOCK_M]: column i becomes a part of the row `target`[i] of `out`, from
    `row` on."""
    n = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    at = gl.cast(target, gl.int64)[None, :] * N + n[:, None]
    there = valid[None, :] & (n < N)[:, None]
    gl.store(out + at, gl.convert_layout(result, LAYOUT).to(out.dtype.element_ty), mask=there)


@gluon.jit
def multiply(
    pair_weights, experts, counts, order, out, w_tiles, x_tiles, full, empty, most, num_candidates,
    N: gl.constexpr, STEPS: gl.constexpr, TILES: gl.constexpr, TOP_K: gl.constexpr,
    GATED: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply the weights of each unit with its rows, and store the results."""
    wait_for_inputs(PDL)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    place = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, STORED))
    upto, live = _live_candidates(counts, num_candidates, BLOCK_C)
    fill = 0
    for unit in range(gl.program_id(0), live * TILES, gl.num_programs(0)):
        candidate, _, count, tile = _find_unit(experts, counts, upto, unit, TILES)
        own = order + gl.cast(candidate, gl.int64) * most
        for first in range(0, count, BLOCK_M):
            acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=ACC)
            acc_next = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=ACC)
            for _step in range(STEPS):
                slot, phase = fill % STAGES, (fill // STAGES) & 1
                mbarrier.wait(full.index(slot), phase)
                fence_async_shared()  # rows came by ordinary copies
                columns = x_tiles.index(slot).permute((1, 0))
                acc = warpgroup_mma(w_tiles.index(slot * 2), columns, acc, is_async=True)
                acc_next = warpgroup_mma(
                    w_tiles.index(slot * 2 + 1), columns, acc_next, is_async=True
                )  # fmt: skip
                acc, acc_next = warpgroup_mma_wait(0, deps=[acc, acc_next])
                mbarrier.arrive(empty.index(slot), count=1)
                fill += 1
            valid = first + place < count
            pair = gl.load(own + first + place, mask=valid, other=0)
            if GATED:
                result = activated(acc, acc_next, out.dtype.element_ty, ACTIVATION, ALPHA, LIMIT)
                _store(out, result, pair, valid, tile * ROWS, N, STORED)
            else:
                share = gl.load(pair_weights + pair, mask=valid, other=0.0)
                share = gl.convert_layout(share, gl.SliceLayout(0, ACC))[None, :]
                target = (pair % TOP_K) * most + pair // TOP_K
                _store(out, acc * share, target, valid, tile * 2 * ROWS, N, STORED)
                _store(out, acc_next * share, target, valid, tile * 2 * ROWS + ROWS, N, STORED)


@gluon.jit(do_not_specialize=["most", "num_candidates"])
def _hopper_experts_kernel(
    source,  # descriptor of the weights [E * N, K]; gated: [E * 2 N, K]
    weight,  # pointer to them
    x,  # gated: [T, K]; else [T * k, K] by pair
    experts,  # [C] int32
    counts,  # [C] int32
    order,  # [C, T] int32
    pair_weights,  # [T * k] float32
    out,  # gated: [T * k, N] by pair; else [k, T, N]
    most,  # T
    num_candidates,  # C
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_C: gl.constexpr,  # at least C
    STAGES: gl.constexpr,
    FETCH: gl.constexpr,  # see `Form`
    COPIER: gl.constexpr,  # registers of a thread
    PDL: gl.constexpr,
):
    STEPS: gl.constexpr = K // BLOCK_K
    WIDTH: gl.constexpr = ROWS if GATED else 2 * ROWS
    TILES: gl.constexpr = (N + WIDTH - 1) // WIDTH
    dtype: gl.constexpr = x.dtype.element_ty
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, BLOCK_K], SWIZZLED)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33)  # the weights, and each thread that copies rows
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (
                pair_weights, experts, counts, order, out, w_tiles, x_tiles, full, empty, most,
                num_candidates, N, STEPS, TILES, TOP_K, GATED, ACTIVATION, ALPHA, LIMIT, BLOCK_M,
                BLOCK_C, STAGES, PDL,
            )),
            (copy_weights, (
                source, weight, experts, counts, w_tiles, full, empty, num_candidates, N, STEPS,
                TILES, GATED, BLOCK_M, BLOCK_K, BLOCK_C, STAGES, FETCH, PDL,
            )),
            (copy_rows, (
                x, experts, counts, order, x_tiles, full, empty, most, num_candidates, K, STEPS,
                TILES, TOP_K, GATED, BLOCK_M, BLOCK_K, BLOCK_C, STAGES, PDL,
            )),
        ],
        [1, 1],
        [COPIER, COPIER],
    )  # fmt: skip


def fits(x: Tensor, experts: ExpertWeights, work: Work, form: Form) -> bool:
    """Whether the kernel can run: 16-bit weights without biases, in whole stages."""
    sizes = experts.gate_up.shape[2], experts.down.shape[2]
    return (
        x.element_size() == 2
        and experts.gate_up_bias is None
        and experts.down_bias is None
        and all(size % form.block_k == 0 for size in sizes)
        and len(work.experts) <= _MOST_CANDIDATES
        and work.block_m <= 64
        and not work.one_row
        and fits_tma(experts.gate_up.flatten(0, 1), experts.down.flatten(0, 1))
    )


def multiply_experts(
    gated: bool,
    source: Tensor,
    experts: ExpertWeights,
    work: Work,
    out: Tensor,
    *,
    form: Form,
    programs: int,
) -> None:
    """One of the two products, see `expert_rows.both_products`, for inputs that `fits` accepts.

    The launch depends on shapes only, so a graph may hold it.
    """
    own = experts.gate_up if gated else experts.down
    flat, columns = own.view(-1, own.shape[2]), own.shape[2]
    stage = (2 * int(ROWS.value) + work.block_m) * form.block_k * 2
    room = _SHARED_MEMORY - 5 * int(ROWS.value) * work.block_m
    options = pdl_options(source)
    tiles = -(-own.shape[1] // (2 * int(ROWS.value)))
    known = not work.by_pair and programs <= tiles * len(own)  # every program has a first unit
    fetches = gated and known and bool(options["PDL"])
    _hopper_experts_kernel[(programs,)](
        TensorDescriptor.from_tensor(flat, [ROWS.value, form.block_k], SWIZZLED.value),
        flat,
        source,
        work.experts,
        work.counts,
        work.order,
        work.weights,
        out,
        work.num_rows,
        len(work.experts),
        N=own.shape[1] // (2 if gated else 1),
        K=columns,
        TOP_K=work.top_k,
        GATED=gated,
        **activation_options(experts),
        BLOCK_M=work.block_m,
        BLOCK_K=form.block_k,
        BLOCK_C=max(32, triton.next_power_of_2(len(work.experts))),
        STAGES=min(form.stages, room // stage),
        FETCH=min(form.fetch, columns) // 8 * 8 if fetches else 0,
        COPIER=_COPIER,
        num_warps=4,
        maxnreg=_REGISTERS,
        **options,
    )


hash_functions(globals())
