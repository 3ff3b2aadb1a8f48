"""Attention of query rows over a paged KV cache, for decode, verification and chunked prefill.

The reference plans a step once (`plan_attention` finds pages and masks), and every layer of the KV
group uses that plan. On the CPU, planning in each layer would cost more than the attention itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operation import operation
from ..quant.e4m3 import E4M3, unpack_latent
from .paged_rows import AttentionRule, Fp8Cache, PagedRows

# On the CPU, a separate attention call costs about as much as this number of padded keys. A request
# with more keys has a call of its own, since gathering its pages would cost more than the call.
_CALL_OVERHEAD_KEYS = 300
_GROUPED_KEYS = 1024  # from this number of keys on, a single query row is also grouped by key head


def paged_attention_reference(
    query: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    rule: AttentionRule,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention; the last query row of a request is aligned with its last key.

    query: [T, Hq, D]; kv_cache: [2, num_blocks, block_size, Hkv, D], for MLA
    [num_blocks, block_size, 1, D]; of e4m3 with `rule.fp8`, then with packed rows for MLA. Returns
    [T, Hq, Dv], which is `out` if that is given; rows of requests with seq_len 0 are zeros.
    """
    plan = plan_attention(
        rows.block_table,
        rows.query_start_loc.tolist(),
        rows.seq_lens.tolist(),
        kv_cache.shape[-3],
        rule.sliding_window,
        query.dtype,
    )
    result = planned_attention(query, kv_cache, plan, rule)
    return result if out is None else out.copy_(result)


paged_attention = operation(paged_attention_reference, "query", ".triton.paged_attention")


@dataclass(frozen=True)
class AttentionRun:
    """One attention call: `num_reqs` consecutive requests of equal query length."""

    start: int  # first token row
    num_reqs: int
    query_len: int
    first_block: int  # first page, if `blocks` is None
    # [num_reqs * num_blocks] int64 ids of pages to gather; None for a single request whose pages
    # are contiguous, which are read in place
    blocks: Tensor | None
    num_blocks: int  # per request
    offset: int  # keys skipped at the start of the first page
    num_keys: int  # keys per request after `offset`, padded to the longest
    is_causal: bool  # as many queries as keys: torch's own causal mask suffices
    mask: Tensor | None  # [num_reqs, 1, query_len, num_keys], added to the scores
    padding: Tensor | None = None  # int64, gathered keys after a request's last; may hold NaN
    group_masks: dict[int, Tensor] = field(default_factory=dict)  # `mask` for groups of heads

    @property
    def groups_pay(self) -> bool:
        """Whether the query heads of one key head should be rows of one call on the CPU.

        Torch's own grouping copies the keys for each query head, but is faster for one row of few
        keys.
        """
        return not self.is_causal and (self.query_len > 1 or self.num_keys >= _GROUPED_KEYS)

    def group_mask(self, group: int) -> Tensor | None:
        """`mask` with each query row repeated `group` times; computed once a step."""
        if self.mask is None or self.query_len == 1:
            return self.mask
        if group not in self.group_masks:
            self.group_masks[group] = self.mask.repeat_interleave(group, 2)
        return self.group_masks[group]


@dataclass(frozen=True)
class AttentionPlan:
    """The attention calls of one step, for every layer of a KV group."""

    runs: list[AttentionRun]
    num_tokens: int  # token rows covered by the runs


def plan_attention(
    block_table: Tensor,
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    copies: bool = False,
) -> AttentionPlan:
    """Plan the attention of one step on the host; shapes as in `PagedRows`.

    Consecutive requests of equal query length share a call while the padding this needs costs less
    than another call. Requests without queries or keys are left out. With `copies`, keys are always
    copied, so that the layout of the cache changes no call.
    """
    pending: list[int] = []  # batch rows of the run being collected
    runs: list[AttentionRun] = []
    longest = num_tokens = 0

    def flush() -> None:
        if pending:
            runs.append(
                _make_run(
                    pending,
                    block_table,
                    query_start_loc,
                    seq_lens,
                    block_size,
                    sliding_window,
                    dtype,
                    copies,
                )
            )
            pending.clear()

    for row, seq_len in enumerate(seq_lens):
        query_len = query_start_loc[row + 1] - query_start_loc[row]
        if query_len == 0 or seq_len == 0:
            flush()
            continue
        num_tokens += query_len
        if pending:
            previous = query_start_loc[pending[-1] + 1] - query_start_loc[pending[-1]]
            count = len(pending)
            padding = (count + 1) * max(longest, seq_len) - count * longest - seq_len
            if previous != query_len or max(padding, seq_len, longest) > _CALL_OVERHEAD_KEYS:
                flush()
        longest = max(longest, seq_len) if pending else seq_len
        pending.append(row)
    flush()
    return AttentionPlan(runs, num_tokens)


def _make_run(
    rows: list[int],
    block_table: Tensor,
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    copies: bool,
) -> AttentionRun:
    start = query_start_loc[rows[0]]
    query_len = query_start_loc[rows[0] + 1] - start
    # per request: the first key that any of its query rows attends to
    visible = [
        max(0, seq_lens[row] - query_len - sliding_window + 1) if sliding_window else 0
        for row in rows
    ]
    first_page = [key // block_size for key in visible]
    num_blocks = max(
        (seq_lens[row] - 1) // block_size + 1 - page
        for row, page in zip(rows, first_page, strict=True)
    )
    device = block_table.device
    if len(rows) == 1:
        row, page, key = rows[0], first_page[0], visible[0]
        pages = block_table[row, page : page + num_blocks]
        num_keys = seq_lens[row] - key
        neighbours = num_blocks == 1 or bool((pages[1:] - pages[:-1] == 1).all())
        neighbours = neighbours and not copies
        if query_len == 1:
            mask = None  # all keys are visible; keys before the window were skipped
        elif query_len == num_keys and (sliding_window is None or num_keys <= sliding_window):
            mask = None
        else:
            mask = _causal_mask([num_keys], query_len, num_keys, sliding_window, dtype, device)
        return AttentionRun(
            start,
            1,
            query_len,
            int(pages[0]),
            None if neighbours else pages.long(),
            num_blocks,
            key - page * block_size,
            num_keys,
            query_len > 1 and mask is None,
            mask,
        )
    lengths = [  # keys from the start of the first gathered page
        seq_lens[row] - page * block_size for row, page in zip(rows, first_page, strict=True)
    ]
    num_keys = max(lengths)
    table_rows = torch.tensor(rows, device=device).unsqueeze(1)
    columns = torch.tensor(first_page, device=device).unsqueeze(1) + torch.arange(
        num_blocks, device=device
    )
    columns.clamp_(max=block_table.shape[1] - 1)  # beyond the table any page will do: it is masked
    pages = block_table[table_rows, columns].flatten().long()
    mask = _causal_mask(lengths, query_len, num_keys, sliding_window, dtype, device)
    beyond = torch.arange(num_blocks * block_size) >= torch.tensor(lengths)[:, None]
    padding = beyond.flatten().nonzero()[:, 0].to(device)
    sizes = (len(rows), query_len, 0, pages, num_blocks, 0, num_keys)
    return AttentionRun(start, *sizes, False, mask, padding)


def _causal_mask(
    lengths: list[int],
    query_len: int,
    num_keys: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The mask [n, 1, query_len, num_keys]: 0 where a query row attends to a key, else -inf."""
    last = torch.tensor(lengths, device=device).view(-1, 1, 1, 1) - query_len
    query_at = last + torch.arange(query_len, device=device).view(1, 1, -1, 1)
    key_at = torch.arange(num_keys, device=device)
    hidden = key_at > query_at
    if sliding_window is not None:
        hidden |= key_at <= query_at - sliding_window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf"))


def planned_attention(
    query: Tensor, kv_cache: Tensor, plan: AttentionPlan, rule: AttentionRule
) -> Tensor:
    """The attention of one layer, by the plan of its step; shapes as in `paged_attention`."""
    dim_v = rule.head_dim_v or query.shape[-1]
    out: Tensor | None = None
    if plan.num_tokens != query.shape[0] or len(plan.runs) != 1:
        out = query.new_zeros(query.shape[0], query.shape[1], dim_v)
    for run in plan.runs:
        rows = query[run.start : run.start + run.num_reqs * run.query_len]
        # [n, L, Hq, D] -> [n, Hq, L, D]
        heads = rows.view(run.num_reqs, run.query_len, *rows.shape[1:]).transpose(1, 2)
        key, value = _keys_and_values(kv_cache, run, rule, dim_v, heads.dtype)
        if key.dtype != heads.dtype:
            key, value = key.to(heads.dtype), value.to(heads.dtype)
        if rule.softcap is None and rule.sinks is None and not rule.is_mla:
            group = heads.shape[1] // key.shape[1]  # query heads of a key head
            if group > 1 and run.groups_pay:
                attended = _grouped_attention(rows, key, value, run, rule.key_scale)
            else:
                attended = F.scaled_dot_product_attention(
                    heads,
                    key,
                    value,
                    attn_mask=run.mask,
                    is_causal=run.is_causal,
                    scale=rule.key_scale,
                    enable_gqa=group > 1,
                ).transpose(1, 2)
        else:
            attended = _explicit_attention(heads, key, value, run, rule).transpose(1, 2)
        attended = attended.reshape(rows.shape[0], rows.shape[1], dim_v)
        if rule.fp8 is not None:
            attended = attended * rule.fp8.v_scale
        if out is None:
            return attended
        out[run.start : run.start + rows.shape[0]] = attended
    return query.new_zeros(query.shape[0], query.shape[1], dim_v) if out is None else out


def _grouped_attention(
    rows: Tensor, key: Tensor, value: Tensor, run: AttentionRun, scale: float
) -> Tensor:
    """Attention with the query heads of each key head as rows of one call.

    rows: [T, Hq, D]. Returns [n, L, Hkv, G, D], where G is the number of query heads per key head.
    """
    num_kv_heads, dim = key.shape[1], rows.shape[2]
    group = rows.shape[1] // num_kv_heads
    shape = (run.num_reqs, run.query_len, num_kv_heads, group, dim)
    # [n, L, Hkv, G, D] -> [n, Hkv, L * G, D]
    heads = rows.view(shape).transpose(1, 2).reshape(run.num_reqs, num_kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(
        heads, key, value, attn_mask=run.group_mask(group), scale=scale
    )
    return out.view(run.num_reqs, num_kv_heads, run.query_len, group, -1).transpose(1, 2)


def _keys_and_values(
    kv_cache: Tensor, run: AttentionRun, rule: AttentionRule, dim_v: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of a run, both [n, Hkv, num_keys, D]: a view of the cache if pages are contiguous.

    Those of an fp8 cache are copies of `dtype`, still without their scales.
    """
    if rule.fp8 is None:
        key, value = _cached_rows(kv_cache, run, rule.is_mla)
    else:  # bytes, since torch gathers no e4m3
        key, value = _cached_rows(kv_cache.view(torch.uint8), run, rule.is_mla)
        key = _widened(key, rule.fp8, dtype)
        value = key if rule.is_mla else _widened(value, rule.fp8, dtype)
    return key, value[..., :dim_v] if rule.is_mla else value


def _widened(rows: Tensor, fp8: Fp8Cache, dtype: torch.dtype) -> Tensor:
    """The values of cached bytes, [..., D] of `dtype`; e4m3 values without their scale."""
    return unpack_latent(rows, fp8.latent, dtype) if fp8.latent else rows.view(E4M3).to(dtype)


def _cached_rows(kv_cache: Tensor, run: AttentionRun, is_mla: bool) -> tuple[Tensor, Tensor]:
    """The cached rows of a run's keys and values, [n, Hkv, num_keys, row]; for MLA the same twice.

    They are a view of the cache if pages are contiguous.
    """
    if run.blocks is None:  # one request, neighbouring pages
        first, last = run.first_block, run.first_block + run.num_blocks
        if is_mla:
            rows = kv_cache[first:last].flatten(0, 1)
            rows = rows[run.offset : run.offset + run.num_keys].transpose(0, 1).unsqueeze(0)
            return rows, rows
        # contiguous pages: one strided view each
        _, _, block_size, num_heads, dim = kv_cache.shape
        between_kv, _, between_keys, between_heads, _ = kv_cache.stride()
        at = kv_cache.storage_offset() + (first * block_size + run.offset) * between_keys
        size = (1, num_heads, run.num_keys, dim)
        stride = (between_kv, between_heads, between_keys, 1)
        return kv_cache.as_strided(size, stride, at), kv_cache.as_strided(
            size, stride, at + between_kv
        )

    def gather(cache: Tensor) -> Tensor:
        assert run.blocks is not None
        pages = cache.index_select(0, run.blocks)
        if run.padding is not None:  # a mask does not hide NaN, which foreign pages may hold
            pages.flatten(0, 1).index_fill_(0, run.padding, 0)
        keys = pages.view(run.num_reqs, -1, *cache.shape[2:])
        return keys[:, run.offset : run.offset + run.num_keys].transpose(1, 2)

    if is_mla:
        rows = gather(kv_cache)
        return rows, rows
    return gather(kv_cache[0]), gather(kv_cache[1])


def _explicit_attention(
    heads: Tensor,
    key: Tensor,
    value: Tensor,
    run: AttentionRun,
    rule: AttentionRule,
) -> Tensor:
    """Attention in single operations, for soft caps, sinks and MLA. Returns [n, Hq, L, Dv]."""
    num_reqs, num_heads, query_len, dim = heads.shape
    num_kv_heads = key.shape[1]
    grouped = (heads * rule.key_scale).reshape(
        num_reqs, num_kv_heads, -1, dim
    )  # group-major query rows
    scores = torch.matmul(grouped, key.transpose(2, 3)).float()
    scores = scores.view(num_reqs, num_heads, query_len, -1)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if run.mask is not None:
        scores = scores + run.mask
    elif run.is_causal:
        hidden = torch.ones(query_len, query_len, dtype=torch.bool, device=heads.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is not None:
        column = rule.sinks.float().view(1, -1, 1, 1).expand(num_reqs, -1, query_len, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.to(heads.dtype).view(num_reqs, num_kv_heads, -1, scores.shape[-1])
    return torch.matmul(weights, value).view(num_reqs, num_heads, query_len, value.shape[-1])
