"""Triton version of `emit_matching` and `emit_by_chance` of `kernels.sampling.verify`.

One program works on one request.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from .. import random_streams as streams
from ..verify_rows import VerifyRows
from .sample import row_key, uniform

_ACCEPT = tl.constexpr(streams.ACCEPT)


@triton.jit
def count_matching(accepted, column, num_logits, WIDTH: tl.constexpr):
    """Count the leading accepted drafts of a request, as int64; its last row has no draft."""
    stops = (accepted == 0) | (column >= num_logits - 1)
    return tl.min(tl.where(stops, column, WIDTH), axis=0).to(tl.int64)


@triton.jit(
    do_not_specialize_on_alignment=["draft_ids", "cu_num_logits", "positions"],
)
def _emit_drawn_kernel(
    drawn,  # [L] int64
    draft_ids,  # [L] int64
    cu_num_logits,  # [N + 1] int32
    seeds,  # [L] int64
    positions,  # [L] int64
    rates,  # [K] float32
    num_accepted,  # [N] int64
    emitted,  # [N, K + 1] int64
    width,
    BY_CHANCE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Emit a request's accepted drafts, then the token drawn in the row after them."""
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits + request)
    num_logits = tl.load(cu_num_logits + request + 1) - start
    column = tl.arange(0, WIDTH)
    inside = column < num_logits
    token = tl.load(drawn + start + column, mask=inside, other=-1)
    draft = tl.load(draft_ids + start + column, mask=inside, other=-1)
    if BY_CHANCE:
        seed = tl.load(seeds + start + column, mask=inside, other=0)
        position = tl.load(positions + start + column, mask=inside, other=0)
        key_0, key_1 = row_key(seed, position, tl.full([], _ACCEPT, tl.int32))
        rate = tl.load(rates + column, mask=column < width - 1, other=0.0)
        accepted = uniform(key_0, key_1, tl.zeros([WIDTH], tl.uint32)) < rate
        accepted = accepted & (draft >= 0)
    else:
        accepted = token == draft
    count = count_matching(accepted, column, num_logits, WIDTH)
    tl.store(num_accepted + request, count)
    out = tl.where(column < count, draft, tl.where(column == count, token, -1))
    tl.store(emitted + request * width + column, out, mask=column < width)


def _emit_drawn(rows: VerifyRows, drawn: Tensor, rates: Tensor | None) -> tuple[Tensor, Tensor]:
    num_reqs, device = rows.cu_num_logits.shape[0] - 1, drawn.device
    num_accepted = torch.empty(num_reqs, dtype=torch.int64, device=device)
    emitted = torch.empty(num_reqs, rows.width, dtype=torch.int64, device=device)
    if num_reqs:
        _emit_drawn_kernel[(num_reqs,)](
            drawn, rows.draft_ids, rows.cu_num_logits, rows.seeds, rows.positions,
            rows.seeds if rates is None else rates, num_accepted, emitted, rows.width,
            BY_CHANCE=rates is not None, WIDTH=triton.next_power_of_2(rows.width), num_warps=1,
            **pdl_options(emitted),
        )  # fmt: skip
    return emitted, num_accepted


def emit_matching(rows: VerifyRows, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.sampling.verify.emit_matching`."""
    return _emit_drawn(rows, drawn, None)


def emit_by_chance(rows: VerifyRows, drawn: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.sampling.verify.emit_by_chance`; `rates` must have K entries."""
    assert rates.shape[0] == rows.width - 1
    return _emit_drawn(rows, drawn, rates)


hash_functions(globals())
