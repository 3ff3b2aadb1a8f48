"""Compiled Triton kernels on a GPU agree with their references.

The references get the same rounded inputs in fp32; `tests/kernels` has the exhaustive cases.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.attention_inputs import paged_inputs  # noqa: E402
from tests.kernels.drafts.test_stage_drafts import MAX_POSITION, a_step, drafter  # noqa: E402
from tests.kernels.step_buffers import POISON, poisoned_buffers, sampled_tokens  # noqa: E402

from slipstream.kernels.attention import store_kv
from slipstream.kernels.attention.paged_attention import paged_attention, paged_attention_reference
from slipstream.kernels.attention.rotary_store_kv import rotary_store_kv, rotary_store_kv_reference
from slipstream.kernels.batch import gather_batch
from slipstream.kernels.batch.step_sizes import StepSizes
from slipstream.kernels.drafts import stage_drafts
from slipstream.kernels.linear import activation, moe, norm_rope, streams
from slipstream.kernels.linear.embedding import embedding  # noqa: E402
from slipstream.kernels.linear.experts import ExpertWeights, Routing
from slipstream.kernels.linear.rotation import Rotation
from slipstream.runner.graphs.manager import relative_error  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ERROR = {torch.bfloat16: 6e-3, torch.float32: 2e-6}  # relative error over all elements
DTYPES = list(ERROR)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Fill freed memory with NaN, so that outputs that a kernel does not write are noticed."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        torch.full((size,), float("nan"), device="cuda")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def heads_of(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return randn(tokens, heads + 2, dim, dtype=dtype)[:, 1 : heads + 1]


def close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert relative_error(got, expected) < ERROR[got.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_norms_and_activations(rows: int, dtype: torch.dtype) -> None:
    for size in (576, 4096, 7168):
        x, residual = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype)
        weight = randn(size, dtype=dtype)
        floats = (x.float(), weight.float(), 1e-5)
        close(norm_rope.rms_norm(x, weight, 1e-5), norm_rope.rms_norm_reference(*floats))
        exact = norm_rope.fused_add_rms_norm_reference(x, residual, weight, 1e-5)
        got = norm_rope.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        close(got[0], exact[0])
        close(got[1], exact[1])
    heads = heads_of(rows, 32, 128, dtype)
    weight = randn(128, dtype=dtype)
    exact_heads = norm_rope.rms_norm_reference(heads.float(), weight.float(), 1e-6)
    close(norm_rope.rms_norm(heads, weight, 1e-6), exact_heads)
    x = randn(rows, 2 * 3000, dtype=dtype) * 4
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        close(getattr(activation, name)(x), getattr(activation, f"{name}_reference")(x.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 300])
def test_fused_stream_kernels_equal_the_separate_operations_bit_by_bit(
    rows: int, dtype: torch.dtype
) -> None:
    for size in (576, 4096, 7168):
        hidden, residual = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype)
        for x in (hidden, randn(2, rows, size)):
            out = torch.full((rows, 3 * size), 7.0, dtype=dtype, device="cuda")
            streams.write_stream(x, residual, out[:, size : 2 * size])
            assert torch.equal(out[:, size : 2 * size], streams.write_stream_reference(x, residual))
            assert bool((out[:, :size] == 7).all()) and bool((out[:, 2 * size :] == 7).all())
        table, weights = randn(50, size, dtype=dtype), randn(2, size, dtype=dtype).unbind()
        ids = torch.randint(0, 50, (rows,), device="cuda", dtype=torch.int32)
        pair = streams.norm_pair(table, hidden, weights, 1e-5, ids)
        halves = ((table[ids.long()], weights[0]), (hidden, weights[1]))
        normed = [norm_rope.rms_norm(x, weight, 1e-5) for x, weight in halves]
        assert torch.equal(pair, torch.cat(normed, dim=-1))
        chosen = torch.randint(0, rows, (3,), device="cuda")
        assert torch.equal(embedding(chosen, hidden), hidden[chosen])
        parts, fed_back = randn(2, 3, size), torch.empty(3, size, dtype=dtype, device="cuda")
        plain = norm_rope.fused_add_rms_norm(parts, pair[:, size:][chosen], weights[0], 1e-5)
        got = norm_rope.fused_add_rms_norm(
            parts, pair[:, size:], weights[0], 1e-5, chosen, None, fed_back
        )
        assert torch.equal(got[0], plain[0]) and torch.equal(fed_back, plain[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "rot_dim", "interleaved", "halves"),
    [
        *((64, 64, False, None), (128, 128, False, None), (256, 64, False, None)),
        *((64, 64, True, None), (128, 128, True, None), (256, 64, True, None)),
        *((64, 64, False, (16, 4)), (128, 128, False, (8, 2)), (128, 128, False, (32, 2))),
    ],
)
def test_rotary_and_store(
    dim: int,
    rot_dim: int,
    interleaved: bool,
    halves: tuple[int, int] | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.kernels.linear.triton import norm_rope as triton_norm_rope

    monkeypatch.setattr(triton_norm_rope, "HALVES", halves)
    positions = torch.randint(0, 5000, (77,), device="cuda")
    cos_sin = randn(5000, rot_dim)
    query, key, value = (heads_of(77, count, dim, dtype) for count in (9, 3, 3))
    rotation = Rotation(positions, cos_sin, interleaved)
    expected = norm_rope.rotary_embedding_reference(query.float(), key.float(), rotation)
    got = norm_rope.rotary_embedding(query, key, rotation)
    assert got[1] is not None and expected[1] is not None
    close(got[0], expected[0])
    close(got[1], expected[1])

    slots = torch.randperm(40 * 16, device="cuda")[:77]
    slots[::5] = -1
    cache = randn(2, 40, 16, 3, dim, dtype=dtype)
    expected_cache = cache.clone()
    store_kv.store_kv_reference(key, value, expected_cache, slots)
    stored = cache.clone()
    store_kv.store_kv(key, value, stored, slots)
    assert torch.equal(stored, expected_cache)
    args = (query, key, value, rotation)
    expected_cache = cache.clone()
    rotated = rotary_store_kv_reference(*args, expected_cache, slots)
    close(rotary_store_kv(*args, cache, slots), rotated)
    close(cache, expected_cache)


def paged(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    page: int = 16,
    mla: bool = False,
) -> dict[str, Any]:
    """Arguments of `paged_attention` with shuffled pages, two padded requests and 5 padded rows."""
    per_req = -(-max(seq_lens) // page)
    count = len(seq_lens)
    table = (torch.randperm(count * per_req) + 1).int().view(count, per_req)
    table = torch.cat([table, torch.zeros(2, per_req, dtype=torch.int32)])
    starts = torch.tensor([0, *query_lens, 0, 0]).cumsum(0).int()
    shape = (1 + count * per_req, page, 1 if mla else heads[1], dim)
    return {
        "query": heads_of(int(starts[-1]) + 5, heads[0], dim, dtype),
        "kv_cache": randn(*(shape if mla else (2, *shape)), dtype=dtype),
        "block_table": table.cuda(),
        "query_start_loc": starts.cuda(),
        "seq_lens": torch.tensor([*seq_lens, 0, 0], dtype=torch.int32, device="cuda"),
        "scale": dim**-0.5,
        "max_query_len": max(query_lens),
        "is_mla": mla,
    }


def check_attention(args: dict[str, Any], **options: Any) -> None:
    got = paged_attention(*paged_inputs(**args, **options))
    exact = args | {name: args[name].float() for name in ("query", "kv_cache")}
    expected = paged_attention_reference(*paged_inputs(**exact, **options))
    tolerance = 6e-3 if got.dtype is torch.bfloat16 else 2e-5
    assert relative_error(got, expected) < tolerance
    assert not got[-5:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256, 512])
def test_attention_of_every_head_size(dim: int, dtype: torch.dtype) -> None:
    check_attention(paged([1, 1, 1], [3000, 65, 1], (8, 2), dim, dtype))
    check_attention(paged([300, 1, 40], [300, 900, 2000], (8, 2), dim, dtype))


@pytest.mark.parametrize("query_len", [1, 2, 4, 6])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_attention_of_uniform_batches(batch: int, query_len: int) -> None:
    lens = [query_len + 4000 * index // batch for index in range(batch)]
    for heads in ((32, 8), (9, 3)):
        check_attention(paged([query_len] * batch, lens, heads, 128, torch.bfloat16))


@pytest.mark.parametrize("query_lens", [[1, 1], [4, 4], [200, 1]])
def test_attention_options(query_lens: list[int]) -> None:
    args = paged(query_lens, [2500, 300], (16, 4), 128, torch.bfloat16)
    check_attention(args, sliding_window=128)
    check_attention(args, softcap=20.0)
    check_attention(args, sinks=randn(16) * 3)
    check_attention(args, sinks=randn(16), sliding_window=33, softcap=5.0)


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("query_lens", [[1, 1], [4, 4], [200, 1]])
def test_latent_attention(query_lens: list[int], num_heads: int) -> None:
    args = paged(query_lens, [2500, 300], (num_heads, 1), 576, torch.bfloat16, 64, mla=True)
    check_attention(args, head_dim_v=512)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 64, 6), (8, 128, 8), (33, 8, 2), (128, 128, 8), (700, 16, 4), (3000, 8, 4)],
)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_experts(tokens: int, experts: int, top_k: int, act: str, dtype: torch.dtype) -> None:
    """The last activation with biases."""
    hidden, inner = 512, 192
    x = randn(tokens, hidden, dtype=dtype)
    stacks = [
        randn(experts, 2 * inner, hidden) / hidden**0.5,
        randn(experts, hidden, inner) / inner**0.5,
    ]
    if act == "clamped_swiglu":
        stacks += [randn(experts, 2 * inner) * 4, randn(experts, hidden)]
    stacks = [stack.to(dtype) for stack in stacks]
    ids = torch.rand(tokens, experts, device="cuda").argsort(1)[:, :top_k]
    weights = torch.rand(tokens, top_k, device="cuda")
    wide = ExpertWeights(*(stack.float() for stack in stacks), activation=act)
    expected = moe.run_experts_reference(x.float(), wide, weights, ids)
    got = moe.run_experts(x, ExpertWeights(*stacks, activation=act), weights, ids)
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
    assert relative_error(got, expected) < tolerance
    parts = moe.expert_parts(x, ExpertWeights(*stacks, activation=act), weights, ids.int())
    whole = parts if parts.dim() == 2 else parts.sum(0)
    assert relative_error(whole, expected) < tolerance


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 128, 8), (256, 512, 10), (3000, 32, 4)])
def test_select_experts(rows: int, experts: int, top_k: int) -> None:
    logits = randn(4, rows, experts)
    routing = Routing(top_k, renormalise=True)
    weights, ids = moe.select_experts(logits, routing)
    expected, expected_ids = moe.select_experts_reference(logits, routing)
    assert (ids == expected_ids).float().mean() > 0.999  # sums of parts differ in the last bits
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 16, 256, 3000])
@pytest.mark.parametrize("parts", [0, 8])
def test_experts_of_the_best_groups(rows: int, parts: int) -> None:
    """DeepSeek V3's router. Scores that differ in the last bits may change the choice."""
    logits = randn(*([parts] if parts else []), rows, 256)
    routing, bias = Routing(8, "sigmoid", 8, 4, "top2", True, 2.5), randn(256) * 0.1
    weights, ids = moe.select_experts(logits, routing, bias)
    expected, expected_ids = moe.select_experts_reference(logits, routing, bias)
    same = (ids == expected_ids).all(1)
    assert same.float().mean() > 0.99
    torch.testing.assert_close(weights[same], expected[same], rtol=1e-4, atol=1e-5)
    tied, few = torch.zeros_like(logits), min(rows, 5)
    first = moe.select_experts(tied, routing)[1]
    assert first.tolist() == [list(range(8))] * rows
    alone = logits[..., rows - few :, :].contiguous()
    again = moe.select_experts(alone, routing, bias)
    assert torch.equal(again[0], weights[-few:]) and torch.equal(again[1], ids[-few:])


def test_experts_by_token_id() -> None:
    logits, table = randn(4, 33, 256), torch.rand(500, 256, device="cuda").argsort(1)[:, :6]
    tokens = torch.randint(500, (33,), device="cuda", dtype=torch.int32)
    routing = Routing(6, "sqrtsoftplus", renormalise=True, scale=1.5)
    listed = tokens, table.contiguous()
    weights, ids = moe.select_experts(logits, routing, None, listed)
    expected, expected_ids = moe.select_experts_reference(logits, routing, None, listed)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


SLOTS, MAX_LEN, DRAFTS, MAX_REQS, MAX_TOKENS = 70, 4096, 3, 66, 9000


def random_step() -> tuple[SimpleNamespace, SimpleNamespace, tuple[int, ...]]:
    """A request table, a batch of 60 decodes and prefills with poisoned buffers, and its sizes."""
    num_reqs = 60
    requests = SimpleNamespace(
        all_token_ids=torch.randint(0, 90, (SLOTS, MAX_LEN), dtype=torch.int32),
        prefill_len=torch.randint(5, 3000, (SLOTS,), dtype=torch.int32),
        total_len=torch.randint(3000, MAX_LEN + 1, (SLOTS,), dtype=torch.int32),
        num_computed_tokens=torch.randint(0, 4000, (SLOTS,), dtype=torch.int32),
        last_sampled_tokens=torch.randint(0, 90, (SLOTS,)),
        next_prefill_tokens=torch.randint(0, 90, (SLOTS,)),
        draft_tokens=torch.randint(-1, 90, (SLOTS, DRAFTS)),
    )
    batch = SimpleNamespace(
        idx_mapping=torch.full((MAX_REQS,), -1, dtype=torch.int32),
        query_start_loc=torch.zeros(MAX_REQS + 1, dtype=torch.int32),
        cu_num_logits=torch.zeros(MAX_REQS + 1, dtype=torch.int32),
    )
    batch.idx_mapping[:num_reqs] = torch.randperm(SLOTS)[:num_reqs]
    lens = torch.randint(1, 9, (num_reqs,))
    lens[-2:] = torch.tensor([2500, 1024])
    num_logits = torch.minimum(torch.randint(1, DRAFTS + 2, (num_reqs,)), lens)
    for target, counts in ((batch.query_start_loc, lens), (batch.cu_num_logits, num_logits)):
        target[1 : num_reqs + 1] = counts.cumsum(0)
        target[num_reqs + 1 :] = counts.sum()
    vars(batch).update(poisoned_buffers(MAX_REQS, MAX_TOKENS))
    for space in (requests, batch):
        for name, value in vars(space).items():
            setattr(space, name, value.cuda())
    num_tokens = int(lens.sum())
    sizes = (num_reqs, num_tokens, int(num_logits.sum()), num_reqs + 3, num_tokens + 900)
    return requests, batch, sizes


def copy_of(space: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**{name: value.clone() for name, value in vars(space).items()})


def equal(left: SimpleNamespace, right: SimpleNamespace) -> None:
    for name, value in vars(left).items():
        assert torch.equal(value, getattr(right, name)), name


def test_batch_kernels_equal_their_references() -> None:
    requests, batch, sizes = random_step()
    num_reqs, num_tokens, _, reqs_padded, tokens_padded = sizes
    expected_requests, expected = copy_of(requests), copy_of(batch)
    gather_batch.prepare_inputs_reference(expected_requests, expected, StepSizes(*sizes))
    gather_batch.prepare_inputs(requests, batch, StepSizes(*sizes))
    equal(batch, expected)
    equal(requests, expected_requests)

    tables = [torch.randint(0, 999, (SLOTS, w), dtype=torch.int32).cuda() for w in (64, 256)]
    got = [torch.full((MAX_REQS, t.shape[1]), POISON, dtype=torch.int32).cuda() for t in tables]
    wanted = [table.clone() for table in got]
    rows = (num_reqs, reqs_padded)
    gather_batch.gather_block_tables_reference(tables, batch.idx_mapping, wanted, *rows)
    gather_batch.gather_block_tables(tables, batch.idx_mapping, got, *rows)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    slots = [torch.full((2, MAX_TOKENS), POISON, device="cuda") for _ in range(2)]
    args = (got, (64, 16), batch.query_start_loc, batch.positions)
    counts = (num_reqs, num_tokens, tokens_padded)
    gather_batch.compute_slot_mappings(*args, slots[0], *counts)
    gather_batch.compute_slot_mappings_reference(*args, slots[1], *counts)
    assert torch.equal(*slots)


def test_post_update_equals_its_reference() -> None:
    requests, batch, (num_reqs, *_) = random_step()
    num_sampled = torch.randint(0, DRAFTS + 2, (num_reqs,), dtype=torch.int32, device="cuda")
    sampled = torch.randint(0, 5, (num_reqs, DRAFTS + 1), device="cuda")
    sampled[torch.arange(DRAFTS + 1, device="cuda") >= num_sampled[:, None]] = -1
    rejected = torch.zeros(num_reqs, dtype=torch.int32, device="cuda")
    counts = torch.randint(0, 9, (SLOTS, 90), dtype=torch.int32, device="cuda")
    expected, expected_counts = copy_of(requests), counts.clone()
    args = (batch, sampled_tokens(sampled, num_sampled, rejected))
    gather_batch.post_update_reference(expected, *args, expected_counts)
    gather_batch.post_update(requests, *args, counts)
    equal(requests, expected)
    assert torch.equal(counts, expected_counts)


def on_gpu(of: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**{name: tensor.cuda() for name, tensor in vars(of).items()})


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("num_reqs", [1, 4, 6])
def test_staging_rows_and_storing_drafts_equal_their_references(
    num_reqs: int, padded: bool
) -> None:
    of, requests, lens = a_step(num_reqs, num_reqs)
    found = []
    for stage, store in (
        (stage_drafts.stage_draft_rows, stage_drafts.store_draft_rows),
        (stage_drafts.stage_draft_rows_reference, stage_drafts.store_draft_rows_reference),
    ):
        out, table = on_gpu(drafter()), torch.full((7, 3), POISON, device="cuda")
        sizes = (6 if padded else num_reqs, sum(lens) + 2, MAX_POSITION)
        stage(on_gpu(of), on_gpu(requests), out, *sizes)
        out.draft_tokens = torch.arange(18, device="cuda").view(6, 3)
        most = torch.tensor([3, 2, 1, 0, 9, 9], dtype=torch.int32, device="cuda")
        store(out, most, table, 6, 2)
        found.append([*vars(out).values(), table])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
