"""Linear layers of coded rows on Hopper GPUs, in Gluon: warps with roles of their own.

One warp, the producer, copies codes of weights and of coded rows (see `packed.coded`) into shared
memory by the tensor memory accelerator. One or two groups of four warps, the consumers, multiply
them on the tensor cores, 64 rows each. The rows of a tile meet up to 256 weight rows, because each
tile reads its rows from L2 again: at 128 rows and tiles of 128 weight rows, that takes longer than
reading the weights from memory. As many programs as the GPU has multiprocessors take tiles in turn,
and the producer copies the next tile's first codes while the consumers store the last tile. The
first codes of weights are copied before the input is ready.

Sums of whole rows stay in the tensor cores, as those of torch do, and keep about 14 bits. With
`promote`, or with scales of groups, each step of 128 columns is a sum of its own, added in float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...device import num_processors
from ...launch import fits_tma, hash_functions, pdl_options
from ...quant.tiled import TiledWeight
from ..coding import SPAN, Coding
from ..kinds import GATE_UP, PLAIN, Codes
from .arguments import coded_arguments
from .coded_roles import ROWS, STEP, consume, produce

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
# Registers of a thread: of a consumer, of the producer, and by the number of consumers the average
# of all threads, where warps are counted in fours.
_CONSUMER, _PRODUCER = 232, 40
_AVERAGE = {1: 136, 2: 168}


@gluon.jit(do_not_specialize=["num_rows", "split_k", "tiles"])
def _hopper_codes_kernel(
    w_source,  # codes [N, W], copied by [BLOCK_N, STEP]; gated: [2 N, W]
    x_source,  # codes [M, W] of coded rows, copied by [ROWS * CONSUMERS, STEP]
    x_scales,  # [M, ROW_FLOATS] float32, from the scales of the first row on
    scales,  # [K / 128, rows / ROW_GROUP], or [N] or [2 N] factors of whole rows
    bias,  # [N] or [2 N]
    residual,  # [M, N]
    out,  # [M, N], or [split_k, M, N] parts, or coded rows
    out_scales,  # `out` as float32 from the first row's scales on, if it is coded rows
    num_rows,  # M
    num_outputs,  # N
    steps,  # of 128 columns, in all
    stride,  # of `scales`
    part_steps,  # of a part
    split_k,  # number of parts
    out_bytes,  # of a coded row of `out`
    tiles,
    BLOCK_N: gl.constexpr,  # weight rows of a tile, of gate and up each
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_FLOATS: gl.constexpr,  # a coded row, counted as float32
    BY_GROUP: gl.constexpr,  # x has a scale for each row and 128 columns
    ROW_GROUP: gl.constexpr,  # weight rows that share a scale of 128 columns; 0 = whole rows
    PROMOTE: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    MODE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CODED: gl.constexpr,  # the output is coded rows with scales of groups; BLOCK_N is 128
    WIDE_STORES: gl.constexpr,  # numbers of 16 bits are stored by eight
    JOINED: gl.constexpr,  # gate and up are one product
    DTYPE: gl.constexpr,
    CONSUMER: gl.constexpr,  # registers of a thread
    PRODUCER: gl.constexpr,
    PDL: gl.constexpr,
):
    GATES: gl.constexpr = 2 if MODE == 2 else 1
    code: gl.constexpr = gl.float8e4nv
    w_boxes = gl.allocate_shared_memory(code, [STAGES * GATES, BLOCK_N, STEP], SWIZZLED)
    x_boxes = gl.allocate_shared_memory(code, [STAGES, ROWS * CONSUMERS, STEP], SWIZZLED)
    w_tiles = w_boxes
    if JOINED:
        w_tiles = w_boxes._reinterpret(code, [STAGES, GATES * BLOCK_N, STEP], SWIZZLED)
    x_tiles = x_boxes._reinterpret(code, [STAGES * CONSUMERS, ROWS, STEP], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    programs = gl.num_programs(0)
    mine = (tiles - gl.program_id(0) + programs - 1) // programs  # tiles of this program
    gl.warp_specialize(
        [
            (consume, (
                role, x_scales, scales, bias, residual, out, out_scales, w_tiles, x_tiles, full,
                empty, num_rows, num_outputs, steps, stride, part_steps, split_k, out_bytes, mine,
                BLOCK_N, CONSUMERS, STAGES, ROW_FLOATS, BY_GROUP, ROW_GROUP, PROMOTE, BIAS,
                RESIDUAL, MODE, ACTIVATION, CODED, WIDE_STORES, JOINED, DTYPE, PDL,
            )) if role < CONSUMERS else (produce, (
                w_source, x_source, w_boxes, x_boxes, full, empty, num_rows, num_outputs, steps,
                part_steps, split_k, mine, BLOCK_N, CONSUMERS, STAGES, GATES, PDL,
            ))
            for role in ((0, 1, 2) if CONSUMERS == 2 else (0, 1))
        ],
        [4, 1] if CONSUMERS == 2 else [1],
        [CONSUMER, PRODUCER] if CONSUMERS == 2 else [PRODUCER],
    )  # fmt: skip


def multiply(
    x: Tensor,
    weight: TiledWeight,
    choice: Codes,
    dtype: torch.dtype,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    residual: Tensor | None = None,
    coding: Coding | None = None,
    programs: int | None = None,
) -> Tensor:
    """As `coded_product.multiply`. Programs default to one for each multiprocessor."""
    source = Coding(weight.columns, choice.by_group > 0)
    assert choice.block_k == SPAN
    result, arguments = coded_arguments(
        x, weight, choice, dtype, mode, bias, activation, residual, coding
    )
    codes = weight.words.view(torch.float8_e4m3fn)  # [N, W]
    x_codes = x.view(torch.float8_e4m3fn)[:, : source.num_codes]
    assert fits_tma(codes, x)
    block_m, split_k = choice.block_m, arguments["split_k"]
    consumers = block_m // int(ROWS.value)
    blocks = triton.cdiv(arguments["num_outputs"], choice.block_n)
    tiles = triton.cdiv(x.shape[0], block_m) * blocks * split_k
    programs = min(programs or num_processors(x.device), tiles)
    # One consumer of both would need more registers than its average.
    joined = choice.joined > 0 and consumers == 2 and mode == GATE_UP
    joined = joined and not (choice.by_group or choice.promote)
    step = int(STEP.value)
    _hopper_codes_kernel[(programs,)](
        TensorDescriptor.from_tensor(codes, [choice.block_n, step], SWIZZLED.value),
        TensorDescriptor.from_tensor(x_codes, [block_m, step], SWIZZLED.value),
        **arguments,
        steps=source.spans,
        part_steps=triton.cdiv(source.spans, split_k),
        tiles=tiles,
        CONSUMERS=consumers,
        STAGES=choice.stages,
        # other forms were measured without
        WIDE_STORES=joined and result.element_size() == 2 and choice.block_n >= 32,
        JOINED=joined,
        CONSUMER=_CONSUMER,
        PRODUCER=_PRODUCER,
        num_warps=4,
        maxnreg=_AVERAGE[consumers],
        **pdl_options(x),
    )
    return result


hash_functions(globals())
