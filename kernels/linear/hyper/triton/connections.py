"""Triton version of `kernels.linear.hyper.connections`.

A site's products with `fn` are split along the streams' values over several programs, since one row
of a decode step would otherwise be the work of a single one; a second kernel adds up the parts,
normalises the coefficients and mixes the streams.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions
from ...triton.rotation import load_parts
from ..site import Site

_BLOCK_K = 64


@triton.jit(do_not_specialize=["num_rows"])
def _products_kernel(
    streams,  # [M, K]
    fn,  # [outputs, K] float32
    parts,  # [splits, M, COLUMNS] float32; the last column is the sum of squares
    num_rows,
    K,
    outputs,
    per_split,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None]
    total = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    start = split * per_split
    for at in range(start, tl.minimum(start + per_split, K), BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        in_k = (k < K)[None, :]
        source = streams + row[:, None].to(tl.int64) * K + k[None, :]
        x = tl.load(source, mask=inside & in_k, other=0.0).to(tl.float32)
        in_fn = (column < outputs)[:, None] & in_k
        w = tl.load(fn + column[:, None] * K + k[None, :], mask=in_fn, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="tf32x3")
        squares += tl.sum(x * x, axis=1)
    total = tl.where((column == COLUMNS - 1)[None, :], squares[:, None], total)
    target = parts + (split * num_rows + row[:, None]).to(tl.int64) * COLUMNS + column[None, :]
    tl.store(target, total, mask=inside)


@triton.jit
def _sum_parts(parts, row, num_rows, first, COUNT: tl.constexpr, SPLITS: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    split = tl.arange(0, SPLITS)[:, None]
    column = first + tl.arange(0, COUNT)[None, :]
    return tl.sum(tl.load(parts + (split * num_rows + row) * COLUMNS + column), axis=0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def _mix_kernel(
    streams,  # [M, N, D]
    parts,  # [SPLITS, M, COLUMNS] float32
    base,  # [N (2 + N)] float32
    scale,  # [3] float32
    mixed,  # [M, D]
    post_out,  # [M, N] float32
    comb_out,  # [M, N, N] float32
    num_rows,
    D,
    norm_eps,
    eps,
    iterations,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    each, square = tl.arange(0, N), tl.arange(0, N * N)
    squares = tl.sum(_sum_parts(parts, row, num_rows, COLUMNS - 1, 1, SPLITS, COLUMNS), axis=0)
    inverse = 1.0 / tl.sqrt(squares / (N * D) + norm_eps)
    pre = _sum_parts(parts, row, num_rows, 0, N, SPLITS, COLUMNS) * inverse
    pre = _sigmoid(pre * tl.load(scale) + tl.load(base + each)) + eps
    if tl.program_id(1) == 0:
        post = _sum_parts(parts, row, num_rows, N, N, SPLITS, COLUMNS) * inverse
        post = 2.0 * _sigmoid(post * tl.load(scale + 1) + tl.load(base + N + each))
        tl.store(post_out + row * N + each, post)
        comb = _sum_parts(parts, row, num_rows, 2 * N, N * N, SPLITS, COLUMNS) * inverse
        comb = comb * tl.load(scale + 2) + tl.load(base + 2 * N + square)
        comb = tl.reshape(comb, (N, N))
        comb = tl.exp(comb - tl.max(comb, axis=1)[:, None])
        comb = comb / tl.sum(comb, axis=1)[:, None] + eps
        comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
        for _ in range(iterations - 1):
            comb = comb / (tl.sum(comb, axis=1)[:, None] + eps)
            comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
        tl.store(comb_out + row * N * N + square, tl.reshape(comb, (N * N,)))
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < D
    source = streams + (row * N + each[:, None]) * D + column[None, :]
    x = tl.load(source, mask=inside[None, :], other=0.0).to(tl.float32)
    total = tl.sum(x * pre[:, None], axis=0)
    tl.store(mixed + row * D + column, total.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(
    streams,  # [M, N, D]
    output,  # [M, D]; PARTS: [PARTS, M, D] float32
    more,  # [M, D]
    post,  # [M, N] float32
    comb,  # [M, N, N] float32
    out,  # [M, N, D]
    stride,  # of the rows of output
    more_stride,
    part_stride,
    D,
    N: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = output is whole
    MORE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    each, inside = tl.arange(0, N), column < D
    at = (row * N + each[:, None]) * D + column[None, :]
    x = tl.load(streams + at, mask=inside[None, :], other=0.0).to(tl.float32)
    y = load_parts(output + row * stride + column, inside, part_stride, PARTS).to(tl.float32)
    if MORE:
        y += tl.load(more + row * more_stride + column, mask=inside, other=0.0).to(tl.float32)
    shares = tl.load(comb + row * N * N + each[:, None] * N + each[None, :])  # [from, to]
    total = tl.sum(shares[:, :, None] * x[:, None, :], axis=0)
    total += tl.load(post + row * N + each)[:, None] * y[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside[None, :])


def mix_streams(streams: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.linear.hyper.connections.mix_streams`."""
    num_rows, count, size = streams.shape
    device = streams.device
    mixed = torch.empty(num_rows, size, dtype=streams.dtype, device=device)
    post = torch.empty(num_rows, count, dtype=torch.float32, device=device)
    comb = torch.empty(num_rows, count, count, dtype=torch.float32, device=device)
    if num_rows == 0:
        return mixed, post, comb
    assert streams.is_contiguous()
    outputs, width = site.fn.shape
    columns = max(16, triton.next_power_of_2(outputs + 1))
    blocks = triton.cdiv(width, _BLOCK_K)
    # Few rows are spread over many programs; many rows are programs enough.
    wanted = 64 if num_rows <= 64 else 16 if num_rows <= 512 else 4
    splits = min(wanted, 1 << (blocks.bit_length() - 1))
    per_split = triton.cdiv(blocks, splits) * _BLOCK_K
    parts = torch.empty(splits, num_rows, columns, dtype=torch.float32, device=device)
    _products_kernel[(triton.cdiv(num_rows, 16), splits)](
        streams, site.fn, parts, num_rows, width, outputs, per_split,
        COLUMNS=columns, BLOCK_M=16, BLOCK_K=_BLOCK_K,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(size))
    _mix_kernel[(num_rows, triton.cdiv(size, block))](
        streams, parts, site.base, site.scale, mixed, post, comb, num_rows, size,
        site.norm_eps, site.eps, site.iterations,
        N=count, SPLITS=splits, COLUMNS=columns, BLOCK_D=block,
    )  # fmt: skip
    return mixed, post, comb


def add_to_streams(
    streams: Tensor, output: Tensor, post: Tensor, comb: Tensor, more: Tensor | None = None
) -> Tensor:
    """See `kernels.linear.hyper.connections.add_to_streams`."""
    num_rows, count, size = streams.shape
    out = torch.empty_like(streams)
    if num_rows:
        other = output if more is None else more
        assert streams.is_contiguous() and output.stride(-1) == other.stride(-1) == 1
        parts = output.shape[0] if output.dim() == 3 else 0
        block = min(512, triton.next_power_of_2(size))
        _add_kernel[(num_rows, triton.cdiv(size, block))](
            streams, output, other, post, comb, out, output.stride(-2), other.stride(-2),
            output.stride(0), size, N=count, PARTS=parts, MORE=more is not None, BLOCK_D=block,
        )  # fmt: skip
    return out


hash_functions(globals())
