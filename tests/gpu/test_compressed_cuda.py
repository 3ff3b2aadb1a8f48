"""DeepSeek V4 on a GPU: compiled kernels equal the references at its real sizes, and a whole engine
gives the same text from graphs, eagerly and with drafts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.speculators.recorded_proposals import Proposals, recorded_proposals  # noqa: E402
from tests.speculators.tiny_engine import Run, TinyEngine, prompts  # noqa: E402
from tests.speculators.v4_mtp_oracle import V4MtpOracle  # noqa: E402

from slipstream.configs.schema import SpeculativeConfig  # noqa: E402
from slipstream.kernels.attention.compressed.compress import (  # noqa: E402
    compress,
    compress_reference,
)
from slipstream.kernels.attention.compressed.pages import (  # noqa: E402
    Compressor,
    Pages,
    TokenRows,
    entry_slots,
    requests_of,
    window_slots,
)
from slipstream.kernels.attention.compressed.select_entries import (  # noqa: E402
    score_entries_reference,
    select_entries,
)
from slipstream.kernels.attention.compressed.sparse_attention import (  # noqa: E402
    sparse_attention,
    sparse_attention_reference,
)
from slipstream.kernels.attention.compressed.tail_rotary import (  # noqa: E402
    tail_rotary,
    tail_rotary_reference,
)
from slipstream.kernels.linear.hyper.connections import (  # noqa: E402
    add_to_streams,
    add_to_streams_reference,
    mix_streams,
    mix_streams_reference,
)
from slipstream.kernels.linear.hyper.site import Site  # noqa: E402
from slipstream.runner.attention.flash_mla_sparse import SparsePass  # noqa: E402
from slipstream.runner.graphs.manager import relative_error  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Of each request: the position of its first token, and its tokens.
REQUESTS = ((0, 300), (1021, 4), (127, 1), (4093, 3), (4095, 1))
MAX_LEN = 4608


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def token_rows() -> TokenRows:
    starts = torch.tensor([0, *[count for _, count in REQUESTS]], device="cuda").cumsum(0).int()
    positions = torch.cat([torch.arange(p, p + n) for p, n in REQUESTS]).cuda()
    return TokenRows(positions, requests_of(starts, len(positions)))


def pages_of(
    tokens: TokenRows, width: int, block: int, rate: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Pages:
    """A cache of random rows over scattered blocks, and the slots of these tokens."""
    columns = MAX_LEN // block
    order = torch.randperm(len(REQUESTS) * columns, device="cuda") + 1
    table = order.int().view(-1, columns)
    cache = randn(1 + table.numel(), block // rate, 1, width, dtype=dtype)
    blocks = table[tokens.requests, tokens.positions // block].long()
    return Pages(cache, table, blocks * block + tokens.positions % block, block, rate)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "dim"), [(64, 512), (1, 512), (64, 128)])
def test_tail_rotary(heads: int, dim: int, dtype: torch.dtype) -> None:
    x, positions = randn(33, heads, dim, dtype=dtype), torch.arange(33, device="cuda") * 100
    table, weight = randn(MAX_LEN, 64, dtype=torch.float32), torch.rand(dim, device="cuda")
    for args in ((1e-6, weight), (1e-6, None), (None, None, True)):
        got = tail_rotary(x, positions, table, *args)  # type: ignore[arg-type]
        expected = tail_rotary_reference(x, positions, table, *args)  # type: ignore[arg-type]
        assert relative_error(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rate", "dim"), [(4, 512), (4, 128), (128, 512)])
def test_compress(rate: int, dim: int, dtype: torch.dtype) -> None:
    tokens = token_rows()
    width = 2 * dim if rate == 4 else dim
    rule = Compressor(
        rate, dim, rate == 4, 16, 16 + width, randn(rate, width, dtype=torch.float32),
        torch.rand(dim, device="cuda"), 1e-6, randn(MAX_LEN, 64, dtype=torch.float32),
    )  # fmt: skip
    pending = pages_of(tokens, 2 * width + 32, 16, dtype=dtype)
    entries = pages_of(tokens, dim, 128, rate, dtype)
    expected = Pages(entries.cache.clone(), entries.block_table, entries.slot_mapping, 128, rate)
    compress(rule, pending, tokens, entries)
    compress_reference(rule, pending, tokens, expected)
    assert relative_error(entries.cache, expected.cache) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_select_entries(dtype: torch.dtype) -> None:
    tokens = token_rows()
    keys, entries = (pages_of(tokens, dim, 128, 4, dtype) for dim in (128, 512))
    rows, most = len(tokens.positions), MAX_LEN // 4
    query = randn(rows, 64, 128, dtype=dtype)
    weights = torch.rand(rows, 64, device="cuda") / 64
    chosen = select_entries(query, weights, keys, entries, tokens, 512, most)
    scores = score_entries_reference(query, weights, keys, tokens, most)
    for row in (0, 50, 299, 301, 305, rows - 1):
        ended = int((tokens.positions[row] + 1) // 4)
        best = scores[row, :ended].topk(min(512, ended))[1]
        slots = entries.slots_of(tokens.requests[row : row + 1], best[None] * 4)[0]
        found = chosen.slots[row, : int(chosen.counts[row])].tolist()
        assert len(found) == len(best) and bool((chosen.slots[row, len(best) :] == -1).all())
        shared = set(found) & set(slots.tolist())
        assert len(shared) >= 0.99 * len(best)  # near-ties at the end may differ


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_sparse_attention(heads: int, dtype: torch.dtype) -> None:
    tokens = token_rows()
    raw, entries = pages_of(tokens, 512, 64, 1, dtype), pages_of(tokens, 512, 128, 128, dtype)
    query, sinks = randn(len(tokens.positions), heads, 512, dtype=dtype), torch.randn(heads).cuda()
    window = window_slots(raw, tokens, 128)
    for listed in (None, entry_slots(entries, tokens, MAX_LEN // 128)):
        args = (query, raw, window, None if listed is None else entries, listed, sinks, 512**-0.5)
        got, expected = sparse_attention(*args), sparse_attention_reference(*args)
        assert relative_error(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [64, 128])
def test_flash_mla_reads_both_caches(heads: int) -> None:
    flash_mla = pytest.importorskip("flash_mla")
    tokens = token_rows()
    raw, entries = pages_of(tokens, 512, 64), pages_of(tokens, 512, 128, 4)
    both = torch.cat((raw.cache.flatten(), entries.cache.flatten()))
    sizes = [raw.cache.numel(), entries.cache.numel()]
    raw, entries = (
        replace(pages, cache=part.view(pages.cache.shape))
        for pages, part in zip((raw, entries), both.split(sizes), strict=True)
    )
    query, sinks = randn(len(tokens.positions), heads, 512), torch.randn(heads).cuda()
    window = window_slots(raw, tokens, 128)
    attend = SparsePass(flash_mla.flash_mla_sparse_fwd)
    for listed in (None, entry_slots(entries, tokens, 512)):
        args = (query, raw, window, None if listed is None else entries, listed, sinks, 512**-0.5)
        expected = sparse_attention_reference(*args)
        assert relative_error(attend(*args), expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 4, 100, 600])
def test_hyper_connections(rows: int, dtype: torch.dtype) -> None:
    streams = randn(rows, 4, 4096, dtype=dtype)
    fn = randn(24, 4 * 4096, dtype=torch.float32) / 128
    site = Site(fn, torch.randn(24).cuda(), torch.rand(3).cuda(), 1e-6, 1e-6, 20)
    got, expected = mix_streams(streams, site), mix_streams_reference(streams, site)
    for one, other in zip(got, expected, strict=True):
        assert relative_error(one, other) < TOLERANCE[dtype]
    args = (streams, randn(rows, 4096, dtype=dtype), *expected[1:])
    got_sum, expected_sum = add_to_streams(*args), add_to_streams_reference(*args)
    assert relative_error(got_sum, expected_sum) < TOLERANCE[dtype]


# --- engines ----------------------------------------------------------------------------------

GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "whole steps": {},
    "one graph": {"cudagraph_whole_step": False},
    "a graph each": {"cudagraph_draft_loop": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4") / "target"
    V4MtpOracle(folder, qk_rope_head_dim=16)
    return folder


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Disable TF32, because padding may change a product's kernel and its rounding near-ties."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def run_engine(folder: Path, config: SpeculativeConfig, graphs: str) -> tuple[Run, Proposals]:
    """Run eight prompts on the GPU, or with `graphs` "on the CPU" there."""
    on_cpu = graphs == "on the CPU"
    graph = {"cudagraph_capture_sizes": (4, 8, 16), "attention_backend": "triton"}
    engine = TinyEngine(
        folder, config, graph={} if on_cpu else graph | GRAPHS[graphs],
        device="cpu" if on_cpu else "cuda",
        cache={"block_size": 16, "num_gpu_blocks_override": 200},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 96},
    )  # fmt: skip
    with recorded_proposals() as seen:
        run = engine.run(prompts(8, seed=3, longest=60), max_tokens=60)
    engine.close()
    return run, seen


def test_text_is_that_of_the_cpu_whatever_the_graphs_and_drafts(folder: Path) -> None:
    plain = {graphs: run_engine(folder, SpeculativeConfig(), graphs)[0] for graphs in GRAPHS}
    config = SpeculativeConfig(
        method="mtp", num_speculative_tokens=3, draft_sampling="greedy", watchdog=False
    )
    drafted = {graphs: run_engine(folder, config, graphs) for graphs in GRAPHS}
    expected = run_engine(folder, SpeculativeConfig(), "on the CPU")[0].tokens
    texts = [run.tokens for run in plain.values()] + [run.tokens for run, _ in drafted.values()]
    total = sum(map(len, expected.values()))
    for tokens in texts:  # a near-tie changes the rest of one text
        assert sum(tokens[name] == expected[name] for name in expected) >= len(expected) - 1
        assert sum(map(len, tokens.values())) == total
    known = {tuple(tokens): drafts for tokens, drafts in drafted["eager"][1]}
    for _, seen in drafted.values():
        pairs = [(drafts, known[tuple(t)]) for t, drafts in seen if tuple(t) in known]
        assert len(pairs) > 0.8 * len(seen)
        assert sum(mine == theirs for mine, theirs in pairs) >= 0.99 * len(pairs)
