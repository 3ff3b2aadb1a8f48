"""The attention of long queries for Hopper GPUs, its roles run as threads, equals the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import AttentionRule, Fp8Cache, PagedRows

from ..gluon_threads import ThreadedKernel

pytestmark = pytest.mark.usefixtures("triton_interpreter")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernel, which runs on the CPU."""
    from slipstream.kernels.attention.triton import hopper_prefill

    ThreadedKernel(hopper_prefill, "_hopper_prefill_kernel").replace(monkeypatch)
    return hopper_prefill


@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "page", "programs", "form", "options"),
    [
        ([(9, 9), (70, 300), (1, 15)], (4, 2), 64, 16, 2, {}, {}),
        ([(200, 200), (150, 420)], (2, 1), 128, 16, 3, {"stages": 3}, {}),
        ([(150, 300), (40, 40)], (3, 1), 64, 32, 2, {"alternate": False}, {"softcap": 5.0}),
        ([(150, 300), (40, 40)], (2, 2), 64, 8, 2, {"block_n": 64}, {"sliding_window": 70}),
        ([(90, 500)], (8, 1), 64, 256, 1, {"alternate": False}, {"sinks": 8}),
        ([(128, 256), (64, 64)], (4, 1), 64, 16, 2, {}, {"sinks": 4, "sliding_window": 96}),
    ],
)
def test_it_equals_the_reference(
    kernel: Any,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    page: int,
    programs: int,
    form: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Pages are shuffled, unused memory is NaN, and padded token rows become zeros."""
    new, total = zip(*lengths, strict=True)
    blocks = [-(-n // page) for n in total]
    table = torch.zeros(len(lengths), max(blocks) + 2, dtype=torch.int32)
    cache = torch.full((2, sum(blocks) + 1, page, heads[1], dim), float("nan"))
    free = (torch.randperm(sum(blocks)) + 1).tolist()
    for row, length in enumerate(total):
        for block in range(blocks[row]):
            table[row, block] = number = free.pop()
            used = min(page, length - block * page)
            cache[:, number, :used] = torch.randn(2, used, heads[1], dim)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    tokens = int(starts[-1]) + 3
    rows = PagedRows(table, starts, torch.tensor(total).int(), max(new), torch.zeros(tokens).long())
    options = dict(options)
    sinks = torch.randn(heads[0]) if options.pop("sinks", 0) else None
    rule = AttentionRule(scale=dim**-0.5, sinks=sinks, **options)
    query = torch.randn(tokens, heads[0] + 1, dim)[:, 1:]
    out = torch.full((tokens, heads[0], dim), float("nan"))
    kernel.hopper_prefill(query, cache, rows, rule, out, kernel.Form(**form), programs)
    expected = paged_attention_reference(query, cache.nan_to_num(), rows, rule)
    torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


def test_it_leaves_short_requests(kernel: Any) -> None:
    """Rows of requests that it skips stay as they are."""
    lens = torch.tensor([2, 90, 1, 5, 130, 0])
    total = torch.tensor([40, 100, 7, 5, 150, 0]).int()
    table = torch.arange(1, 61).int().view(6, 10)
    starts = torch.cat((torch.zeros(1), lens.cumsum(0))).int()
    rows = PagedRows(table, starts, total, 130, torch.zeros(231).long(), longer_than=2)
    query, cache = torch.randn(231, 2, 64), torch.randn(2, 61, 16, 1, 64)
    out = torch.full((231, 2, 64), 7.0)
    rule = AttentionRule(scale=0.125)
    kernel.hopper_prefill(query, cache, rows, rule, out, programs=2)
    expected = paged_attention_reference(query, cache, rows, rule)
    is_long = (lens > 2).repeat_interleave(lens)
    torch.testing.assert_close(out[:228][is_long], expected[:228][is_long], rtol=3e-6, atol=3e-6)
    assert (out[:228][~is_long] == 7).all() and not out[228:].any()


@pytest.mark.parametrize("short_len", [0, 2])
def test_attention_uses_it_where_it_is_wanted_and_fits(
    short_len: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.attention.triton import paged_attention as attention

    launched: list[int] = []

    def launch(query: torch.Tensor, *arguments: Any) -> None:
        launched.append(len(query))
        attend(query, *arguments, programs=1)

    attend = kernel.hopper_prefill
    monkeypatch.setattr(kernel, "hopper_prefill", launch)
    monkeypatch.setattr(attention, "hopper_prefill_wanted", lambda _: True)
    starts, lens = torch.tensor([0, 2, 92, 93]).int(), torch.tensor([40, 100, 7]).int()
    table, slots = torch.arange(1, 31).int().view(3, 10), torch.zeros(93).long()
    rows = PagedRows(table, starts, lens, 90, slots, short_len=short_len)
    query = torch.randn(93, 4, 64, dtype=torch.float16)
    cache = torch.randn(2, 31, 16, 2, 64, dtype=torch.float16)
    rule = AttentionRule(scale=0.125)
    out = attention.paged_attention(query, cache, rows, rule)
    expected = paged_attention_reference(query.float(), cache.float(), rows, rule)
    torch.testing.assert_close(out.float(), expected, rtol=3e-3, atol=3e-3)
    assert launched == [93]
    attention.paged_attention(query.float(), cache.float(), rows, rule)  # of 32 bits
    assert launched == [93]


def test_it_is_wanted_on_hopper_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.kernels.attention.triton import attention_plan

    def wanted(tokens: int, capability: tuple[int, int]) -> bool:
        card = SimpleNamespace(capability=capability, num_processors=132)
        monkeypatch.setattr(attention_plan, "card_of", lambda _: card)
        return attention_plan.hopper_prefill_wanted(torch.empty(tokens, 32, 128))

    monkeypatch.setenv("SLIPSTREAM_HOPPER_PREFILL", "1")
    assert wanted(528, (9, 0)) and not wanted(527, (9, 0))
    assert not wanted(3000, (8, 9)) and not wanted(3000, (10, 0))
    monkeypatch.setenv("SLIPSTREAM_HOPPER_PREFILL", "0")
    assert not wanted(3000, (9, 0))


def test_it_refuses_what_it_cannot_read(kernel: Any) -> None:
    starts = torch.tensor([0, 9]).int()
    rows = PagedRows(starts[None], starts, starts[1:], 9, starts.long())

    def fits(dim: int = 128, page: int = 16, **options: Any) -> bool:
        query = torch.empty(9, 4, dim, dtype=torch.bfloat16)
        cache = torch.empty(2, 3, page, 2, dim, dtype=options.pop("dtype", torch.bfloat16))
        rule = AttentionRule(scale=1.0, **options)
        return bool(kernel.fits(query, cache, rows, rule))

    assert fits() and fits(64) and fits(page=128) and fits(sliding_window=8)
    assert not fits(256) and not fits(page=12) and not fits(page=4)
    assert not fits(dtype=torch.float16) and not fits(fp8=Fp8Cache(torch.bfloat16))
    apart = torch.empty(2, 3, 32, 2, 128, dtype=torch.bfloat16)[:, :, ::2]
    spread = torch.empty(2, 6, 16, 2, 128, dtype=torch.bfloat16)[:, ::2]
    query = torch.empty(9, 4, 128, dtype=torch.bfloat16)
    assert kernel.fits(query, apart, rows, AttentionRule(scale=1.0))
    assert not kernel.fits(query, spread, rows, AttentionRule(scale=1.0))
    assert not kernel.fits(query.transpose(0, 1), spread, rows, AttentionRule(scale=1.0))
