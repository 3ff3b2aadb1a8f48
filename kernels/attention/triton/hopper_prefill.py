"""Paged attention of long queries for Hopper GPUs, in Gluon: warps with roles of their own.

One warp, the producer, copies queries and pages of keys and values into shared memory by the tensor
memory accelerator. Two groups of four warps, the consumers, each attend with half of the query rows
of a tile. A consumer computes the softmax of one block of keys while the tensor cores multiply the
previous block's weights with its values. As many programs as the GPU has multiprocessors take tiles
in turn, and a producer fetches the first keys of the next tile while the consumers end the last.

The design is that of FlashAttention 3 (Shah et al., 2024).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...device import num_processors
from ...launch import fits_tma, hash_functions
from ..paged_rows import AttentionRule, PagedRows
from .hopper_roles import PANEL, ROWS, consume, produce

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_REGISTERS = 168  # a thread's on average, of 384 threads; consumers get more, the producer fewer
_CONSUMER, _PRODUCER = 232, 40  # registers of a thread
_MOST_REQUESTS = 1024
_DIMS = (64, 128)


@dataclass(frozen=True)
class Form:
    """The variable parts of the kernel."""

    block_n: int = 128  # keys of a block
    stages: int = 2  # blocks of keys, and of values, in shared memory
    alternate: bool = True  # consumers take turns in issuing matrix products


@gluon.jit
def _zero_unused(out, query_start_loc, num_reqs, num_tokens, WIDTH: gl.constexpr):
    """Zero token rows without a request; the programs share the work."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    offset = gl.arange(0, 1024, layout=layout)
    zeros = gl.zeros([1024], out.dtype.element_ty, layout=layout)
    covered = gl.load(query_start_loc + num_reqs)
    for token in range(covered + gl.program_id(0), num_tokens, gl.num_programs(0)):
        for begin in range(0, WIDTH, 1024):
            at = begin + offset
            gl.store(out + gl.cast(token, gl.int64) * WIDTH + at, zeros, mask=at < WIDTH)


@gluon.jit(
    do_not_specialize=["num_reqs", "num_tokens", "longer_than", "no_page"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _hopper_prefill_kernel(
    q_source,  # [T, Hq, DIM], copied by [ROWS / HEADS, HEADS, PANEL]
    k_source,  # [num_blocks * PAGE, Hkv * DIM], copied by [PIECE, PANEL]
    v_source,  # like k_source
    block_table,  # [N, max_blocks] int32
    query_start_loc,  # [N + 1] int32
    seq_lens,  # [N] int32
    sinks,  # [Hq]
    out,  # [T, Hq, DIM], contiguous
    scale,
    softcap,
    num_reqs,
    num_tokens,
    longer_than,  # requests with at most this many new tokens are skipped
    table_stride,
    no_page,  # the first beyond k_source and v_source
    Q_HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per KV head
    HEADS: gl.constexpr,  # query heads of a tile
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,  # at least N
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,  # 0 = none
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    ALTERNATE: gl.constexpr,
    CONSUMER: gl.constexpr,  # registers of a thread
    PRODUCER: gl.constexpr,
):
    dtype: gl.constexpr = out.dtype.element_ty
    panels: gl.constexpr = DIM // PANEL
    PIECE: gl.constexpr = PAGE if PAGE < BLOCK_N else BLOCK_N  # keys of a copy
    BLOCK_Q: gl.constexpr = 2 * ROWS // HEADS  # query tokens of a tile
    HEAD_BLOCKS: gl.constexpr = Q_HEADS // HEADS
    by_head: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    # Panels of 64 values follow each other, as the swizzled layout of a whole row has them too.
    q_pieces = gl.allocate_shared_memory(
        dtype, [2 * panels, ROWS // HEADS, HEADS, PANEL], by_head
    )  # fmt: skip
    q_tiles = q_pieces._reinterpret(dtype, [2, ROWS, DIM], SWIZZLED)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], SWIZZLED)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], SWIZZLED)
    count: gl.constexpr = STAGES * panels * (BLOCK_N // PIECE)
    k_pieces = k_tiles._reinterpret(dtype, [count, PIECE, PANEL], SWIZZLED)
    v_pieces = v_tiles._reinterpret(dtype, [count, PIECE, PANEL], SWIZZLED)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    _zero_unused(out, query_start_loc, num_reqs, num_tokens, Q_HEADS * DIM)

    gl.warp_specialize(
        [
            (consume, (
                role, out, sinks, query_start_loc, seq_lens, q_tiles, k_tiles, v_tiles, v_pieces,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, scale, softcap, num_reqs,
                longer_than, Q_HEADS, HEADS, HEAD_BLOCKS, DIM, PIECE, BLOCK_Q, BLOCK_N, BLOCK_R,
                STAGES, WINDOW, SOFTCAP, SINKS, ALTERNATE,
            )) if role < 2 else (produce, (
                q_source, k_source, v_source, block_table, query_start_loc, seq_lens, q_pieces,
                k_pieces, v_pieces, q_full, q_empty, k_full, k_empty, v_full, v_empty, num_reqs,
                longer_than, table_stride, no_page, GROUP, HEADS, HEAD_BLOCKS, DIM, PAGE, PIECE,
                BLOCK_Q, BLOCK_N, BLOCK_R, STAGES, WINDOW,
            ))
            for role in (0, 1, 2)
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )  # fmt: skip


def _heads_of_tile(group: int) -> int:
    """The query heads that share a tile: the largest power of two that divides the group."""
    return min(group & -group, int(ROWS.value))


def fits(query: Tensor, kv_cache: Tensor, rows: PagedRows, rule: AttentionRule) -> bool:
    """Whether the kernel can run: with heads of 64 or 128 values of 16 bits, in whole pages whose
    rows follow each other."""
    if rule.is_mla or rule.fp8 is not None or query.dtype != kv_cache.dtype:
        return False
    page, kv_heads, dim = kv_cache.shape[2:]
    across, between, of_head, one = kv_cache.stride()[1:]
    return (
        query.element_size() == 2
        and dim in _DIMS
        and page >= 8
        and page & (page - 1) == 0
        and (across, of_head, one) == (page * between, dim, 1)
        and fits_tma(query[:, 0], _cached_rows(kv_cache[0]), _cached_rows(kv_cache[1]))
        and query.stride(1) == dim
        and rows.seq_lens.shape[0] <= _MOST_REQUESTS
    )


def _cached_rows(cache: Tensor) -> Tensor:
    """A part of the cache [num_blocks, PAGE, Hkv, D] as rows [num_blocks * PAGE, Hkv * D]."""
    blocks, page, heads, dim = cache.shape
    return cache.as_strided((blocks * page, heads * dim), (cache.stride(1), 1))


def hopper_prefill(
    query: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    rule: AttentionRule,
    out: Tensor,
    form: Form | None = None,
    programs: int | None = None,
) -> None:
    """`paged_attention` of the requests with more than `rows.longer_than` new tokens into `out`
    [T, Hq, D], in one launch, for inputs that `fits` accepts.

    The launch depends on shapes only, so a graph may hold it. Programs default to one for each
    multiprocessor.
    """
    form = form or Form()
    num_tokens, num_heads, dim = query.shape
    num_reqs, (_, _, page, kv_heads, _) = rows.seq_lens.shape[0], kv_cache.shape
    group = num_heads // kv_heads
    heads = _heads_of_tile(group)
    piece = min(page, form.block_n)
    by_head = gl.NVMMASharedLayout(128, 16, 3)
    swizzled = gl.NVMMASharedLayout(128, 16, 2)
    keys, values = _cached_rows(kv_cache[0]), _cached_rows(kv_cache[1])
    _hopper_prefill_kernel[(programs or num_processors(query.device),)](
        TensorDescriptor.from_tensor(query, [ROWS.value // heads, heads, PANEL.value], by_head),
        TensorDescriptor.from_tensor(keys, [piece, PANEL.value], swizzled),
        TensorDescriptor.from_tensor(values, [piece, PANEL.value], swizzled),
        rows.block_table,
        rows.query_start_loc,
        rows.seq_lens,
        query if rule.sinks is None else rule.sinks,
        out,
        rule.key_scale,
        1.0 if rule.softcap is None else rule.softcap,
        num_reqs,
        num_tokens,
        rows.longer_than,
        rows.block_table.stride(0),
        kv_cache.shape[1],
        Q_HEADS=num_heads,
        GROUP=group,
        HEADS=heads,
        DIM=dim,
        PAGE=page,
        BLOCK_N=form.block_n,
        BLOCK_R=max(32, triton.next_power_of_2(num_reqs)),
        STAGES=form.stages,
        WINDOW=rule.sliding_window or 0,
        SOFTCAP=rule.softcap is not None,
        SINKS=rule.sinks is not None,
        ALTERNATE=form.alternate,
        CONSUMER=_CONSUMER,
        PRODUCER=_PRODUCER,
        num_warps=4,
        maxnreg=_REGISTERS,
    )


hash_functions(globals())
