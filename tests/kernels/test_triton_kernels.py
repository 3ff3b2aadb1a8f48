"""Triton kernels, interpreted, equal their references."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import store_kv
from slipstream.kernels.attention.rotary_store_kv import rotary_store_kv_reference
from slipstream.kernels.batch import gather_batch
from slipstream.kernels.batch.step_sizes import StepSizes
from slipstream.kernels.drafts import prepare_draft
from slipstream.kernels.linear import activation, norm_rope
from slipstream.kernels.linear.rotation import Rotation

from ..cases import some
from .step_buffers import POISON, poisoned_buffers, sampled_tokens

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN or 77, so that unwritten outputs are noticed."""

    def poisoned(make: object) -> object:
        def empty(*args: object, **kwargs: object) -> Tensor:
            tensor: Tensor = make(*args, **kwargs)  # type: ignore[operator]
            return tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[got.dtype]
    assert got.dtype == expected.dtype and got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 10), (5, 64), (2, 3, 48), (1, 576)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from slipstream.kernels.linear.triton import norm_rope as kernels

    x = torch.randn(*shape[:-1], shape[-1] + 16, dtype=torch.float32).to(dtype)[..., : shape[-1]]
    for weight in (torch.randn(shape[-1]).to(dtype), torch.rand(shape[-1])):
        close(kernels.rms_norm(x, weight, 1e-5), norm_rope.rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rms_norm(dtype: torch.dtype) -> None:
    from slipstream.kernels.linear.triton import norm_rope as kernels

    x, residual = torch.randn(2, 7, 96).to(dtype)
    weight = torch.rand(96).to(dtype)
    expected = norm_rope.fused_add_rms_norm_reference(x, residual, weight, 1e-6)
    got = kernels.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    for left, right in zip(got, expected, strict=True):
        close(left, right)


def heads_of(tokens: int, num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A strided view like those that models take of a fused projection."""
    return torch.randn(tokens, num_heads + 2, dim).to(dtype)[:, 1 : num_heads + 1]


@pytest.mark.parametrize("dtype", some(DTYPES, (torch.bfloat16,)))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rot_dim"), [(64, 64), (48, 48), (64, 32)])
@pytest.mark.parametrize("num_kv_heads", [0, 2])
def test_rotary_embedding(
    dim: int, rot_dim: int, interleaved: bool, num_kv_heads: int, dtype: torch.dtype
) -> None:
    from slipstream.kernels.linear.triton import norm_rope as kernels

    rotation = Rotation(torch.randint(0, 50, (5,)), torch.randn(50, rot_dim), interleaved)
    query = heads_of(5, 6, dim, dtype)
    key = heads_of(5, num_kv_heads, dim, dtype) if num_kv_heads else None
    expected = norm_rope.rotary_embedding_reference(query, key, rotation)
    got = kernels.rotary_embedding(query, key, rotation)
    close(got[0], expected[0])
    if expected[1] is None:
        assert got[1] is None
    else:
        assert got[1] is not None
        close(got[1], expected[1])


def slots_with_gaps(tokens: int, num_slots: int) -> Tensor:
    slots = torch.randperm(num_slots)[:tokens]
    slots[torch.rand(tokens) < 0.3] = -1
    return slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mla", [False, True])
def test_store_kv(mla: bool, dtype: torch.dtype) -> None:
    from slipstream.kernels.attention.triton import store_kv as kernels

    slots = slots_with_gaps(9, 24)
    if mla:
        cache = torch.randn(6, 4, 1, 80).to(dtype)
        key, value = torch.randn(9, 1, 80).to(dtype), None
    else:
        cache = torch.randn(2, 6, 4, 3, 40).to(dtype)
        key, value = heads_of(9, 3, 40, dtype), heads_of(9, 3, 40, dtype)
    expected = cache.clone()
    store_kv.store_kv_reference(key, value, expected, slots)
    kernels.store_kv(key, value, cache, slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_store_kv(dtype: torch.dtype) -> None:
    from slipstream.kernels.linear.triton import norm_rope as kernels

    rotation = Rotation(torch.randint(0, 50, (9,)), torch.randn(50, 32))
    slots, cache = slots_with_gaps(9, 24), torch.randn(2, 6, 4, 3, 64).to(dtype)
    query, key, value = (heads_of(9, count, 64, dtype) for count in (6, 3, 3))
    expected_cache = cache.clone()
    expected = rotary_store_kv_reference(query, key, value, rotation, expected_cache, slots)
    close(kernels.rotary_store_kv(query, key, value, rotation, cache, slots), expected)
    close(cache, expected_cache)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    some(
        [(dtype, heads) for dtype in DTYPES for heads in (2, 4, 16)],
        kept=[*zip(DTYPES, (2, 4, 16), strict=True)],
    ),
)
def test_rotary_store_kv_of_halves(dtype: torch.dtype, heads: int) -> None:
    """Queries, keys and values fill their blocks of heads in part, and tokens have gaps."""
    from slipstream.kernels.linear.triton import norm_rope as kernels

    rotation = Rotation(torch.randint(0, 50, (11,)), torch.randn(50, 64))
    slots, cache = slots_with_gaps(9, 24), torch.randn(2, 6, 4, 3, 64).to(dtype)
    query, key, value = (heads_of(9, count, 64, dtype) for count in (6, 3, 3))
    expected_cache = cache.clone()
    args = (query, key, value, rotation)
    expected = rotary_store_kv_reference(*args, expected_cache, slots)
    close(kernels.rotary_store_kv(*args, cache, slots, halves=(heads, 2)), expected)
    close(cache, expected_cache)


def test_halves_are_turned_whole_and_without_norms() -> None:
    from slipstream.kernels.linear.triton.rotation import turns_halves

    def turns(dim: int = 128, rot_dim: int = 128, **options: Any) -> bool:
        rotation = Rotation(torch.arange(9), torch.randn(50, rot_dim), **options)
        return turns_halves(torch.randn(9, 4, dim), rotation)

    assert turns() and turns(64, 64)
    assert not turns(rot_dim=64) and not turns(interleaved=True) and not turns(96, 96)
    assert not turns(norms=(torch.ones(128), torch.ones(128), 1e-6))
    whole = Rotation(torch.arange(9), torch.randn(50, 128))
    assert not turns_halves(torch.randn(2, 9, 4, 128), whole)  # parts, which are summed first


@pytest.mark.parametrize("parts", [0, 3])
def test_rows_times_the_sigmoid_of_a_product(parts: int) -> None:
    from slipstream.kernels.linear.triton import activation as kernels

    x, gate = torch.randn(3, 60).half()[:, 5:45], torch.randn(1, 40).half()
    rows = torch.randn(parts, 3, 24) if parts else torch.randn(3, 24).half()
    residual = torch.randn(3, 24).half()
    for stream, out in ((None, torch.empty(3, 24)), (residual, residual)):
        got, expected = torch.empty_like(out), torch.empty_like(out)
        kernels.gated_rows(x, gate, rows, got, stream)
        activation.gated_rows_reference(x, gate, rows, expected, stream)
        tolerance = 1e-4 if stream is None else 2e-3
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("parts", [0, 3])
def test_sigmoid_gate(parts: int) -> None:
    """Of every second head of a wider row, whole or in parts."""
    from slipstream.kernels.linear.triton import activation as kernels

    dtype = torch.float32 if parts else torch.float16
    rows = torch.randn(*[parts] * bool(parts), 5, 7, 24).to(dtype)
    gate, x = rows[..., 1:6:2, :], torch.randn(5, 4, 24).half()[:, 1:]
    got, expected = kernels.sigmoid_gate(x, gate), activation.sigmoid_gate_reference(x, gate)
    assert got.is_contiguous() and got.shape == (5, 72)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activation(name: str, dtype: torch.dtype) -> None:
    from slipstream.kernels.linear.triton import activation as kernels

    x = (torch.randn(3, 2 * 70 + 4) * 8).to(dtype)[:, :140]
    # Left of zero the two parts of a gate cancel, and the other half makes the rest larger.
    got, expected = getattr(kernels, name)(x), getattr(activation, f"{name}_reference")(x)
    close(got / 8, expected / 8)
    if name == "silu_and_mul":
        close(kernels.silu_and_mul(x, 1.5), activation.silu_and_mul_reference(x, 1.5))


SLOTS, MAX_LEN, DRAFTS, MAX_REQS, MAX_TOKENS = 7, 50, 3, 6, 64


def random_step() -> tuple[SimpleNamespace, SimpleNamespace, tuple[int, ...]]:
    """A request table and a batch of its prefills and decodes; buffers are poisoned."""
    num_reqs = int(torch.randint(1, MAX_REQS, ()))
    requests = SimpleNamespace(
        all_token_ids=torch.randint(0, 90, (SLOTS, MAX_LEN), dtype=torch.int32),
        prefill_len=torch.randint(5, 30, (SLOTS,), dtype=torch.int32),
        total_len=torch.randint(30, MAX_LEN + 1, (SLOTS,), dtype=torch.int32),
        num_computed_tokens=torch.randint(0, 40, (SLOTS,), dtype=torch.int32),
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
    num_logits = torch.minimum(torch.randint(1, DRAFTS + 2, (num_reqs,)), lens)
    for target, counts in ((batch.query_start_loc, lens), (batch.cu_num_logits, num_logits)):
        target[1 : num_reqs + 1] = counts.cumsum(0)
        target[num_reqs + 1 :] = counts.sum()
    vars(batch).update(poisoned_buffers(MAX_REQS, MAX_TOKENS))
    num_tokens = int(lens.sum())
    sizes = (num_reqs, num_tokens, int(num_logits.sum()), num_reqs + 1, num_tokens + 5)
    return requests, batch, sizes


def copy_of(space: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**{name: value.clone() for name, value in vars(space).items()})


def equal(left: SimpleNamespace, right: SimpleNamespace) -> None:
    for name, value in vars(left).items():
        assert torch.equal(value, getattr(right, name)), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_drafts", [0, DRAFTS])
def test_prepare_inputs(seed: int, num_drafts: int) -> None:
    from slipstream.kernels.batch.triton import gather_batch as kernels

    torch.manual_seed(seed)
    requests, batch, sizes = random_step()
    if num_drafts == 0:
        requests.draft_tokens = requests.draft_tokens[:, :0].contiguous()
        batch.cu_num_logits[: sizes[0] + 1] = torch.arange(sizes[0] + 1)
        sizes = (*sizes[:2], sizes[0], *sizes[3:])
    expected_requests, expected = copy_of(requests), copy_of(batch)
    gather_batch.prepare_inputs_reference(expected_requests, expected, StepSizes(*sizes))
    kernels.prepare_inputs(requests, batch, StepSizes(*sizes))
    equal(batch, expected)
    equal(requests, expected_requests)


@pytest.mark.parametrize("seed", range(3))
def test_block_tables_and_slots(seed: int) -> None:
    from slipstream.kernels.batch.triton import gather_batch as kernels

    torch.manual_seed(seed)
    _, batch, (num_reqs, num_tokens, _, reqs_padded, tokens_padded) = random_step()
    tables = [torch.randint(0, 9, (SLOTS, width), dtype=torch.int32) for width in (4, 11)]
    got = [torch.full((MAX_REQS, table.shape[1]), POISON, dtype=torch.int32) for table in tables]
    expected = [table.clone() for table in got]
    args = (num_reqs, reqs_padded)
    gather_batch.gather_block_tables_reference(tables, batch.idx_mapping, expected, *args)
    kernels.gather_block_tables(tables, batch.idx_mapping, got, *args)
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right)

    positions = torch.randint(0, 70, (MAX_TOKENS,))
    outs = [torch.full((2, MAX_TOKENS), POISON) for _ in range(2)]
    for out, run in zip(
        outs,
        (kernels.compute_slot_mappings, gather_batch.compute_slot_mappings_reference),
        strict=True,
    ):
        sizes = (num_reqs, num_tokens, tokens_padded)
        run(expected, (16, 4), batch.query_start_loc, positions, out, *sizes)
    assert torch.equal(*outs)


@pytest.mark.parametrize("seed", range(6))
def test_post_update(seed: int) -> None:
    from slipstream.kernels.batch.triton import gather_batch as kernels

    torch.manual_seed(seed)
    requests, batch, (num_reqs, *_) = random_step()
    batch.idx_mapping[0] = -1 if seed % 2 else batch.idx_mapping[0]
    num_sampled = torch.randint(0, DRAFTS + 2, (num_reqs,), dtype=torch.int32)
    sampled = torch.randint(0, 5, (num_reqs, DRAFTS + 1))  # few ids: repeats are likely
    sampled[torch.arange(DRAFTS + 1) >= num_sampled[:, None]] = -1
    rejected = torch.randint(0, 2, (num_reqs,), dtype=torch.int32)
    for counts in (None, torch.randint(0, 9, (SLOTS, 90), dtype=torch.int32)):
        expected, expected_counts = copy_of(requests), None if counts is None else counts.clone()
        args = (batch, sampled_tokens(sampled, num_sampled, rejected))
        gather_batch.post_update_reference(expected, *args, expected_counts)
        kernels.post_update(requests, *args, counts)
        equal(requests, expected)
        if counts is not None:
            assert expected_counts is not None and torch.equal(counts, expected_counts)


@pytest.mark.parametrize("seed", range(3))
def test_draft_decodes_advance_and_find_their_slots(seed: int) -> None:
    from slipstream.kernels.drafts.triton import prepare_draft as kernels

    generator = torch.Generator().manual_seed(seed)
    rows, limit = 5, 24
    seq_lens = torch.randint(1, limit + 1, (rows,), generator=generator).int()
    seq_lens[-1] = 0
    seq_lens[0] = limit
    positions = (seq_lens.long() - 1).clamp(min=0)
    tables = [
        torch.randint(0, 9, (rows + 2, n), generator=generator).int() for n in (limit // 4, 3)
    ]
    found = []
    for versions in (kernels, prepare_draft):
        suffix = "" if versions is kernels else "_reference"
        advance = getattr(versions, f"advance_draft_decode{suffix}")
        slots_of = getattr(versions, f"map_draft_slots{suffix}")
        place, lens, writes = positions.clone(), seq_lens.clone(), torch.full((rows,), POISON)
        out = torch.full((2, rows + 1), POISON)
        states = []
        for _ in range(3):
            advance(place, lens, limit, writes)
            slots_of(tables, [4, 4], lens, writes, out)
            states.append([t.tolist() for t in (place, lens, writes, out)])
        advance(place, lens, limit)
        found.append((states, place.tolist()))
    assert found[0] == found[1]
    assert all(-1 in state[3][0] and max(state[3][0][:-1]) > 0 for state in found[0][0][:1])


def test_the_interpreter_refuses_what_may_fault_on_a_gpu() -> None:
    """Rows behind a table, before it and far from it."""
    from triton.runtime.errors import InterpreterError

    from slipstream.kernels.linear.triton.embedding import embedding

    table = torch.randn(4, 8)
    assert torch.equal(embedding(torch.tensor([3, 0]), table), table[[3, 0]])
    for ids in ([4, 0], [0, -1], [1 << 40, 0]):
        with pytest.raises(InterpreterError, match="8 of 8 pointers are in no argument"):
            embedding(torch.tensor(ids), table)
