"""Drafters in graphs equal eager drafters, whatever the padded rows contained before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.graphs import CUDAGraphMode
from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.attention.base import AttentionStatePair
from slipstream.runner.drafters.attention import DraftAttention
from slipstream.runner.drafters.draft_graphs import DraftGraphs
from slipstream.runner.messages import AddRequest, SamplingParams
from slipstream.runner.step.target import Target
from slipstream.speculators.autoregressive import AutoRegressiveSpeculator
from slipstream.speculators.base import DraftInputs

from ..cases import some
from .all_drafters import FEW_METHODS, METHODS, Drafters
from .recorded_graphs import GraphEngine, graph_engine
from .recorded_proposals import Proposals, recorded_proposals
from .tiny_engine import prompts, save_llama

ASKED = prompts(5, seed=2, longest=20)  # more requests than rows: batches of 4, 3, 2 and 1


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


def proposals_of(
    drafters: Drafters, method: str, graphs: bool, k: int = 3, temperature: float = 0.0,
    mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY, loop: bool = False,
) -> tuple[Proposals, GraphEngine]:  # fmt: skip
    target = drafters.pair(method)[0]
    sampling = "probabilistic" if temperature else "greedy"
    config = drafters.speculative(method, k, draft_sampling=sampling)
    with graph_engine(target, config, graphs, mode, loop) as engine:
        with recorded_proposals() as seen:
            for count in (5, 3):
                run = engine.run(ASKED[:count], max_tokens=6, temperature=temperature)
                assert sum(map(len, run.tokens.values())) == 6 * count
            engine.engine._runner.synchronize()  # type: ignore[attr-defined]
    return seen, engine


@pytest.fixture(scope="module")
def eager_proposals(drafters: Drafters) -> Callable[..., Proposals]:
    """Eager proposals, by method, temperature and K."""

    @functools.cache
    def make(method: str, temperature: float = 0.0, k: int = 3) -> Proposals:
        seen, engine = proposals_of(drafters, method, False, k, temperature)
        assert not engine.replays and len(seen) >= 16
        return seen

    return make


@pytest.mark.parametrize(
    ("method", "temperature", "loop"),
    some(
        [
            (method, temperature, loop)
            for method, temperature in [("eagle3", 0.0), *((method, 0.8) for method in METHODS)]
            for loop in (False, True)
        ],
        kept=[("mtp", 0.8, False)],  # trap 5 compares two drafters that run in one graph
    ),
)
def test_drafts_in_graphs_equal_eager_drafts(
    drafters: Drafters,
    method: str,
    temperature: float,
    loop: bool,
    eager_proposals: Callable[..., Proposals],
) -> None:
    """With a graph of all decodes of a step (`loop`), or one for each."""
    eager = eager_proposals(method, temperature)
    decodes = {"draft_model": 3, "gemma4_mtp": 3}.get(method, 2)
    graphs, engine = proposals_of(drafters, method, True, temperature=temperature, loop=loop)
    assert graphs == eager
    replays = engine.replays
    assert replays["target"] > 6
    # only a uniform step of the target has a graph that the draft prefill can follow
    assert replays.get("draft prefill", 0) == (method != "gemma4_mtp") * replays["target"]
    # every step drafts: one graph of all decodes, or one for each
    assert engine.num_proposals > 6
    assert replays.get("draft loop", 0) == loop * engine.num_proposals
    assert replays.get("draft decode", 0) == (not loop) * decodes * engine.num_proposals


@pytest.mark.parametrize(
    ("method", "k"),
    some(
        [
            *(("eagle3", 2), ("eagle", 3), ("mtp", 4)),
            *(("draft_model", 5), ("gemma4_mtp", 6), ("eagle3", 7)),
        ],
        kept=[("eagle3", 2)],
    ),
)
def test_all_decodes_as_one_graph_equal_the_plain_version(
    drafters: Drafters, method: str, k: int
) -> None:
    """Batches of 4, 3, 2 and 1 requests on graphs of 4 and 2; greedy rows beside drawn ones."""
    config = drafters.speculative(method, k, draft_sampling="probabilistic")
    asked = [
        AddRequest(str(i), ASKED[i], SamplingParams(i, length, temperature=(0.0, 0.7, 1.3)[i % 3]))
        for i, length in enumerate((4, 9, 13, 17))
    ]
    found = []
    for graphs in (False, True):
        with graph_engine(drafters.pair(method)[0], config, graphs) as engine:
            with recorded_proposals() as seen:
                engine.engine.handle(asked)
                while engine.engine.has_work():
                    engine.engine.step()
                engine.synchronize()
            logits = engine.table.draft_logits
            found.append((seen, logits.clone()))
            assert engine.replays.get("draft loop", 0) == graphs * engine.num_proposals
    assert found[0][0] == found[1][0] and len(seen) > 8
    # padded batches round otherwise, and heads that feed back an unnormed stream amplify it
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2e-3, atol=2e-3)


def test_a_loop_that_builds_its_metadata_once_is_wrong(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch, eager_proposals: Callable[..., Proposals]
) -> None:
    """Stale metadata inside one graph: the negative control of the test above."""
    plain = eager_proposals("eagle3", k=4)
    on_device = DraftAttention.on_device

    def built_once(self: Any, *args: Any) -> Any:
        build = on_device(self, *args)
        kept: list[Any] = []

        def first() -> Any:
            if not kept:
                kept.append(build())
            return kept[0]

        return first

    monkeypatch.setattr(DraftAttention, "on_device", built_once)
    bad, _ = proposals_of(drafters, "eagle3", True, k=4, loop=True)
    assert [drafts[:2] for _, drafts in bad] == [drafts[:2] for _, drafts in plain]
    assert any(a[2:] != b[2:] for (_, a), (_, b) in zip(bad, plain, strict=True))


def test_without_a_loop_or_with_a_back_end_of_the_host_each_decode_is_a_graph(
    drafters: Drafters,
) -> None:
    config = drafters.speculative("eagle3", 3)
    for changes in ({"graph": {"cudagraph_draft_loop": False}}, {"loop": False}):
        with graph_engine(drafters.pair("eagle3")[0], config, **changes) as engine:
            engine.run(ASKED[:2], max_tokens=5)
        assert "draft loop" not in engine.replays and engine.replays["draft decode"] > 2


def test_a_drafter_with_kv_groups_of_its_own_runs_in_graphs(
    drafters: Drafters, tmp_path: Path
) -> None:
    """Its decodes attend in one of two groups, and build nothing for the target's."""
    target = drafters.pair("draft_model")[0]
    draft = save_llama(tmp_path, seed=5, layers=1, heads=8)
    config = SpeculativeConfig(
        method="draft_model", model=str(draft), num_speculative_tokens=3, draft_sampling="greedy"
    )
    found = []
    for graphs in (False, True):
        with graph_engine(target, config, graphs) as engine, recorded_proposals() as seen:
            engine.run(ASKED[:4], max_tokens=7)
        found.append(seen)
        assert ("draft loop" in engine.replays) == graphs
    assert found[0] == found[1] and len(found[0]) >= 8


def test_with_full_graphs_for_mixed_batches_the_draft_prefill_follows(
    drafters: Drafters, eager_proposals: Callable[..., Proposals]
) -> None:
    graphs, engine = proposals_of(drafters, "eagle3", True, mode=CUDAGraphMode.FULL)
    assert graphs == eager_proposals("eagle3", 0.0)
    assert engine.replays["draft prefill"] == engine.replays["target"] > 6


def test_attention_between_pieces_gets_the_real_rows_only(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows would cost time in every layer, and read tables that were not filled."""
    run, padded = Target.run, []

    def checked(self: Any, batch: Any, state: Any) -> Any:
        if batch.descriptor.mode is CUDAGraphMode.PIECEWISE:
            for metadata in state.metadata:
                assert metadata.starts.shape == (batch.num_reqs + 1,)
                assert metadata.lens.shape == metadata.table.shape[:1] == (batch.num_reqs,)
                assert metadata.slots.shape == (batch.num_tokens,)
            padded.append(batch.descriptor.num_tokens > batch.num_tokens)
        return run(self, batch, state)

    monkeypatch.setattr(Target, "run", checked)
    asked, config = ASKED[:3], drafters.speculative("eagle3", 3)
    texts = []
    for graphs in (False, True):
        target = drafters.pair("eagle3")[0]
        with graph_engine(target, config, graphs, CUDAGraphMode.PIECEWISE) as engine:
            texts.append(engine.run(asked, max_tokens=6).tokens)
    assert texts[0] == texts[1]
    assert padded.count(True) >= 3  # three requests on a graph of four


@pytest.mark.parametrize("method", FEW_METHODS)
def test_trap_05_stale_tails_of_every_buffer_change_nothing(
    drafters: Drafters,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    eager_proposals: Callable[..., Proposals],
) -> None:
    plain = eager_proposals(method, 0.8)
    garbage = torch.Generator().manual_seed(7)
    stage = AutoRegressiveSpeculator.stage
    poisoned = set()

    def poisoning(self: Any, inputs: DraftInputs) -> None:
        high = {"last_token_indices": 90, "idx_mapping": 4, "seq_lens": 90, "query_start_loc": 4}
        for name, buffer in vars(self).items():
            if isinstance(buffer, Tensor):
                poisoned.add(name)
                bound = high.get(name, 50)
                shape = buffer.shape
                buffer.copy_(torch.randint(0, bound, shape, generator=garbage).to(buffer.dtype))
        stage(self, inputs)

    monkeypatch.setattr(AutoRegressiveSpeculator, "stage", poisoning)
    graphs, engine = proposals_of(drafters, method, True, temperature=0.8, loop=True)
    assert graphs == plain
    assert engine.replays["draft loop"] == engine.num_proposals > 6
    assert "draft decode" not in engine.replays
    assert ("draft prefill" in engine.replays) == (method != "gemma4_mtp")
    assert {"last_token_indices", "seq_lens", "idx_mapping", "temperature"} <= poisoned


@pytest.mark.parametrize("method", some(METHODS, ("eagle3", "mtp")))
def test_trap_06_padded_rows_touch_no_other_slot(
    drafters: Drafters, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots outside the batch, slot 0 among them: their drafts, q and KV stay bit-identical."""
    propose = DraftGraphs.propose
    batches = set()

    def watched(self: Any, inputs: DraftInputs) -> None:
        table: Any = inputs.requests
        slots = inputs.idx_mapping[: inputs.num_reqs].tolist()
        outside = [slot for slot in range(4) if slot not in slots]
        table.draft_logits[outside] = torch.arange(len(outside)).float()[:, None, None] + 0.5
        logits, tokens = table.draft_logits[outside].clone(), table.draft_tokens[outside].clone()
        kv = self.attention._cache
        caches = {i: cache.clone() for i, cache in kv.kv_caches.items()}
        propose(self, inputs)
        assert torch.equal(table.draft_logits[outside], logits)
        assert torch.equal(table.draft_tokens[outside], tokens)
        for layer, cache in kv.kv_caches.items():
            blocks = cache.shape[0] if cache.dim() == 4 else cache.shape[1]
            group = kv.group_of_layer[layer]
            mine = table.block_tables[group][slots].flatten().long()
            foreign = torch.ones(blocks, dtype=torch.bool)
            foreign[mine] = False
            foreign[0] = True  # the null block belongs to nobody
            pick: Any = foreign if cache.dim() == 4 else (slice(None), foreign)
            assert torch.equal(cache[pick], caches[layer][pick])
        batches.add((inputs.num_reqs, 0 in slots))

    monkeypatch.setattr(DraftGraphs, "propose", watched)
    config = drafters.speculative(method, 3, draft_sampling="probabilistic")
    with graph_engine(drafters.pair(method)[0], config) as engine:
        for lengths in ((2, 6, 6, 6), (2, 2, 9, 5)):
            add_of_lengths(engine, lengths)
        engine.engine._runner.synchronize()  # type: ignore[attr-defined]
    assert {(3, False), (2, False), (1, False)} <= batches  # on graphs of 4, 2 and 1


def add_of_lengths(engine: GraphEngine, lengths: tuple[int, ...]) -> None:
    engine.engine.handle(
        [
            AddRequest(f"{i}", ASKED[i], SamplingParams(max_tokens=length, temperature=0.8, seed=i))
            for i, length in enumerate(lengths)
        ]
    )
    while engine.engine.has_work():
        engine.engine.step()


def test_trap_03_metadata_is_rebuilt_before_every_decode_that_advances(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch, eager_proposals: Callable[..., Proposals]
) -> None:
    good = eager_proposals("eagle3", k=4)
    # The fault itself: built once, although positions advance.
    build = DraftGraphs._decode_attention
    monkeypatch.setattr(DraftGraphs, "_decode_attention", once(build))
    bad, _ = proposals_of(drafters, "eagle3", True, k=4)
    first = [(drafts[:2]) for _, drafts in good]
    assert first == [drafts[:2] for _, drafts in bad]  # right up to the first decode
    assert any(a[2:] != b[2:] for (_, a), (_, b) in zip(good, bad, strict=True))


def once(build: Any) -> Any:
    def built_once(self: Any, num_reqs: int, rows: int, desc: Any) -> Any:
        if int(self.speculator.step[0]) <= 1:
            self.kept = build(self, num_reqs, rows, desc)
        return self.kept

    return built_once


@pytest.mark.parametrize(
    ("method", "wanted"), [("eagle3", 3), ("draft_model", 4), ("gemma4_mtp", 1)]
)
def test_trap_03_builds_per_proposal(
    drafters: Drafters, method: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once if positions are constant, else before each decode; never more."""
    propose, builds = DraftGraphs.propose, set()

    def counted(self: Any, inputs: DraftInputs) -> None:
        builders = [b for b in self.attention._builders if b is not None]
        before = [builder.num_builds for builder in builders]
        propose(self, inputs)
        builds.update(b.num_builds - n for b, n in zip(builders, before, strict=True))

    monkeypatch.setattr(DraftGraphs, "propose", counted)
    proposals_of(drafters, method, False, k=4)
    assert builds == {wanted}


def test_trap_02_draft_prefill_is_captured_with_fresh_states(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that the target has used must not be reused: its plan may have been recorded, not
    run."""
    used: list[int] = []
    kept: list[Any] = []  # alive, so that ids are not given again
    create = AttentionStatePair.__init__

    def noted(self: Any, warmup: Any, captured: Any) -> None:
        create(self, warmup, captured)
        kept.append(self)

    monkeypatch.setattr(AttentionStatePair, "__init__", noted)
    forward = AutoRegressiveSpeculator.first_pass

    def watched(self: Any, num_tokens: int, num_rows: int, attention: Any, *rest: Any) -> None:
        used.append(id(attention))
        kept.append(attention)
        forward(self, num_tokens, num_rows, attention, *rest)

    monkeypatch.setattr(AutoRegressiveSpeculator, "first_pass", watched)
    target = drafters.pair("eagle")[0]
    with graph_engine(target, drafters.speculative("eagle")) as engine:
        manager = engine.engine._runner._target._graphs  # type: ignore[attr-defined]
        targets = {id(s) for p in manager._states.values() for s in (p.warmup, p.captured)}
        captured = engine.draft_graphs._prefills.captured
    assert len(used) == len(set(used)) == 2 * len(captured) > 4
    assert not targets & set(used)
