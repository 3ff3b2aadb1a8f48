"""Attention to listed rows on a GPU, by Triton and FlashMLA: DeepSeek V3.2, and fp8 pages of V4.

With a plan of another pass FlashMLA's output must be wrong, and with a pass's own it must be right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))

from graph_nodes import kernel_nodes  # noqa: E402
from tests.runner.tiny_v4 import make_v4  # noqa: E402
from tests.speculators.mtp_oracle import MtpOracle  # noqa: E402
from tests.speculators.tiny_engine import TinyEngine, prompts  # noqa: E402

from slipstream.configs.schema import SpeculativeConfig  # noqa: E402
from slipstream.kernels.attention.compressed.compress import (  # noqa: E402
    compress,
    compress_reference,
)
from slipstream.kernels.attention.compressed.pages import (  # noqa: E402
    Compressor,
    Pages,
    SlotList,
    TokenRows,
)
from slipstream.kernels.attention.compressed.select_entries import (  # noqa: E402
    score_entries_reference,
    select_entries,
)
from slipstream.kernels.attention.compressed.sparse_attention import (  # noqa: E402
    sparse_attention,
    sparse_attention_reference,
)
from slipstream.kernels.attention.compressed.store_rows import (  # noqa: E402
    store_rows,
    store_rows_reference,
)
from slipstream.kernels.attention.paged_rows import Fp8Cache  # noqa: E402
from slipstream.kernels.quant.e4m3 import E4M3  # noqa: E402
from slipstream.kernels.quant.latent_pages import page_bytes  # noqa: E402
from slipstream.runner.attention.flash_mla_listed import ListedPass  # noqa: E402
from slipstream.runner.attention.flash_mla_sparse import SparsePass  # noqa: E402
from slipstream.runner.graphs.manager import relative_error  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BF16 = torch.bfloat16
V32 = Fp8Cache(BF16, latent=512)
V4 = Fp8Cache(BF16, latent=448, rotary=64, paged=True)
KEYS = Fp8Cache(BF16, latent=128)
TOLERANCE = 2e-2


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def pages_of(
    fp8: Fp8Cache | None, dim: int, blocks: int = 80, rows: int = 64, rate: int = 1
) -> Pages:
    """A cache whose slots hold random rows, packed if `fp8` says so."""
    slots = torch.arange(blocks * rows, device="cuda")
    shape, dtype = (blocks, rows, 1, dim), BF16
    if fp8 is not None:
        shape, dtype = (
            (blocks, rows, 1, fp8.latent + 4 * (fp8.latent // 128) + 2 * (dim - fp8.latent)),
            E4M3,
        )
        if fp8.paged:
            shape = (blocks, 1, 1, page_bytes(rows, fp8.latent, fp8.rotary))
    cache = torch.zeros(shape, device="cuda").to(dtype)
    table = torch.arange(blocks, device="cuda").int()[None]
    pages = Pages(cache, table, slots, rows, 1, fp8)
    store_rows(randn(blocks * rows, 1, dim), pages)
    return replace(pages, block_size=rows * rate, entry_tokens=rate)


def list_of(tokens: int, width: int, slots: int, longest: int | None = None) -> SlotList:
    """Random slots, as many of each token as chance says."""
    counts = torch.randint(1, (longest or width) + 1, (tokens,), device="cuda").int()
    order = torch.rand(tokens, slots, device="cuda").argsort(1)[:, :width].int()
    inside = torch.arange(width, device="cuda") < counts[:, None]
    return SlotList(torch.where(inside, order, -1), counts)


@pytest.mark.parametrize("fp8", [None, V4], ids=["wide", "fp8"])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 9, 300])  # programs share the rows of few tokens
def test_attention_reads_both_caches_of_v4(tokens: int, heads: int, fp8: Fp8Cache | None) -> None:
    raw, entries = pages_of(fp8, 512), pages_of(fp8, 512, rows=32, rate=4)
    window, chosen = list_of(tokens, 128, 5120), list_of(tokens, 512, 2560)
    args = (randn(tokens, heads, 512), raw, window, entries, chosen)
    args = (*args, torch.randn(heads, device="cuda"), 512**-0.5)  # type: ignore[assignment]
    got, expected = sparse_attention(*args), sparse_attention_reference(*args)  # type: ignore[call-arg,arg-type]
    assert relative_error(got, expected) < TOLERANCE


@pytest.mark.parametrize("fp8", [None, V32], ids=["wide", "fp8"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_attention_reads_the_rows_of_v32(tokens: int, heads: int, fp8: Fp8Cache | None) -> None:
    rows, chosen = pages_of(fp8, 576), list_of(tokens, 2048, 5120)
    args = (randn(tokens, heads, 576), rows, chosen, None, None, None, 0.07, 512)
    assert relative_error(sparse_attention(*args), sparse_attention_reference(*args)) < TOLERANCE


def test_rows_and_entries_are_packed_as_the_reference_packs_them() -> None:
    raw = pages_of(V4, 512)
    other = replace(raw, cache=raw.cache.clone())
    rows = randn(5120, 1, 512) * 10 ** torch.randn(5120, 1, 1, device="cuda").to(BF16)
    store_rows(rows, raw)
    store_rows_reference(rows, other)
    assert torch.equal(raw.cache.view(torch.uint8), other.cache.view(torch.uint8))
    positions = torch.arange(200, device="cuda")
    tokens = TokenRows(positions, torch.zeros_like(positions))
    pending = replace(pages_of(None, 2560), slot_mapping=positions)
    entries = replace(pages_of(V4, 512, rows=32, rate=4), slot_mapping=positions)
    copy = replace(entries, cache=entries.cache.clone())
    weights = (torch.randn(4, 1024, device="cuda"), torch.rand(512, device="cuda"))
    table = torch.randn(4096, 64, device="cuda")
    rule = Compressor(4, 512, True, 0, 1024, *weights, 1e-6, table)
    compress(rule, pending, tokens, entries)
    compress_reference(rule, pending, tokens, copy)
    every = torch.arange(2560, device="cuda")
    assert relative_error(entries.gather(every), copy.gather(every)) < TOLERANCE


@pytest.mark.parametrize("fp8", [None, KEYS], ids=["wide", "fp8"])
def test_the_indexer_of_v32_chooses_the_best_tokens(fp8: Fp8Cache | None) -> None:
    keys, rows = pages_of(fp8, 128), pages_of(None, 576)
    positions = torch.tensor([5000, 3000, 2047, 100, 0], device="cuda")
    tokens = TokenRows(positions, torch.zeros_like(positions))
    query, weights = randn(5, 64, 128), torch.rand(5, 64, device="cuda")
    chosen = select_entries(query, weights, keys, rows, tokens, 2048, 5120)
    scores = score_entries_reference(query, weights, keys, tokens, 5120)
    for row, position in enumerate(positions.tolist()):
        count = min(2048, position + 1)
        best = set(scores[row].topk(count)[1].tolist())  # slots are positions here
        found = chosen.slots[row, :count].tolist()
        assert int(chosen.counts[row]) == count == len(set(found))
        assert bool((chosen.slots[row, count:] == -1).all())
        assert len(best & set(found)) >= 0.99 * count  # near-ties at the end may differ


# --- FlashMLA ---------------------------------------------------------------------------------


def listed_pass() -> ListedPass:
    flash_mla = pytest.importorskip("flash_mla")
    create = flash_mla.get_mla_metadata
    return ListedPass(lambda: create()[0], flash_mla.flash_mla_with_kvcache)


@pytest.mark.parametrize("tokens", [1, 7, 600])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("form", ["V3.2", "V4 raw", "V4 rate 4", "V4 rate 128"])
def test_flash_mla_reads_listed_fp8_rows(form: str, heads: int, tokens: int) -> None:
    """600 tokens are several calls; of rate 128 a page holds one row."""
    query, args = listed_case(form, heads, tokens)
    expected = sparse_attention_reference(query, *args)
    assert relative_error(listed_pass()(query, *args), expected) < TOLERANCE


def listed_case(form: str, heads: int, tokens: int) -> tuple[Tensor, tuple[Any, ...]]:
    """A query, and the other arguments of `sparse_attention`."""
    torch.manual_seed(heads + tokens)
    if form == "V3.2":
        rows = pages_of(V32, 576)
        args = (rows, list_of(tokens, 2048, 5120), None, None, None, 0.07, 512)
        return randn(tokens, heads, 576), args
    raw, window = pages_of(V4, 512), list_of(tokens, 128, 5120)
    entries = chosen = None
    if form == "V4 rate 4":
        entries, chosen = pages_of(V4, 512, rows=32, rate=4), list_of(tokens, 512, 2560)
    elif form == "V4 rate 128":
        entries = pages_of(V4, 512, blocks=700, rows=1, rate=128)
        chosen = list_of(tokens, 600, 700)
    sinks = torch.randn(heads, device="cuda")
    return randn(tokens, heads, 512), (raw, window, entries, chosen, sinks, 512**-0.5, 512)


@pytest.mark.parametrize("heads", [16, 128])
def test_flash_mla_reads_listed_rows_of_16_bits(heads: int) -> None:
    flash_mla = pytest.importorskip("flash_mla")
    attend = SparsePass(flash_mla.flash_mla_sparse_fwd)
    args = (pages_of(None, 576), list_of(9, 2048, 5120), None, None, None, 0.07, 512)
    query = randn(9, heads, 576)
    got = attend(query, *args)
    assert relative_error(got, sparse_attention_reference(query, *args)) < TOLERANCE


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("heads", [64, 128])
def test_a_capture_needs_a_pass_of_its_own(heads: int) -> None:
    """V4's plan depends on the lengths of lists: the warm-up's must not be replayed."""
    raw, entries = pages_of(V4, 512), pages_of(V4, 512, rows=32, rate=4)
    lists = [
        SlotList(
            torch.rand(4, slots, device="cuda").argsort(1)[:, :width].int(),
            torch.full((4,), 64, device="cuda", dtype=torch.int32),
        )
        for slots, width in ((5120, 128), (2560, 512))
    ]
    query, sinks = randn(4, heads, 512), torch.randn(heads, device="cuda")
    args = (raw, lists[0], entries, lists[1], sinks, 512**-0.5, 512)

    def expected() -> Tensor:
        """The reference reads every slot that is not -1."""
        own = []
        for one in lists:
            inside = torch.arange(one.slots.shape[1], device="cuda") < one.counts[:, None]
            own.append(SlotList(torch.where(inside, one.slots, -1), one.counts))
        return sparse_attention_reference(query, raw, own[0], entries, own[1], *args[4:])

    shared, out = listed_pass(), torch.zeros(4, heads, 512, device="cuda", dtype=BF16)
    with torch.inference_mode():
        shared(query, *args)  # plans, for short lists
        bad = captured(lambda: out.copy_(shared(query, *args)))  # type: ignore[arg-type,return-value]
        good = captured(lambda: out.copy_(listed_pass()(query, *args)))  # type: ignore[arg-type,return-value]
        errors = []
        for turn, graph in enumerate((bad, good, good)):
            lists[0].counts.copy_(torch.tensor([128, 100, 64, 1]).roll(turn))
            lists[1].counts.copy_(torch.tensor([512, 64, 300, 0]).roll(turn))
            out.fill_(float("nan"))
            graph.replay()
            errors.append(relative_error(out, expected()))
    assert errors[0] > 0.1, errors
    assert max(errors[1:]) < TOLERANCE, errors
    assert kernel_nodes(good) > kernel_nodes(bad)  # it also has the planning kernel


# --- engines ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Disable TF32, because padding may change a product's kernel and its rounding near-ties."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def run_engine(folder: Path, drafts: int, **changes: Any) -> dict[str, list[int]]:
    config = SpeculativeConfig()
    if drafts:
        config = SpeculativeConfig(
            method="mtp", num_speculative_tokens=drafts, draft_sampling="greedy", watchdog=False
        )
    graph, max_tokens = changes.pop("graph", {}), changes.pop("max_tokens", 40)
    engine = TinyEngine(
        folder, config, scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 96},
        cache={"block_size": 16, "num_gpu_blocks_override": 200} | changes.pop("cache", {}),
        graph={"cudagraph_capture_sizes": (4, 8, 16)} | graph if graph else {}, **changes,
    )  # fmt: skip
    run = engine.run(prompts(8, seed=3, longest=60), max_tokens=max_tokens)
    engine.close()
    return run.tokens


def assert_same_texts(texts: list[dict[str, list[int]]], expected: dict[str, list[int]]) -> None:
    for tokens in texts:  # a near-tie changes the rest of one text
        assert sum(tokens[name] == expected[name] for name in expected) >= len(expected) - 1
        assert sum(map(len, tokens.values())) == sum(map(len, expected.values()))


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_text_of_v32_is_that_of_the_cpu(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.deepseek_v32")
    MtpOracle(tmp_path / "target", family="DeepseekV32")
    cache = {"kv_cache_dtype": dtype}
    expected = run_engine(tmp_path / "target", 0, device="cpu", cache=cache)
    graph: dict[str, Any] = {"attention_backend": "triton"}
    texts = [
        run_engine(tmp_path / "target", drafts, device="cuda", cache=cache, graph=graph | more)
        for drafts in (0, 3)
        for more in ({"enforce_eager": True}, {}, {"cudagraph_whole_step": False})
    ]
    assert_same_texts(texts, expected)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_text_of_flash_mla_is_that_of_triton_with_every_graph(dtype: str, tmp_path: Path) -> None:
    """DeepSeek V4 with 64 heads of 512 values, in bf16; each graph plans for itself."""
    pytest.importorskip("flash_mla")
    wide = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 64}
    make_v4(tmp_path, num_attention_heads=64, **wide)
    flash: dict[str, Any] = {"attention_backend": "flash_mla"}
    graphs = ({"attention_backend": "triton"}, flash | {"enforce_eager": True}, flash)
    texts = [
        run_engine(
            tmp_path, 0, device="cuda", dtype="bfloat16", graph=graph, max_tokens=8,
            cache={"kv_cache_dtype": dtype, "block_size": 64},
        )
        for graph in (*graphs, flash | {"cudagraph_whole_step": False})
    ]  # fmt: skip
    for tokens in texts[1:]:  # bf16 has near-ties, which decide the rest of a text
        assert sum(tokens[name] == texts[0][name] for name in tokens) > len(tokens) / 2
