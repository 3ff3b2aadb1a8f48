"""All products between two attentions of few rows with quantised weights, in one launch, in Gluon.

As many programs as the GPU has multiprocessors run at the same time, and meet after each product,
because the next one needs all of its results. In a program one warp, the producer, copies words
into shared memory by the tensor memory accelerator. Weights depend on nothing, so it copies those
of the next product while programs meet, and the first ones while attention runs. Eight warps, the
consumer, copy the whole input of a product to shared memory, so that they wait for it once. Then
they multiply a step of eight spans of 16 weight rows at a time, each warp its own span, on the
tensor cores. A lane loads 16 bytes of a row at once, as in `packed_direct`; that module explains
the order of columns and the floats. The sums of the warps are added once for all tiles of a
product.

More memory and more copies on their way make it slower on an H200: what the programs exchange then
waits longer. A program stores its results with their product with the weight of the next norm, and
the sum of their squares, so that no program has to norm the whole row.

The tensor cores multiply a tile by eight columns, and the slices of one row take two or four. So
two rows take no more products of tiles than one, and neither do four, whose slices are taken apart;
only their inputs are longer. In the memory of an input of one product are those of the others, and
the sums of all products, because four rows of Llama 8B's inner size take half of the memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....device import card_of
from ....launch import hash_functions, pdl_options
from ....linear.triton.skinny import _TRITON_DTYPES
from ....quant.tiled import TiledWeight
from ....quant.triton.packed_codes import sum_factor
from ...kinds import WIDTH
from ..row_weights import RowLayer
from .hopper_row_roles import bring_words, multiply_all
from .hopper_row_steps import HEIGHT
from .row_inputs import INPUT_FACTOR, block_of

WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
FLAT = gl.constexpr(gl.NVMMASharedLayout(0, 16, 3))
PATIENCE = 1 << 24  # times 1024 cycles: about ten seconds until a missing program is an error


@dataclass(frozen=True)
class Form:
    """The variable parts of the kernel."""

    stages: int = 6  # of `spans` times 2 KiB of words
    held: int = 4  # steps; registers keep the inputs of so many
    # Of a thread, on average: a program of attention, which runs before this, fits beside it.
    registers: int = 120
    producer: int = 40  # registers of a thread of the producer
    flying: int = 3  # stages that are on their way at the same time
    spans: int = 8  # of a step, and warps of the consumer
    early: int = 1  # 1 = the next kernel may start while this one runs, 0 = near its end


@gluon.jit
def _hopper_row_kernel(
    o, o_scales, o_channel,
    gate_up, gate_up_scales, gate_up_channel,
    down, down_scales, down_channel,
    qkv, qkv_scales, qkv_channel,
    x,  # [count, heads * head_dim], what attention computed
    residual,  # [count, H], the stream before attention
    gain,  # [H], weight of the norm before gate and up
    normed,  # [ROWS, H], the stream after attention times the norm's weight
    inner,  # [ROWS, I], what down multiplies
    next_gain,  # [H], weight of the norm before the next layer's qkv
    stream,  # [ROWS, H], the stream after the layer
    next_normed,  # [ROWS, H], that times the norm's weight
    out,  # [ROWS, N] of qkv
    squares,  # [2, ROWS, PROGRAMS] float32, sums of squares of each program
    counter,  # [1] int32
    eps,
    next_eps,
    patience,  # times 1024 cycles
    count,  # rows, at most ROWS
    TILES: gl.constexpr,  # of the four products
    STEPS: gl.constexpr,  # of a tile
    TURNS: gl.constexpr,  # a power of 2, at least the tiles of a program
    MOST: gl.constexpr,  # of them
    GROUPS: gl.constexpr,  # in a span; 0 = scales of whole rows
    SLICES: gl.constexpr,
    FACTORS: gl.constexpr,  # of the sums of each slice
    SIZES: gl.constexpr,  # columns of the products
    PROGRAMS: gl.constexpr,  # a power of 2
    SPANS: gl.constexpr,
    STAGES: gl.constexpr,
    HELD: gl.constexpr,
    FLYING: gl.constexpr,
    EARLY: gl.constexpr,
    STAGED: gl.constexpr,  # values of an input of one row in shared memory
    SCALE: gl.constexpr,  # type of the scales of groups
    PRODUCER: gl.constexpr,
    ROWS: gl.constexpr,  # a power of 2
    PDL: gl.constexpr,
):  # fmt: skip
    w_ring = gl.allocate_shared_memory(gl.int16, [STAGES, SPANS, 2, 8, 64], WORDS)
    s_ring = w_ring
    if GROUPS > 0:
        s_ring = gl.allocate_shared_memory(SCALE, [STAGES, SPANS * GROUPS, 2, 8], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    partials, x_shared = w_ring, w_ring
    if ROWS == 1:
        partials = gl.allocate_shared_memory(
            gl.float32, [MOST, SPANS, HEIGHT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )  # fmt: skip
        x_shared = gl.allocate_shared_memory(
            x.dtype.element_ty, [STAGED // 64, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )  # fmt: skip
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    products = (
        (o, o_scales, o_channel),
        (gate_up, gate_up_scales, gate_up_channel),
        (down, down_scales, down_channel),
        (qkv, qkv_scales, qkv_channel),
    )
    gl.warp_specialize(
        [
            (multiply_all, (
                products[0], products[1], products[2], products[3], x, residual, gain, normed,
                inner, next_gain, stream, next_normed, out, squares, counter, eps, next_eps,
                patience, count, w_ring, s_ring, full, empty, partials, x_shared, TILES, STEPS,
                TURNS, GROUPS, SLICES, FACTORS, SIZES, PROGRAMS, SPANS, STAGES, HELD, SCALE, EARLY,
                ROWS, PDL,
            )),
            (bring_words, (
                products[0], products[1], products[2], products[3], w_ring, s_ring, full,
                empty, TILES, STEPS, GROUPS, SPANS, STAGES, FLYING,
            )),
        ],
        [1],
        [PRODUCER],
    )  # fmt: skip


def form_of(layer: RowLayer, rows: int = 1) -> Form:
    """The form for the weights of a layer: the fastest for Llama 8B on an H200.

    Rows need memory for their inputs, and four rows of "int4" more registers, without which they
    spill.
    """
    if layer.o.kind == "int4":
        return Form(stages=5, early=0, registers=120 if rows <= 2 else 128)
    return Form() if rows == 1 else Form(stages=5, early=0)


def multiply(
    x: Tensor,
    residual: Tensor,
    layer: RowLayer,
    counter: Tensor,
    form: Form | None = None,
    programs: int | None = None,
    patience: int = PATIENCE,
) -> tuple[Tensor, Tensor | None]:
    """See `row_layer.multiply_row`. Programs default to one for each multiprocessor; more could
    not all run at the same time, and would wait forever."""
    count, rows = x.shape[0], triton.next_power_of_2(x.shape[0])
    assert x.is_contiguous() and residual.is_contiguous() and residual.shape[0] == count
    form = form or form_of(layer, rows)
    weights = (layer.o, layer.gate_up, layer.down, layer.o if layer.qkv is None else layer.qkv)
    first, hidden = layer.o, layer.o.shape[0]
    slices = first.slices
    inner, outputs = layer.down.shape[1], 0 if layer.qkv is None else layer.qkv.shape[0]
    card = card_of(x.device)
    if programs is None:
        programs = 4 if card is None else card.num_processors
    padded = triton.next_power_of_2(programs)
    groups = 0 if first.group >= first.columns else slices * WIDTH // first.group
    normed, stream, next_normed = x.new_empty(3, rows, hidden)
    out = x.new_empty(rows, outputs) if outputs else x
    next_gain, next_eps = layer.norm if layer.next_norm is None else layer.next_norm
    arguments: list[Any] = []
    for weight in weights:
        arguments += _product(weight, weight is layer.gate_up, groups, form.spans)
    tiles = (hidden // 16, inner // 8, hidden // 16, outputs // 16)
    columns = slices * WIDTH * form.spans  # of a step
    steps = tuple(triton.cdiv(weight.shape[1], columns) for weight in weights)
    turns = tuple(triton.next_power_of_2(max(1, triton.cdiv(count, programs))) for count in tiles)
    _hopper_row_kernel[(programs,)](
        *arguments,
        x,
        residual,
        layer.norm[0],
        normed,
        x.new_empty(rows, inner),
        next_gain,
        stream,
        next_normed,
        out,
        torch.empty(2, rows, padded, dtype=torch.float32, device=x.device),
        counter,
        layer.norm[1],
        next_eps,
        patience,
        count,
        TILES=tiles,
        STEPS=steps,
        TURNS=turns,
        MOST=max(turns),
        GROUPS=groups,
        SLICES=slices,
        FACTORS=sum_factor(first.kind, torch.bfloat16, True, INPUT_FACTOR.value)[0],
        SIZES=tuple(weight.shape[1] for weight in weights),
        PROGRAMS=padded,
        SPANS=form.spans,
        STAGES=form.stages,
        HELD=form.held,
        FLYING=min(form.flying, form.stages),
        EARLY=form.early,
        STAGED=_staged(max(steps) * columns, form),
        SCALE=_TRITON_DTYPES[first.scales.dtype] if groups else gl.int16,
        PRODUCER=form.producer,
        ROWS=rows,
        num_warps=form.spans,
        maxnreg=form.registers,
        **pdl_options(x),
    )
    return stream[:count], out[:count] if outputs else None


def _staged(values: int, form: Form) -> int:
    """The numbers of an input in shared memory: blocks that are copied at once are whole."""
    block = block_of(values, 32 * form.spans)
    return int(triton.cdiv(values, block) * block)


def _product(weight: TiledWeight, gated: bool, groups: int, spans: int) -> list[Any]:
    """The arguments of a product, see `hopper_row_roles`. Words stand for what it lacks."""
    words, count = weight.words, weight.shape[0]
    blocks = (2, count // 2) if gated else (count // 8, 8)
    lines = words.view(*blocks, words.shape[1] // WIDTH, WIDTH).permute(2, 0, 1, 3)
    source = TensorDescriptor.from_tensor(lines, [spans, 2, 8, WIDTH], WORDS.value)
    if not groups:
        return [source, words, weight.scales]
    scales = weight.scales.view(-1, *blocks)
    return [source, TensorDescriptor.from_tensor(scales, [spans * groups, 2, 8], FLAT.value), words]


hash_functions(globals())
