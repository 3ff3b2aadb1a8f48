"""Triton versions of `kernels.drafts.draw_drafts`: one kernel reads the logits, another picks."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs
from ...sampling import random_streams as streams
from ...sampling.triton.sample import best_of, gumbel, pick, row_key

BLOCK = 1024  # tokens of one program; small, so that a few rows keep a GPU busy

_DRAFT = tl.constexpr(streams.DRAFT)


@triton.jit
def _draw_kernel(
    logits,  # [N*, Vd]
    idx_mapping,  # [R] int32
    temperature,  # [R] float32
    seed,  # [R] int64
    noise_positions,  # [R] int64
    step,  # [R] int64
    to_target,  # [Vd] int64
    kept,  # [R, K, V] float32 by slot
    best,  # [N*, B] float32
    best_token,  # [N*, B] int32
    stride,
    draft_vocab_size,
    vocab_size,
    num_drafts,
    num_blocks,
    KEEPS: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the best token of one block of a row; store the scaled logits if KEEPS."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < draft_vocab_size
    score = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    if KEEPS:
        heat = tl.load(temperature + row)
        if heat > 0.0:
            score = tl.div_rn(score, tl.full([BLOCK], 0.0, tl.float32) + heat)
            slot = tl.load(idx_mapping + row).to(tl.int64)
            column = tl.load(step + row)
            target = token.to(tl.int64)
            if MAPPED:
                target = tl.load(to_target + token, mask=inside, other=0)
            place = kept + (slot * num_drafts + column) * vocab_size + target
            tl.store(place, score, mask=inside & (slot >= 0) & (column < num_drafts))
            salt = tl.full([], _DRAFT, tl.int32)
            position = tl.load(noise_positions + row)
            key_0, key_1 = row_key(tl.load(seed + row), position, salt)
            score += gumbel(key_0, key_1, token.to(tl.uint32))
    value, index = best_of(score, block * BLOCK)
    tl.store(best + row * num_blocks + block, value)
    tl.store(best_token + row * num_blocks + block, index)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _take_kernel(
    ids,  # [N*] int64, of the draft vocabulary
    best,  # [N*, B] float32, used if not GIVEN
    best_token,  # [N*, B] int32
    to_target,  # [Vd] int64
    draft_tokens,  # [R, K] int64
    decode_ids,  # [R] int32
    noise_positions,  # [R] int64
    step,  # [R] int64
    num_drafts,
    num_blocks,
    GIVEN: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Make a row's best token, or the one given, its next draft."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    if GIVEN:
        token = tl.load(ids + row)
    else:
        at = row * num_blocks
        token = pick(best + at, best_token + at, num_blocks, BLOCKS)[1]
    if MAPPED:
        token = tl.load(to_target + token)
    column = tl.load(step + row)
    tl.store(draft_tokens + row * num_drafts + column, token, mask=column < num_drafts)
    tl.store(step + row, column + 1)
    tl.store(decode_ids + row, token.to(tl.int32))
    tl.store(noise_positions + row, tl.load(noise_positions + row) + 1)


def draw_drafts(logits: Tensor, of: Any, to_target: Tensor | None, kept: Tensor | None) -> None:
    """See `kernels.drafts.draw_drafts.draw_drafts`."""
    (rows, draft_vocab_size), device = logits.shape, logits.device
    assert logits.stride(1) == 1 and (kept is None or kept.is_contiguous())
    num_blocks = triton.cdiv(draft_vocab_size, BLOCK)
    best = torch.empty(rows, num_blocks, dtype=torch.float32, device=device)
    best_token = torch.empty(rows, num_blocks, dtype=torch.int32, device=device)
    _draw_kernel[(rows, num_blocks)](
        logits,
        of.idx_mapping,
        of.temperature,
        of.seed,
        of.noise_positions,
        of.step,
        of.step if to_target is None else to_target,
        best if kept is None else kept,
        best,
        best_token,
        logits.stride(0),
        draft_vocab_size,
        draft_vocab_size if kept is None else kept.shape[2],
        of.draft_tokens.shape[1],
        num_blocks,
        KEEPS=kept is not None,
        MAPPED=to_target is not None,
        BLOCK=BLOCK,
        num_warps=4,
        **pdl_options(logits),
    )
    _take(rows, None, best, best_token, of, to_target, num_blocks)


def take_drafts(ids: Tensor, of: Any, to_target: Tensor | None) -> None:
    """See `kernels.drafts.draw_drafts.take_drafts`."""
    ids = ids.contiguous()
    _take(ids.shape[0], ids, of.temperature, of.decode_ids, of, to_target, 0)


def _take(
    rows: int,
    ids: Tensor | None,
    best: Tensor,
    best_token: Tensor,
    of: Any,
    to_target: Tensor | None,
    num_blocks: int,
) -> None:
    num_drafts = of.draft_tokens.shape[1]
    assert of.draft_tokens.stride(0) == num_drafts
    _take_kernel[(rows,)](
        of.step if ids is None else ids,
        best,
        best_token,
        of.step if to_target is None else to_target,
        of.draft_tokens,
        of.decode_ids,
        of.noise_positions,
        of.step,
        num_drafts,
        num_blocks,
        GIVEN=ids is not None,
        MAPPED=to_target is not None,
        BLOCKS=triton.next_power_of_2(max(1, num_blocks)),
        num_warps=1,
        **pdl_options(best),
    )
