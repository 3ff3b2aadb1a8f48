"""Triton version of `kernels.sampling.log_probs`: a program computes a row."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # tokens read at once


@triton.jit
def _log_probs_kernel(
    logits,  # [L, V]
    out,  # [L, V] float32, contiguous
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    lane = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(row + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        tops = tl.maximum(tops, x.to(tl.float32))
    top = tl.max(tops, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(row + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        sums += tl.exp(x.to(tl.float32) - top)
    total = tl.log(tl.sum(sums, 0))
    for start in range(0, vocab_size, BLOCK):
        inside = start + lane < vocab_size
        x = tl.load(row + start + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + index * vocab_size + start + lane, x - top - total, mask=inside)


def log_probs(logits: Tensor) -> Tensor:
    """See `kernels.sampling.log_probs.log_probs`."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    _log_probs_kernel[(num_rows,)](
        logits, out, logits.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=8
    )
    return out
