"""The weights of a hyper-connection, shared by the reference and the Triton version."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Site:
    """The weights of a place where a sublayer reads the streams, or of the final head."""

    fn: Tensor  # [n (2 + n), n D] float32: rows of pre, post and comb; [n, n D] of a head
    base: Tensor  # [n (2 + n)] float32, or [n]
    scale: Tensor  # [3] float32, of pre, post and comb; or [1]
    norm_eps: float
    eps: float
    iterations: int = 0
