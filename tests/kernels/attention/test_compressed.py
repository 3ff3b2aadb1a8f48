"""Kernels of compressed caches: Triton's forms, interpreted, equal the references."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.compressed import select_entries as selecting
from slipstream.kernels.attention.compressed.compress import compress_reference
from slipstream.kernels.attention.compressed.pages import (
    Compressor,
    Pages,
    SlotList,
    TokenRows,
    entry_slots,
    list_slots_reference,
    requests_of,
    window_slots,
)
from slipstream.kernels.attention.compressed.select_entries import (
    score_entries_reference,
    select_entries,
)
from slipstream.kernels.attention.compressed.sparse_attention import sparse_attention_reference
from slipstream.kernels.attention.compressed.store_rows import store_rows, store_rows_reference
from slipstream.kernels.attention.compressed.tail_rotary import tail_rotary_reference
from slipstream.kernels.attention.paged_rows import Fp8Cache
from slipstream.kernels.quant.e4m3 import E4M3, pack_latent, unpack_latent
from slipstream.kernels.quant.latent_pages import page_bytes

from ...cases import some

interpreted = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
BLOCK, COLUMNS, MAX_LEN = 16, 6, 96
# Of each request: the position of its first token in this pass, and its tokens.
REQUESTS = ((0, 9), (17, 1), (30, 4), (63, 1))


def tokens_of(padding: int = 2) -> tuple[TokenRows, Tensor]:
    """The token rows of REQUESTS and padded ones, and where each request's begin."""
    starts = torch.tensor([0, *[count for _, count in REQUESTS]]).cumsum(0).int()
    positions = torch.cat([torch.arange(p, p + n) for p, n in REQUESTS] + [torch.zeros(padding)])
    return TokenRows(positions.long(), requests_of(starts, len(positions))), starts


def pages_of(width: int, entry_tokens: int, dtype: torch.dtype, seed: int = 0) -> Pages:
    """A cache of random rows over scattered blocks, and the slots of this pass's tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 1 + len(REQUESTS) * COLUMNS
    table = (torch.randperm(num_blocks - 1, generator=generator) + 1).view(-1, COLUMNS).int()
    shape = (num_blocks, BLOCK // entry_tokens, 1, width)
    cache = torch.randn(shape, generator=generator).to(dtype)
    tokens, starts = tokens_of()
    block = table[tokens.requests, tokens.positions // BLOCK].long()
    slots = block * BLOCK + tokens.positions % BLOCK
    slots[starts[-1] :] = -1
    return Pages(cache, table, slots, BLOCK, entry_tokens)


def table_of(rot: int = 8) -> Tensor:
    return torch.randn(MAX_LEN, rot)


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    assert got.dtype == expected.dtype and got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_lists_of_slots_hold_what_a_token_sees() -> None:
    tokens, _ = tokens_of(padding=0)
    raw, entries = pages_of(4, 1, torch.float32), pages_of(4, 4, torch.float32)
    window, seen = window_slots(raw, tokens, 5), entry_slots(entries, tokens, 20)
    for row, (request, position) in enumerate(zip(*vars(tokens).values(), strict=True)):
        request, position = int(tokens.requests[row]), int(tokens.positions[row])
        table = raw.block_table[request].tolist()
        visible = range(max(0, position - 4), position + 1)
        expected = [table[p // BLOCK] * BLOCK + p % BLOCK for p in visible]
        assert window.slots[row].tolist() == expected + [-1] * (5 - len(expected))
        assert int(window.counts[row]) == len(expected)
        table, ended = entries.block_table[request].tolist(), range((position + 1) // 4)
        expected = [table[w // 4] * 4 + w % 4 for w in ended]  # 4 entries a block
        assert seen.slots[row].tolist() == expected + [-1] * (20 - len(expected))
        assert int(seen.counts[row]) == len(expected)


class TestTriton:
    pytestmark = interpreted

    @pytest.mark.parametrize(("entry_tokens", "width"), [(1, 5), (4, 20), (4, 3)])
    def test_list_slots(self, entry_tokens: int, width: int) -> None:
        """Of entries that are the newest, the oldest, or chosen ones, among padded tokens."""
        from slipstream.kernels.attention.compressed.triton.list_slots import list_slots

        tokens, _ = tokens_of()
        pages, rows = pages_of(4, entry_tokens, torch.float32), len(tokens.positions)
        chosen = torch.randint(0, 9, (rows, width))
        for newest, own in ((True, None), (False, None), (False, chosen)):
            got = list_slots(pages, tokens, width, newest, own)
            expected = list_slots_reference(pages, tokens, width, newest, own)
            assert torch.equal(got.slots, expected.slots) and got.slots.dtype == torch.int32
            assert torch.equal(got.counts, expected.counts) and got.counts.dtype == torch.int32

    @pytest.mark.parametrize("dtype", some(list(TOLERANCE), (torch.float16,)))
    @pytest.mark.parametrize("case", ["rotate", "norm", "weighted", "inverse"])
    def test_tail_rotary(self, case: str, dtype: torch.dtype) -> None:
        from slipstream.kernels.attention.compressed.triton.tail_rotary import tail_rotary

        wide = torch.randn(7, 3 * 32 + 5).to(dtype)
        x, positions = wide[:, 5:].view(7, 3, 32), torch.randint(MAX_LEN, (7,))
        args = (x, positions, table_of(), None if case in ("rotate", "inverse") else 1e-5)
        weight = torch.rand(32) if case == "weighted" else None
        got = tail_rotary(*args, weight, case == "inverse")
        close(got, tail_rotary_reference(*args, weight, case == "inverse"))
        if case == "inverse":
            turned = tail_rotary(x, positions, unit := table_of_turns())
            close(tail_rotary(turned, positions, unit, inverse=True), x)

    @pytest.mark.parametrize("dtype", some(list(TOLERANCE), (torch.float32,)))
    @pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (8, False), (16, False)])
    def test_compress(self, ratio: int, overlap: bool, dtype: torch.dtype) -> None:
        from slipstream.kernels.attention.compressed.triton.compress import compress

        dim, tokens = 16, tokens_of()[0]
        width = 2 * dim if overlap else dim
        rule = Compressor(
            ratio, dim, overlap, 3, 3 + width, torch.randn(ratio, width), torch.rand(dim), 1e-6,
            table_of(),
        )  # fmt: skip
        pending = pages_of(2 * width + 5, 1, dtype)
        entries = pages_of(dim, ratio, dtype, seed=1)
        other = replace(entries, cache=entries.cache.clone())
        before = entries.cache.clone()
        compress(rule, pending, tokens, entries)
        compress_reference(rule, pending, tokens, other)
        close(entries.cache, other.cache)
        changed = int((entries.rows != before.view(-1, dim)).any(1).sum())
        assert changed == sum((p + i + 1) % ratio == 0 for p, n in REQUESTS for i in range(n))

    @pytest.mark.parametrize("dtype", some(list(TOLERANCE), (torch.float32,)))
    def test_select_entries(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        from slipstream.kernels.attention.compressed.triton.select_entries import score_entries

        tokens = tokens_of()[0]
        keys, entries = pages_of(16, 4, dtype), pages_of(32, 4, dtype, seed=1)
        query, weights = torch.randn(len(tokens.positions), 5, 16).to(dtype), torch.randn(17, 8)
        args = (query, weights[:, :5], keys, tokens, 20)
        got, expected = score_entries(*args), score_entries_reference(*args)
        close(got, expected)
        chosen = select_entries(*args[:3], entries, tokens, 3, 20)
        monkeypatch.setattr(selecting, "_SCORES", 4 * 20)  # so few that rows are cut into parts
        in_parts = select_entries(*args[:3], entries, tokens, 3, 20)
        assert torch.equal(in_parts.slots, chosen.slots)
        assert torch.equal(in_parts.counts, chosen.counts)
        for row, scores in enumerate(expected):
            ended = int((tokens.positions[row] + 1) // 4)
            best = scores[:ended].topk(min(3, ended))[1].tolist()
            table = entries.block_table[tokens.requests[row]].tolist()
            slots = [table[w // 4] * 4 + w % 4 for w in best]
            assert chosen.slots[row].tolist() == slots + [-1] * (3 - len(slots))
            assert int(chosen.counts[row]) == len(slots)

    @pytest.mark.parametrize("dtype", some(list(TOLERANCE), (torch.float32,)))
    @pytest.mark.parametrize("heads", some([3, 16, 40], (3,)))
    def test_sparse_attention(self, heads: int, dtype: torch.dtype) -> None:
        from slipstream.kernels.attention.compressed.triton.sparse_attention import sparse_attention

        tokens = tokens_of()[0]
        raw, entries = pages_of(32, 1, dtype), pages_of(32, 4, dtype, seed=1)
        window: SlotList | None = window_slots(raw, tokens, 20)
        query = torch.randn(len(tokens.positions), heads, 32).to(dtype)
        sinks = torch.randn(heads)
        for listed in (None, entry_slots(entries, tokens, 20)):
            args = (query, raw, window, None if listed is None else entries, listed, sinks, 0.2)
            close(sparse_attention(*args), sparse_attention_reference(*args))

    @pytest.mark.parametrize("splits", some([4, 16], (4,)))
    def test_lists_split_over_programs(self, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Some splits have rows of both lists, some of one, and those of short lists none."""
        from slipstream.kernels.attention.compressed.triton import sparse_attention as module

        monkeypatch.setattr(module, "_LEAST_ROWS", 1)
        monkeypatch.setattr(module, "num_splits", lambda *shape: splits)
        tokens = tokens_of()[0].part(slice(0, 15, 7))
        raw, entries = pages_of(32, 1, torch.float32), pages_of(32, 4, torch.float32, seed=1)
        window = window_slots(raw, tokens, 90)
        assert int(window.counts.max()) > 2 * 16 > 16 > int(window.counts.min())
        query = torch.randn(len(tokens.positions), 5, 32)
        listed = entry_slots(entries, tokens, 20)
        both = (query, raw, window, entries, listed, torch.randn(5), 0.2)
        close(module.sparse_attention(*both), sparse_attention_reference(*both))
        latent = (query, raw, window, None, None, None, 0.2, 16)
        close(module.sparse_attention(*latent), sparse_attention_reference(*latent))

    def test_few_tokens_split_their_lists(self) -> None:
        from slipstream.kernels.attention.triton.attention_plan import MAX_SPLITS, num_splits

        h200 = 132  # multiprocessors
        assert [num_splits(tokens * 4, 2048, h200, 64) for tokens in (1, 4, 8, 33, 128)] == [
            MAX_SPLITS, 16, 8, 2, 1,
        ]  # fmt: skip
        assert [num_splits(2, rows, h200, 64) for rows in (127, 128, 640, 1 << 16)] == [
            1, 2, 8, MAX_SPLITS,
        ]  # fmt: skip

    @pytest.mark.parametrize("packed", [False, True])
    def test_latent_rows(self, packed: bool) -> None:
        """V3.2's form: a value is a part of the row, there are no sinks, rows may be e4m3."""
        from slipstream.kernels.attention.compressed.triton.sparse_attention import sparse_attention

        tokens = tokens_of()[0]
        rows = pages_of(32 + 16, 1, torch.float32)
        query = torch.randn(len(tokens.positions), 5, 48)
        if packed:
            fp8 = Fp8Cache(torch.float32, latent=32)
            cache = pack_latent(rows.cache, 32).view(torch.float8_e4m3fn)
            plain = replace(rows, cache=unpack_latent(cache.view(torch.uint8), 32, torch.float32))
            rows = replace(rows, cache=cache, fp8=fp8)
        args = (entry_slots(rows, tokens, 90), None, None, None, 0.2, 32)
        expected = sparse_attention_reference(query, rows, *args)
        assert expected.shape == (len(tokens.positions), 5, 32)
        close(sparse_attention(query, rows, *args), expected)
        if packed:
            close(sparse_attention_reference(query, plain, *args), expected)

    def test_packed_pages(self) -> None:
        """V4's form: compressed and stored rows are packed, and attention reads both caches."""
        from slipstream.kernels.attention.compressed.triton.compress import compress
        from slipstream.kernels.attention.compressed.triton.sparse_attention import sparse_attention
        from slipstream.kernels.attention.compressed.triton.store_rows import store_rows

        tokens = tokens_of()[0]
        raw, entries = packed_pages(128, 8, 1), packed_pages(128, 8, 4, seed=1)
        copies = [replace(pages, cache=pages.cache.clone()) for pages in (raw, entries)]
        rows = torch.randn(len(tokens.positions), 1, 128) * 10 ** torch.randn(17, 1, 1)
        rows = rows.bfloat16().float()  # the interpreter does not round what stays bf16
        store_rows(rows, raw, None)
        store_rows_reference(rows, copies[0])
        pending = pages_of(4 * 128, 1, torch.float32)
        rule = Compressor(
            4, 128, True, 0, 256, torch.randn(4, 256), torch.rand(128), 1e-6, table_of()
        )
        before = entries.cache.clone()
        compress(rule, pending, tokens, entries)
        compress_reference(rule, pending, tokens, copies[1])
        assert torch.equal(raw.cache.view(torch.uint8), copies[0].cache.view(torch.uint8))
        assert not torch.equal(entries.cache.view(torch.uint8), before.view(torch.uint8))
        every = torch.arange(entries.cache.shape[0] * entries.page_rows)
        torch.testing.assert_close(  # a last bit before rounding can change a code
            entries.gather(every), copies[1].gather(every), rtol=0.13, atol=1e-2
        )
        query, sinks = torch.randn(len(tokens.positions), 5, 128), torch.randn(5)
        window, listed = window_slots(raw, tokens, 20), entry_slots(entries, tokens, 20)
        args = (query, raw, window, entries, listed, sinks, 0.02)
        close(sparse_attention(*args), sparse_attention_reference(*args))

    def test_keys_of_e4m3(self) -> None:
        """V3.2's keys, one for each token, with a scale each, as its cache stores them."""
        from slipstream.kernels.attention.compressed.triton.select_entries import score_entries
        from slipstream.kernels.attention.triton.store_kv import store_kv

        tokens = tokens_of()[0]
        keys = pages_of(32, 1, torch.float32)
        fp8 = Fp8Cache(torch.float32, latent=32)
        cache = pack_latent(keys.cache, 32).view(torch.float8_e4m3fn)
        assert cache.shape[-1] == 36
        packed = replace(keys, cache=cache, fp8=fp8)
        query, weights = torch.randn(len(tokens.positions), 5, 32), torch.randn(17, 5)
        got = score_entries(query, weights, packed, tokens, 90)
        close(got, score_entries_reference(query, weights, packed, tokens, 90))
        new = torch.randn(len(tokens.positions), 1, 32)
        store_kv(new, None, cache, packed.slot_mapping, fp8)
        written = packed.slot_mapping >= 0
        stored = cache.view(torch.uint8).view(-1, 36)[packed.slot_mapping[written]]
        assert torch.equal(stored, pack_latent(new[written, 0], 32))


def packed_pages(dim: int, rotary: int, entry_tokens: int, seed: int = 0) -> Pages:
    """Packed pages of random rows."""
    plain = pages_of(dim, entry_tokens, torch.float32, seed)
    rows, latent = BLOCK // entry_tokens, dim - rotary
    cache = torch.zeros(plain.cache.shape[0], 1, 1, page_bytes(rows, latent, rotary)).to(E4M3)
    fp8 = Fp8Cache(torch.float32, latent=latent, rotary=rotary, paged=True)
    pages = replace(plain, cache=cache, fp8=fp8)
    pages.write(torch.arange(plain.rows.shape[0]), plain.rows)
    return pages


def test_pages_have_the_bytes_that_flash_mla_reads() -> None:
    """Byte for byte: 576 bytes of values a row, then 8 of scales a row; a page is padded."""
    rows = torch.randn(3, 64, 512) * 10 ** torch.randn(3, 64, 1)
    rows[0, 0, :64] = 0
    rows[0, 1, 0], rows[0, 1, 1:64] = 448 * 2.0**3, 0  # exactly a power of two
    tokens = Pages(
        torch.zeros(3, 1, 1, page_bytes(64, 448, 64)).to(E4M3), torch.zeros(1, 3).int(),
        torch.arange(192), 64, 1, Fp8Cache(torch.bfloat16, latent=448, rotary=64, paged=True),
    )  # fmt: skip
    assert tokens.cache.shape[-1] == 65 * 576
    store_rows(rows.view(192, 1, 512), tokens)
    data = tokens.cache.view(torch.uint8).view(3, -1)
    wide = rows.bfloat16().float()
    for page, row in ((0, 0), (0, 1), (0, 63), (2, 17)):
        own = data[page, row * 576 : (row + 1) * 576]
        scales = data[page, 64 * 576 + row * 8 : 64 * 576 + (row + 1) * 8].tolist()
        assert scales[7] == 0
        for tile in range(7):
            values = wide[page, row, tile * 64 : (tile + 1) * 64]
            least = max(float(values.abs().max()), 1e-4) / 448
            exponent = math.ceil(math.log2(least))
            assert scales[tile] == exponent + 127
            codes = own[tile * 64 : (tile + 1) * 64].view(E4M3)
            assert torch.equal(codes.float(), (values / 2.0**exponent).to(E4M3).float())
        assert torch.equal(own[448:].view(torch.bfloat16).float(), wide[page, row, 448:])
    close(tokens.gather(torch.arange(192)), tokens.gather(torch.arange(192)).bfloat16().float())
    error = (tokens.gather(torch.arange(192)).view_as(wide) - wide).norm() / wide.norm()
    assert error < 0.04


def table_of_turns() -> Tensor:
    """Cosines and sines of true angles."""
    angles = torch.rand(MAX_LEN, 4) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1)
