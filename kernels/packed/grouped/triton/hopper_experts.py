"""Experts of "mxfp4" for Hopper GPUs, in Gluon: warps with roles of their own.

A first kernel sorts the rows of x by expert. Then as many programs as the GPU has multiprocessors
take tiles in turn, in two products: gate and up, and down. In a program one warp copies words and
scales into shared memory by the tensor memory accelerator, and another one rows of x, both as far
ahead as there is memory. Three groups of four warps, the consumers, widen words in registers and
multiply 64 weight rows each: while the tensor cores work for one group, others widen.

A tile of words takes fewer instructions here than in `packed_experts`, and copies of the next tile
begin before this one ends.

Consumers may widen at the same time, as a stage arrives for all of them. If they took turns, a
layer took longer on an H200 at each of the four numbers of rows that were measured.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....device import num_processors
from ....launch import hash_functions, pdl_options
from ....linear.experts import PackedExperts, whole
from ....linear.triton.expert_rows import FEW, empty_parts
from ....quant.tiled import TiledWeight
from ...kinds import can_group
from .hopper_expert_roles import COLUMNS, SWIZZLED, bring_rows, bring_words, multiply
from .hopper_expert_stores import ROWS
from .sort_rows import arrange

_FLAT = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))
_LEAST_ROWS, _MOST_ROWS = 1, 16384  # of a step


@dataclass(frozen=True)
class Form:
    """The variable parts of the kernel."""

    block_m: int = 32  # token rows of a tile
    consumers: int = 3  # or 2, which have more registers
    stages: int = 5  # of words
    x_stages: int = 3


@gluon.jit(do_not_specialize=["num_rows"])
def _hopper_experts_kernel(
    words,  # [E * N, W] or [E * 2 N, W] int16, copied by [64, 64]
    scales,  # [rows / 64 * STEPS, 128] int32, see `factors_of_blocks`; copied by [1, 128]
    x,  # [T * k, STEPS * 256], see `_arrange_kernel`; copied by [16, 64]
    plan,  # [3, E] int32
    bias,  # [E, N] or [E, 2 N]
    pairs,  # [T * k] int32
    pair_weights,  # [T * k] float32
    out,  # gated: [T * k, WIDTH] by place; else [k, T, N]
    num_experts,
    N,
    num_rows,  # T
    N_TILES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_E: gl.constexpr,
    STEPS: gl.constexpr,  # of 256 columns
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    TOP_K: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    WIDTH: gl.constexpr,
    CONSUMER: gl.constexpr,  # registers of a thread
    PRODUCER: gl.constexpr,
    PDL: gl.constexpr,
):
    w_tiles = gl.allocate_shared_memory(gl.int16, [STAGES * CONSUMERS, ROWS, 64], SWIZZLED)
    s_tiles = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS, 1, 128], _FLAT)
    x_pieces = gl.allocate_shared_memory(
        gl.bfloat16, [X_STAGES * 4 * (BLOCK_M // 16), 16, 64], SWIZZLED
    )  # fmt: skip
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (
                role, plan, bias, pairs, pair_weights, out, w_tiles, s_tiles, x_pieces, w_full,
                w_empty, x_full, x_empty, num_experts, N, num_rows, N_TILES, BLOCK_M, BLOCK_E,
                STEPS, CONSUMERS, STAGES, X_STAGES, GATED, BIAS, TOP_K, CLAMPED, ALPHA, LIMIT,
                WIDTH, PDL,
            )) if role < CONSUMERS else (bring_words, (
                words, scales, plan, w_tiles, s_tiles, w_full, w_empty, num_experts, N, N_TILES,
                BLOCK_M, BLOCK_E, STEPS, CONSUMERS, STAGES, GATED, PDL,
            )) if role == CONSUMERS else (bring_rows, (
                x, plan, x_pieces, x_full, x_empty, num_experts, N_TILES, BLOCK_M, BLOCK_E, STEPS,
                X_STAGES, PDL,
            ))
            for role in ((0, 1, 2, 3, 4) if CONSUMERS == 3 else (0, 1, 2, 3))
        ],
        [4, 4, 1, 1] if CONSUMERS == 3 else [4, 1, 1],
        [CONSUMER, CONSUMER, PRODUCER, PRODUCER] if CONSUMERS == 3
        else [CONSUMER, PRODUCER, PRODUCER],
    )  # fmt: skip


def fits(x: Tensor, experts: PackedExperts) -> bool:
    """Whether the kernels can run: for rows of bfloat16 and matrices with `factors`."""
    both, count = (experts.gate_up, experts.down), experts.num_experts
    rows = [own.shape[0] for own in both]
    return (
        x.dtype == torch.bfloat16
        and _LEAST_ROWS <= x.shape[0] <= _MOST_ROWS
        and all(isinstance(own, TiledWeight) and own.factors is not None for own in both)
        and can_group(count, rows[1] // count, rows[0] // (2 * count), experts.activation)
    )


def expert_parts(
    x: Tensor,
    experts: PackedExperts,
    weights: Tensor,
    ids: Tensor,
    spare: int = 0,
    absent: bool = False,
    forms: tuple[Form, Form] | None = None,
) -> Tensor:
    """See `kernels.packed.experts.packed_expert_parts`, for inputs that `fits` accepts.

    `forms`, of both products, override what is chosen by shape; their tiles have the same height.
    """
    num_rows, top_k = ids.shape
    forms = forms or forms_of(num_rows, top_k, experts.num_experts)
    assert forms[0].block_m == forms[1].block_m
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    sorted_rows = arrange(x, weights, ids, experts.num_experts, forms[0].block_m)
    work = sorted_rows.plan, sorted_rows.pairs, weights
    inner_size = triton.cdiv(experts.down.shape[1], COLUMNS.value) * COLUMNS.value
    inner = x.new_empty(ids.numel(), inner_size)
    parts = empty_parts(x, ids.shape[1], spare, absent)
    multiply_sorted(sorted_rows.rows, experts, work, inner, True, forms[0])
    multiply_sorted(inner, experts, work, parts, False, forms[1])
    return parts if len(x) <= FEW else whole(parts, x)


def multiply_sorted(
    rows: Tensor,
    experts: PackedExperts,
    work: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    gated: bool,
    form: Form,
) -> None:
    """Compute one of both products of sorted rows [T * k, columns, padded to 256].

    `work` is the plan, the pairs and their weights [T, k]. The kernel says what `out` is.
    """
    own = experts.gate_up if gated else experts.down
    bias = experts.gate_up_bias if gated else experts.down_bias
    assert isinstance(own, TiledWeight) and own.factors is not None
    plan, pairs, weights = work
    outputs = own.shape[0] // (experts.num_experts * (2 if gated else 1))
    three = form.consumers == 3
    _hopper_experts_kernel[(num_processors(rows.device),)](
        TensorDescriptor.from_tensor(own.words, [ROWS.value, 64], SWIZZLED.value),
        TensorDescriptor.from_tensor(own.factors.view(-1, 128), [1, 128], _FLAT.value),
        TensorDescriptor.from_tensor(rows, [16, 64], SWIZZLED.value),
        plan,
        rows if bias is None else bias,
        pairs,
        weights,
        out,
        experts.num_experts,
        outputs,
        weights.shape[0],
        N_TILES=triton.cdiv(outputs, form.consumers * ROWS.value),
        BLOCK_M=form.block_m,
        BLOCK_E=max(32, triton.next_power_of_2(experts.num_experts)),
        STEPS=rows.shape[1] // COLUMNS.value,
        CONSUMERS=form.consumers,
        STAGES=form.stages,
        X_STAGES=form.x_stages,
        GATED=gated,
        BIAS=bias is not None,
        TOP_K=weights.shape[1],
        CLAMPED=experts.activation == "clamped_swiglu",
        ALPHA=experts.alpha,
        LIMIT=experts.limit,
        WIDTH=out.shape[1] if gated else 0,
        CONSUMER=160 if three else 232,
        PRODUCER=32 if three else 40,
        num_warps=4,
        maxnreg=128 if three else 168,
        **pdl_options(rows),
    )


def forms_of(num_rows: int, top_k: int, num_experts: int) -> tuple[Form, Form]:
    """The forms of both products."""
    if num_rows <= 16:
        return Form(16, 3, 6, 4), Form(16, 3, 6, 4)
    if num_rows * top_k <= 16 * num_experts:
        return Form(32, 2, 8, 3), Form(32, 3, 5, 3)
    return Form(64, 2, 8, 2), Form(64, 2, 8, 2)


hash_functions(globals())
