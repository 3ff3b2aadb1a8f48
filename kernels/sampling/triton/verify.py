"""Triton version of `rejection_sample` of `kernels.sampling.verify`: four kernels.

They allocate no tensor as large as the logits. If a temperature is given, each kernel divides the
logits by it as it reads them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs
from .. import random_streams as streams
from ..verify_rows import VerifyRows
from . import sample as noise
from .emit_drawn import count_matching
from .sample import best_of, gumbel, log_1_minus, pick, row_key, uniform

_ACCEPT = tl.constexpr(streams.ACCEPT)
_RECOVERY = tl.constexpr(streams.RECOVERY)
_TARGET = tl.constexpr(streams.TARGET)


# The position of these small arrays in a packed buffer depends on N. Their alignment must not be
# specialised on, or each alignment would need a kernel of its own.
_PER_ROW = ["draft_ids", "slots", "local_pos", "cu_num_logits", "positions"]


@triton.jit
def _load_logits(pointers, inside, temperature, HEAT: tl.constexpr):
    """Load logits of one row, divided by its temperature if HEAT; -inf where not `inside`."""
    p = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
    if HEAT:
        heat = tl.load(temperature)
        p = tl.div_rn(p, tl.where(heat > 0.0, heat, 1.0) + tl.zeros_like(p))
    return p


@triton.jit
def _exp_sum(x):
    """Compute max(x) and the sum of exp(x - max) of a block: (-inf, 0) if all are -inf."""
    top = tl.max(x, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(tl.exp(x - safe), axis=0)


@triton.jit
def _log_sum(tops, sums, num_blocks, BLOCKS: tl.constexpr):
    """Combine the blocks of a row into the log of its sum of exponentials."""
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    top = tl.load(tops + block, mask=inside, other=float("-inf"))
    part = tl.load(sums + block, mask=inside, other=0.0)
    most = tl.max(top, axis=0)
    safe = tl.where(most == float("-inf"), 0.0, most)
    return safe + tl.log(tl.sum(part * tl.exp(top - safe), axis=0))


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots", "local_pos"],
)
def _stats_kernel(
    logits,  # [L, V]
    draft_logits,  # [R, K, Vd]
    slots,  # [L] int32
    local_pos,  # [L] int32
    temperature,  # [L] float32
    stats,  # [5, L, B] float32: max and sum of p, max and sum of q, argmax of p
    stride,
    slot_stride,
    draft_stride,
    num_rows,
    num_drafts,
    vocab_size,
    draft_vocab_size,
    num_blocks,
    HAS_Q: tl.constexpr,
    HEAT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + token
    p = _load_logits(at, token < vocab_size, temperature + row, HEAT)
    size = num_rows.to(tl.int64) * num_blocks
    at = stats + row * num_blocks + block
    top, total = _exp_sum(p)
    tl.store(at, top)
    tl.store(at + size, total)
    _, index = best_of(p, block * BLOCK)
    tl.store(at + 4 * size, index.to(tl.float32))  # exact below 2^24
    if HAS_Q:
        column = tl.minimum(tl.load(local_pos + row), num_drafts - 1)
        slot = tl.load(slots + row).to(tl.int64)
        source = draft_logits + slot * slot_stride + column * draft_stride
        q = tl.load(source + token, mask=token < draft_vocab_size, other=float("-inf"))
        top, total = _exp_sum(q)
        tl.store(at + 2 * size, top)
        tl.store(at + 3 * size, total)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=_PER_ROW,
)
def _accept_kernel(
    logits,  # [L, V]
    draft_logits,  # [R, K, Vd]
    draft_ids,  # [L] int64
    slots,  # [L] int32
    local_pos,  # [L] int32
    cu_num_logits,  # [N + 1] int32
    seeds,  # [L] int64
    positions,  # [L] int64
    greedy,  # [L] bool
    temperature,  # [L] float32
    stats,  # [5, L, B] float32
    log_z,  # [2, L] float32: normalisers of p and q
    num_accepted,  # [N] int64
    stride,
    slot_stride,
    draft_stride,
    num_rows,
    num_drafts,
    vocab_size,
    draft_vocab_size,
    num_blocks,
    HAS_Q: tl.constexpr,
    HEAT: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Verify the rows of one request in order, up to the first rejection."""
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    start = tl.load(cu_num_logits + request)
    end = tl.load(cu_num_logits + request + 1)
    size = num_rows.to(tl.int64) * num_blocks
    accepted = tl.full([], 0, tl.int64)
    alive = tl.full([], 1, tl.int32)
    for index in range(start, end):
        row = tl.full([], 0, tl.int64) + index
        at = stats + row * num_blocks
        log_zp = _log_sum(at, at + size, num_blocks, BLOCKS)
        tl.store(log_z + row, log_zp)
        draft = tl.load(draft_ids + row)
        is_draft = (draft >= 0) & (draft < vocab_size)
        log_p = _load_logits(logits + row * stride + draft, is_draft, temperature + row, HEAT)
        log_p -= log_zp
        key_0, key_1 = row_key(
            tl.load(seeds + row), tl.load(positions + row), tl.full([], _ACCEPT, tl.int32)
        )
        bound = tl.log(uniform(key_0, key_1, tl.full([], 0, tl.uint32)))
        if HAS_Q:
            log_zq = _log_sum(at + 2 * size, at + 3 * size, num_blocks, BLOCKS)
            tl.store(log_z + num_rows + row, log_zq)
            column = tl.minimum(tl.load(local_pos + row), num_drafts - 1)
            slot = tl.load(slots + row).to(tl.int64)
            source = draft_logits + slot * slot_stride + column * draft_stride
            has_q = is_draft & (draft < draft_vocab_size)
            bound += tl.load(source + draft, mask=has_q, other=float("-inf")) - log_zq
        passes = log_p > bound
        if tl.load(greedy + row) != 0:
            block = tl.arange(0, BLOCKS)
            inside = block < num_blocks
            top = tl.load(at + block, mask=inside, other=float("-inf"))
            best_block = tl.argmax(top, axis=0)
            passes = tl.load(at + 4 * size + best_block) == draft.to(tl.float32)
        alive = tl.where(passes & is_draft, alive, 0)
        accepted += alive
    tl.store(num_accepted + request, accepted)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=_PER_ROW,
)
def _draw_kernel(
    logits,  # [L, V]
    draft_logits,  # [R, K, Vd]
    draft_ids,  # [L] int64
    slots,  # [L] int32
    local_pos,  # [L] int32
    cu_num_logits,  # [N + 1] int32
    seeds,  # [L] int64
    positions,  # [L] int64
    greedy,  # [L] bool
    temperature,  # [L] float32
    log_z,  # [2, L] float32
    num_accepted,  # [N] int64
    best,  # [2, N, B] float32: of the residual, of p
    best_token,  # [2, N, B] int32
    stride,
    slot_stride,
    draft_stride,
    num_rows,
    num_drafts,
    vocab_size,
    draft_vocab_size,
    num_blocks,
    HAS_Q: tl.constexpr,
    HEAT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find one block's best tokens, of the residual and of p, in a request's last emitting row."""
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(cu_num_logits + request) + tl.load(num_accepted + request)
    token = block * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + token
    p = _load_logits(at, token < vocab_size, temperature + row, HEAT)
    log_p = p - tl.load(log_z + row)
    draft = tl.load(draft_ids + row)
    rejected = draft >= 0
    salt = tl.where(rejected, _RECOVERY, _TARGET)
    key_0, key_1 = row_key(tl.load(seeds + row), tl.load(positions + row), salt)
    random = gumbel(key_0, key_1, token.to(tl.uint32))
    is_greedy = tl.load(greedy + row) != 0
    random = tl.where(is_greedy, 0.0, random)
    if HAS_Q:
        column = tl.minimum(tl.load(local_pos + row), num_drafts - 1)
        slot = tl.load(slots + row).to(tl.int64)
        source = draft_logits + slot * slot_stride + column * draft_stride
        q = tl.load(source + token, mask=token < draft_vocab_size, other=float("-inf"))
        log_q = q - tl.load(log_z + num_rows + row)
        ratio = tl.exp(tl.minimum(log_q - log_p, 0.0))
        left = tl.where(log_p > log_q, log_p + log_1_minus(ratio), float("-inf"))
    else:
        left = tl.where(token == draft, float("-inf"), log_p)
    left = tl.where(rejected & (is_greedy == 0), left, float("-inf"))
    at = request * num_blocks + block
    plain = tl.num_programs(0).to(tl.int64) * num_blocks + at
    value, index = best_of(left + random, block * BLOCK)
    tl.store(best + at, value)
    tl.store(best_token + at, index)
    value, index = best_of(log_p + random, block * BLOCK)
    tl.store(best + plain, value)
    tl.store(best_token + plain, index)


@triton.jit(
    do_not_specialize_on_alignment=["draft_ids", "cu_num_logits", "slots", "seeded"],
)
def _emit_kernel(
    draft_ids,  # [L] int64
    cu_num_logits,  # [N + 1] int32
    slots,  # [L] int32
    drawn,  # [L] int64
    seeded,  # [R] int64
    num_accepted,  # [N] int64, in place for requests that are seeded
    best,  # [2, N, B] float32
    best_token,  # [2, N, B] int32
    emitted,  # [N, K + 1] int64
    width,
    num_blocks,
    SEEDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Emit accepted drafts, the new token, then -1; where the residual is empty, draw from p."""
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    at = request * num_blocks
    plain = tl.num_programs(0).to(tl.int64) * num_blocks + at
    value, token = pick(best + at, best_token + at, num_blocks, BLOCKS)
    _, plain_token = pick(best + plain, best_token + plain, num_blocks, BLOCKS)
    token = tl.where(value > float("-inf"), token, plain_token)
    count = tl.load(num_accepted + request)
    column = tl.arange(0, WIDTH)
    start = tl.load(cu_num_logits + request)
    num_logits = tl.load(cu_num_logits + request + 1) - start
    draft = tl.load(draft_ids + start + column, mask=column < num_logits, other=-1)
    if SEEDED:
        slot = tl.load(slots + start, mask=num_logits > 0, other=0)
        if tl.load(seeded + slot) != 0:
            own = tl.load(drawn + start + column, mask=column < num_logits, other=-1)
            count = count_matching(own == draft, column, num_logits, WIDTH)
            token = tl.sum(tl.where(column == count, own, 0), axis=0)
            tl.store(num_accepted + request, count)
    tl.store(
        emitted + request * width + column,
        tl.where(column < count, draft, tl.where(column == count, token, -1)),
        mask=column < width,
    )


def rejection_sample(rows: VerifyRows) -> tuple[Tensor, Tensor]:
    """See `kernels.sampling.verify.rejection_sample`."""
    logits = rows.logits
    (num_rows, vocab_size), device = logits.shape, logits.device
    assert logits.stride(1) == 1
    num_reqs = rows.cu_num_logits.shape[0] - 1
    block = noise.BLOCK
    num_blocks = triton.cdiv(vocab_size, block)
    blocks = triton.next_power_of_2(num_blocks)
    stats = torch.empty(5, num_rows, num_blocks, device=device)
    log_z = torch.empty(2, num_rows, device=device)
    best = torch.empty(2, num_reqs, num_blocks, device=device)
    best_token = torch.empty(2, num_reqs, num_blocks, dtype=torch.int32, device=device)
    num_accepted = torch.empty(num_reqs, dtype=torch.int64, device=device)
    emitted = torch.empty(num_reqs, rows.width, dtype=torch.int64, device=device)

    q = logits[None] if rows.draft_logits is None else rows.draft_logits
    assert q.stride(2) == 1
    has_q = rows.draft_logits is not None
    # Without q, its sizes would be those of the step, and make kinds of kernels of their own.
    q_sizes = (*q.stride()[:2], *q.shape[1:]) if has_q else (0, 0, 0, 0)
    slot_stride, draft_stride, num_drafts, draft_vocab_size = q_sizes
    sizes = (
        logits.stride(0), slot_stride, draft_stride, num_rows, num_drafts,
        vocab_size, draft_vocab_size, num_blocks,
    )  # fmt: skip
    by_row = (rows.draft_ids.contiguous(), rows.slots.contiguous(), rows.local_pos.contiguous())
    heat = log_z if rows.temperature is None else rows.temperature.contiguous()
    keys = (rows.seeds.contiguous(), rows.positions.contiguous(), rows.greedy.contiguous(), heat)
    bounds = rows.cu_num_logits.contiguous()
    kind = dict(HAS_Q=has_q, HEAT=rows.temperature is not None, **pdl_options(logits))
    _stats_kernel[(num_rows, num_blocks)](
        logits, q, *by_row[1:], heat, stats, *sizes, BLOCK=block, num_warps=8, **kind
    )
    _accept_kernel[(num_reqs,)](
        logits, q, *by_row, bounds, *keys, stats, log_z, num_accepted, *sizes,
        BLOCKS=blocks, num_warps=1, **kind,
    )  # fmt: skip
    _draw_kernel[(num_reqs, num_blocks)](
        logits, q, *by_row, bounds, *keys, log_z, num_accepted, best, best_token, *sizes,
        BLOCK=block, num_warps=8, **kind,
    )  # fmt: skip
    has_seeds = rows.seeded is not None
    _emit_kernel[(num_reqs,)](
        by_row[0], bounds, by_row[1], rows.drawn if has_seeds else by_row[0],
        rows.seeded if has_seeds else num_accepted, num_accepted, best, best_token, emitted,
        rows.width, num_blocks, SEEDED=has_seeds, BLOCKS=blocks,
        WIDTH=triton.next_power_of_2(rows.width), num_warps=1, **pdl_options(logits),
    )  # fmt: skip
    return emitted, num_accepted
