"""Triton version of `kernels.sampling.finish_samples`, with one program per request."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs


@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=["cu_num_logits", "idx_mapping", "seq_lens", "prefill_len"],
)
def _finish_kernel(
    emitted,  # [N, K + 1] int64, in place
    num_accepted,  # [N] int64
    largest_raw,  # [L] float
    largest,  # [L] float32
    cu_num_logits,  # [N + 1] int32
    idx_mapping,  # [N] int32
    seq_lens,  # [N] int32
    prefill_len,  # [R] int32
    counts,  # [2, N] int32: sampled, rejected
    is_bad,  # [N] bool
    width,
    num_reqs,
    HAS_LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    start = tl.load(cu_num_logits + request)
    num_logits = tl.load(cu_num_logits + request + 1) - start
    accepted = tl.load(num_accepted + request).to(tl.int32)
    slot = tl.load(idx_mapping + request)
    live = slot >= 0
    samples = tl.load(seq_lens + request) >= tl.load(prefill_len + slot, mask=live, other=0)
    samples = samples & live
    tl.store(counts + request, tl.where(samples, accepted + 1, 0))
    tl.store(counts + num_reqs + request, tl.where(samples, num_logits - accepted - 1, 0))
    column = tl.arange(0, WIDTH)
    emits = column <= accepted
    top = tl.load(largest_raw + start + column, mask=emits, other=0.0).to(tl.float32)
    bad = (top != top) | (tl.abs(top) == float("inf"))
    if HAS_LARGEST:
        allowed = tl.load(largest + start + column, mask=emits, other=0.0)
        bad = bad | (allowed == float("-inf"))
    any_bad = tl.max(bad.to(tl.int32), axis=0) > 0
    tl.store(is_bad + request, any_bad & samples)
    none = tl.full([WIDTH], -1, tl.int64)
    at = emitted + request.to(tl.int64) * width + column
    tl.store(at, none, mask=(column < width) & (samples == 0))


def finish_samples(
    emitted: Tensor,
    num_accepted: Tensor,
    largest_raw: Tensor,
    largest: Tensor | None,
    rows: Any,
    prefill_len: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.sampling.finish_samples.finish_samples`."""
    num_reqs, width = emitted.shape
    counts = torch.empty(2, num_reqs, dtype=torch.int32, device=emitted.device)
    is_bad = torch.empty(num_reqs, dtype=torch.bool, device=emitted.device)
    if num_reqs:
        _finish_kernel[(num_reqs,)](
            emitted,
            num_accepted,
            largest_raw,
            largest_raw if largest is None else largest,
            rows.cu_num_logits,
            rows.idx_mapping,
            rows.seq_lens,
            prefill_len,
            counts,
            is_bad,
            width,
            num_reqs,
            HAS_LARGEST=largest is not None,
            WIDTH=triton.next_power_of_2(width),
            num_warps=1,
            **pdl_options(emitted),
        )
    return counts[0], counts[1], is_bad
