"""Arguments of the attention kernels, shared by the references and the Triton versions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PagedRows:
    """The N requests of a step: which token rows belong to each, and where its keys are cached."""

    block_table: Tensor  # [N, max_blocks] int32
    query_start_loc: Tensor  # [N + 1] int32
    seq_lens: Tensor  # [N] int32, including this step's tokens; 0 for padded requests
    max_query_len: int
    slot_mapping: Tensor  # [T] int64, where each token's key and value go; -1 = nowhere
    # [>= N * Hkv] int32, zeros before and after each kernel. With it, rotary embedding, KV write
    # and attention may be one kernel.
    arrivals: Tensor | None = None
    # The same requests as two consecutive parts, each with a launch of its own: those with few new
    # tokens, then the rest. One launch for both would give a decode the tiles of a prefill.
    parts: tuple[PagedRows, PagedRows] | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """How a layer turns queries, keys and values into its output."""

    scale: float  # factor of the scores
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [Hq] logits that take part in the softmax and carry no value
    is_mla: bool = False  # one cached row of head_dim; V is its first head_dim_v values
    head_dim_v: int | None = None  # None = head_dim
