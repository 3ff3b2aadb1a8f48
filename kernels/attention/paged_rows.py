"""Arguments of the attention kernels, shared by the references and the Triton versions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..quant.e4m3 import E4M3, latent_row_bytes
from ..quant.latent_pages import row_bytes


@dataclass(frozen=True)
class PagedRows:
    """The N requests of a step: which token rows belong to each, and where its keys are cached."""

    block_table: Tensor  # [N, max_blocks] int32
    query_start_loc: Tensor  # [N + 1] int32
    seq_lens: Tensor  # [N] int32, including this step's tokens; 0 for padded requests
    max_query_len: int  # a launch skips requests with more new tokens
    slot_mapping: Tensor  # [T] int64, where each token's key and value go; -1 = nowhere
    # [>= N * Hkv] int32, zeros before and after each kernel. With it, rotary embedding, KV write
    # and attention may be one kernel.
    arrivals: Tensor | None = None
    # If not 0, requests with at most this many new tokens and the others have a launch each, which
    # skips the requests of the other. One launch would give a decode the tiles of a prefill.
    short_len: int = 0
    longer_than: int = 0  # a launch skips requests without more new tokens than this
    fixed: bool = False  # a row's bits must not depend on other rows; see `triton.fixed_splits`

    def by_length(self) -> tuple[PagedRows, PagedRows]:
        """The rows of the two launches if `short_len` is not 0: short requests, then long ones."""
        short = replace(self, max_query_len=self.short_len, short_len=0)
        return short, replace(self, arrivals=None, short_len=0, longer_than=self.short_len)


@dataclass(frozen=True)
class Fp8Cache:
    """How a KV cache of e4m3 values stores keys and values: a stored value is the value / scale.

    Latent rows (MLA) have scales of their own instead; see `kernels.quant.e4m3.pack_latent`, and of
    DeepSeek V4 `kernels.quant.latent_pages`.
    """

    dtype: torch.dtype  # of queries, keys, values and outputs
    k_scale: float = 1.0
    v_scale: float = 1.0
    latent: int = 0  # of MLA: the values of a row that become e4m3, before the rotary part
    rotary: int = 0  # of paged rows: the values after those
    paged: bool = False  # a page's scales follow its rows, as in `kernels.quant.latent_pages`


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """How a layer turns queries, keys and values into its output."""

    scale: float  # factor of the scores
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [Hq] logits that take part in the softmax and carry no value
    is_mla: bool = False  # one cached row of head_dim; V is its first head_dim_v values
    head_dim_v: int | None = None  # None = head_dim
    fp8: Fp8Cache | None = None  # None = the cache has the dtype of queries

    def dtype_of(self, kv_cache: Tensor) -> torch.dtype:
        """The dtype of queries, keys, values and outputs."""
        return kv_cache.dtype if self.fp8 is None else self.fp8.dtype

    @property
    def key_scale(self) -> float:
        """`scale`, times the scale of stored keys."""
        return self.scale if self.fp8 is None else self.scale * self.fp8.k_scale

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """The dtype of the cache; None = that of queries."""
        return None if self.fp8 is None else E4M3

    def cache_row(self, head_dim: int) -> int:
        """Elements of one key in the cache, for keys of `head_dim` values."""
        if self.fp8 is None or not self.fp8.latent:
            return head_dim
        if self.fp8.paged:
            return row_bytes(self.fp8.latent, head_dim - self.fp8.latent)
        return latent_row_bytes(self.fp8.latent, head_dim - self.fp8.latent)
