"""Manifold-constrained hyper-connections (mHC): a residual of n streams, as in DeepSeek V4.

A site reads one row as a mix of the streams, and adds its sublayer's output y to all of them:
x = sum_i pre_i X_i and X'_k = post_k y + sum_j comb_jk X_j. The coefficients come from the streams:
m = fn . flat(X) / rms(flat(X)); pre = sigmoid(m * scale + base) + eps; post = 2 sigmoid(...); comb
is made doubly stochastic by Sinkhorn-Knopp iterations. All of this is float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operation import operation
from .site import Site


def _is_power(streams: Tensor, *others: object, **options: object) -> bool:
    """Whether the number of streams is a power of two, as the Triton versions need it."""
    count = streams.shape[1]
    return count & (count - 1) == 0


def mix_streams_reference(streams: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """A sublayer's input and the coefficients that its output will need.

    streams: [M, n, D]. Returns x [M, D] in the dtype of the streams, post [M, n] and comb [M, n, n]
    float32.
    """
    count = streams.shape[1]
    mixes, base, scale = _mixes(streams, site), site.base, site.scale
    pre = (mixes[:, :count] * scale[0] + base[:count]).sigmoid() + site.eps
    second = slice(count, 2 * count)
    post = 2 * (mixes[:, second] * scale[1] + base[second]).sigmoid()
    comb = mixes[:, 2 * count :] * scale[2] + base[2 * count :]
    comb = comb.view(-1, count, count).softmax(-1) + site.eps
    comb = comb / (comb.sum(-2, keepdim=True) + site.eps)
    for _ in range(site.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + site.eps)
        comb = comb / (comb.sum(-2, keepdim=True) + site.eps)
    return _collapsed(streams, pre), post, comb


mix_streams = operation(mix_streams_reference, "streams", ".triton.connections", _is_power)


def add_to_streams_reference(
    streams: Tensor, output: Tensor, post: Tensor, comb: Tensor, more: Tensor | None = None
) -> Tensor:
    """The streams after a sublayer; other shapes as in `mix_streams`.

    Its output is the sum of `output`, [M, D] or float32 parts [S, M, D], and `more` [M, D].
    """
    whole = output.sum(0) if output.dim() == 3 else output.float()
    whole = whole if more is None else whole + more
    mixed = torch.bmm(comb.transpose(1, 2), streams.float())
    return (mixed + post.unsqueeze(2) * whole.unsqueeze(1)).to(streams.dtype)


add_to_streams = operation(add_to_streams_reference, "streams", ".triton.connections", _is_power)


def head_streams(streams: Tensor, site: Site) -> Tensor:
    """The one row that the final norm reads: [M, n, D] -> [M, D]."""
    pre = (_mixes(streams, site) * site.scale + site.base).sigmoid() + site.eps
    return _collapsed(streams, pre)


def _mixes(streams: Tensor, site: Site) -> Tensor:
    """fn . flat / rms(flat), [M, rows of fn] float32."""
    flat = streams.flatten(1).float()
    inverse = (flat.square().mean(-1, keepdim=True) + site.norm_eps).rsqrt()
    return F.linear(flat, site.fn) * inverse


def _collapsed(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
