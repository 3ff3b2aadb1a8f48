"""DeepSeek V4's MTP module against NumPy: drafts, roll-back at every offset, hits, loading."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.configs.schema import SpeculativeConfig
from slipstream.kernels.attention.compressed.compress import entries_of
from slipstream.kernels.attention.compressed.pages import Compressor, Pages, TokenRows
from slipstream.runner.attention.base import (
    AttentionLayer,
    BuilderSizes,
)
from slipstream.runner.attention.compressed import CompressedBuilder
from slipstream.runner.attention.reference import ReferenceBackend
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.models.deepseek_v4 import attention

from ..cases import some
from ..runner.parallel.thread_group import ThreadGroup, build_on_threads
from .recorded_graphs import graph_engine
from .recorded_proposals import recorded_proposals
from .tiny_engine import TinyEngine, prompts
from .v4_mtp_oracle import V4MtpOracle

K = 3


def speculative(k: int = K, **changes: object) -> SpeculativeConfig:
    options = {"num_speculative_tokens": k, "draft_sampling": "greedy"} | changes
    return SpeculativeConfig(method="mtp", **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v4") / "target"


@pytest.fixture(scope="module")
def oracle(folder: Path) -> V4MtpOracle:
    return V4MtpOracle(folder)


def test_drafts_equal_the_formulas_in_chunks_and_after_hits(
    folder: Path, oracle: V4MtpOracle
) -> None:
    scheduler = {"max_num_batched_tokens": 31, "max_num_seqs": 4}
    engine = TinyEngine(folder, speculative(), scheduler=scheduler)
    prefix = prompts(1, seed=4, longest=40)[0] + list(range(20))
    with recorded_proposals() as seen:
        run = engine.run([prefix, *prompts(2, seed=9, longest=30)], max_tokens=6)
        hit = engine.run([prefix + [7, 8, 9]], max_tokens=4)
    engine.close()
    assert run.accepted < run.drafted  # roll-back was exercised
    assert hit.cached_tokens["0"] >= len(prefix) - 2 * 8
    assert len(seen) > 10
    for tokens, drafts in seen[::2]:  # the oracle takes long
        assert drafts == oracle.drafts(tokens, K), f"after {len(tokens)} tokens"


@pytest.mark.parametrize(
    ("k", "dtype"), some([(1, "auto"), (2, "auto"), (3, "auto"), (3, "fp8")], [(3, "auto")])
)
def test_text_is_that_of_the_target_alone_at_every_offset(
    folder: Path, oracle: V4MtpOracle, k: int, dtype: str
) -> None:
    """Prompts of eight consecutive lengths: drafts are rejected everywhere in both windows."""
    asked = [prompts(8, seed=3)[0][:1] * 2 + list(range(n)) for n in range(20, 28)]
    texts = []
    for config in (SpeculativeConfig(), speculative(k)):
        engine = TinyEngine(folder, config, cache={"kv_cache_dtype": dtype})
        texts.append(engine.run(asked, max_tokens=10))
        engine.close()
    assert texts[1].tokens == texts[0].tokens
    assert texts[1].drafted > texts[1].accepted


class GraphBackend(ReferenceBackend):
    """The plain kernels, in graphs; the test replaces those that look at values."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device

    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> CompressedBuilder:
        builder = CompressedBuilder(sizes.block_size)
        builder.builds_on_device = self._on_device
        return builder


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [M, D] at slots [M], -1 = nowhere; without a look at the slots."""
    flat, at = cache.view(-1, cache.shape[-1]), slots.clamp(min=0)  # slot 0 is in the null block
    flat[at] = torch.where((slots >= 0)[:, None], rows.to(cache.dtype), flat[at])


def store_all(key: Tensor, value: None, cache: Tensor, slots: Tensor) -> None:
    write_rows(cache, slots[: key.shape[0]], key.squeeze(1))


def store_pages(rows: Tensor, pages: Pages) -> None:
    store_all(rows, None, pages.cache, pages.slot_mapping)


def compress_all(rule: Compressor, pending: Pages, tokens: TokenRows, entries: Pages) -> None:
    found = entries_of(rule, pending, tokens.requests, tokens.positions)
    ends = (tokens.positions + 1) % rule.entry_tokens == 0
    slots = torch.where(ends & (entries.slot_mapping >= 0), entries.slot_mapping, -1)
    write_rows(entries.cache, slots // rule.entry_tokens, found)


@pytest.mark.parametrize("loop", some([True, False], [True]))
def test_drafts_in_graphs_equal_eager_drafts(
    folder: Path, oracle: V4MtpOracle, loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target, draft prefill and decodes are recorded and replayed at growing lengths."""
    monkeypatch.setattr(attention, "store_kv", store_all)
    monkeypatch.setattr(attention, "store_rows", store_pages)
    monkeypatch.setattr(attention, "compress", compress_all)
    found = []
    for graphs in (False, True):
        args = (folder, speculative(), graphs)
        with graph_engine(*args, loop=loop, backend=GraphBackend(loop)) as engine:
            with recorded_proposals() as seen:
                run = engine.run(prompts(4, seed=2, longest=14), max_tokens=7)
            replays = dict(engine.replays)
        found.append((seen, run.tokens))
        assert graphs == bool(replays.get("target")) == bool(replays.get("draft prefill"))
        assert graphs == bool(replays.get("draft loop" if loop else "draft decode"))
    assert found[0] == found[1]


def test_two_ranks_emit_the_tokens_and_drafts_of_one(folder: Path, oracle: V4MtpOracle) -> None:
    groups: list[ThreadGroup] = []
    found = []
    for more in ({}, {"build": partial(build_on_threads, groups)}):
        engine = TinyEngine(folder, speculative(), **more)
        run = engine.run(prompts(2, longest=12), max_tokens=7)
        engine.close()
        found.append((run.tokens, run.num_drafts, run.accepted_per_pos))
    assert found[0] == found[1]
    groups[0].check()


def test_random_weights(folder: Path, oracle: V4MtpOracle) -> None:
    engine = TinyEngine(folder, speculative(load_format="dummy"))
    assert engine.run(prompts(2), max_tokens=6).drafted > 0
    engine.close()


def test_what_is_no_module_is_refused(folder: Path, oracle: V4MtpOracle, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    vector = torch.ones(32)
    own = {name for name in tensors if name.startswith("mtp.")}
    without = {name: tensor for name, tensor in tensors.items() if name not in own}
    for changed, message in (
        (without, r"has no mtp\.\* tensors, which speculative method mtp needs"),
        (
            tensors | {"mtp.0.main_proj.weight": vector},
            r"has a DSpark drafter \(tensor mtp\.0\.main",
        ),
        (tensors | {"mtp.1.enorm.weight": vector}, "has 2 modules"),
        (tensors | {"mtp.0.surprise.weight": vector}, r"unexpected tensors: mtp\.0\.surprise"),
        ({n: t for n, t in tensors.items() if "0.hnorm" not in n}, r"lacks tensors: mtp\.0\.hnorm"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=message):
            TinyEngine(tmp_path, speculative())
    shared = {"mtp.0.emb.tok_emb.weight": torch.ones(61, 32), "mtp.0.head.weight": torch.ones(2)}
    save_file(tensors | shared, tmp_path / "model.safetensors")  # copies, which are not read
    TinyEngine(tmp_path, speculative()).close()


def test_eagle_heads_are_refused(folder: Path, oracle: V4MtpOracle) -> None:
    config = SpeculativeConfig(method="eagle3", model=str(folder))
    with pytest.raises(ModelLoadError, match="needs a target with one residual stream"):
        TinyEngine(folder, config)
