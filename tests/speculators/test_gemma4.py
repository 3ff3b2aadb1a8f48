"""Gemma 4's assistant against transformers', and the memory that it must not read or write."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.draft_models.gemma4_assistant import OrderedHead
from slipstream.runner.drafters.draft_graphs import DraftGraphs
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.models.layers import Embedding, WeightFormat
from slipstream.speculators.base import DraftInputs

from ..cases import some
from .gemma4_oracle import VOCAB, AssistantOracle
from .recorded_proposals import made_drafts, recorded_proposals
from .tiny_engine import TinyEngine, prompts, save_llama

K = 4


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> AssistantOracle:
    return AssistantOracle(tmp_path_factory.mktemp("gemma4"))


def make_engine(oracle: AssistantOracle, **changes: Any) -> TinyEngine:
    scheduler = changes.pop("scheduler", {})
    options = {"num_speculative_tokens": K, "draft_sampling": "greedy"} | changes
    speculative = SpeculativeConfig(method="gemma4_mtp", model=str(oracle.folder), **options)
    return TinyEngine(oracle.target_folder, speculative, scheduler=scheduler)


@pytest.mark.parametrize(
    ("ordered", "offset"),
    some(itertools.product((False, True), (0, 1)), kept=[(False, 1), (True, 0)]),
)
def test_drafts_equal_transformers_in_every_round(
    tmp_path: Path, ordered: bool, offset: int
) -> None:
    oracle = AssistantOracle(tmp_path, ordered)
    engine = make_engine(oracle, position_offset=offset)
    with recorded_proposals() as seen:  # prompts longer than the window, and shorter
        run = engine.run([[5], *prompts(3)], max_tokens=6)
    engine.close()
    assert run.accepted < run.drafted  # rejected rows lie behind the last valid one
    checked = 0
    for tokens, drafts in seen[::2]:  # the oracle takes long
        if len(tokens) > 1:
            assert drafts == oracle.drafts(tokens, K, offset), f"after {len(tokens)} tokens"
            checked += 1
    assert checked >= 6


def test_the_position_switch_matters(oracle: AssistantOracle) -> None:
    tokens = [list(range(i, i + 20)) for i in range(8)]
    assert [oracle.drafts(t, K, 0) for t in tokens] != [oracle.drafts(t, K, 1) for t in tokens]


def test_chunks_and_prefix_hits_draft_the_same(oracle: AssistantOracle) -> None:
    scheduler = {"max_num_batched_tokens": 41, "max_num_seqs": 8}
    engine = make_engine(oracle, scheduler=scheduler)
    prefix = prompts(1, seed=4, longest=80)[0] + list(range(40))
    with recorded_proposals() as seen:
        engine.run([prefix, *prompts(2, seed=9, longest=60)], max_tokens=6)
        hit = engine.run([prefix + [7, 8, 9]], max_tokens=8)
    engine.close()
    assert hit.cached_tokens["0"] >= len(prefix) - 4
    for tokens, drafts in seen[::2]:
        assert drafts == oracle.drafts(tokens, K, 0)


def test_text_is_that_of_the_target_alone(oracle: AssistantOracle) -> None:
    alone = TinyEngine(oracle.target_folder, SpeculativeConfig())
    drafted = make_engine(oracle)
    asked = prompts(4, seed=3)
    assert drafted.run(asked, max_tokens=14).tokens == alone.run(asked, max_tokens=14).tokens
    alone.close()
    drafted.close()


def spy(monkeypatch: pytest.MonkeyPatch, before: Any) -> list[tuple[Tensor, Tensor]]:
    """Proposes twice, calling `before(graphs, inputs)` in between; returns the pairs."""
    pairs: list[tuple[Tensor, Tensor]] = []
    propose = DraftGraphs.propose

    def twice(self: DraftGraphs, inputs: DraftInputs) -> None:
        propose(self, inputs)
        first = made_drafts(self, inputs).clone()
        undo = before(self, inputs)
        propose(self, inputs)
        pairs.append((first, made_drafts(self, inputs).clone()))
        undo()

    monkeypatch.setattr(DraftGraphs, "propose", twice)
    return pairs


def test_trap_09_kv_after_the_last_valid_position_is_never_read(
    oracle: AssistantOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = 0

    def poison(graphs: DraftGraphs, inputs: DraftInputs) -> Any:
        nonlocal rejected
        rejected += int(inputs.num_rejected.sum())
        caches = inputs.attention.kv_caches
        kept = {id(cache): cache.clone() for cache in caches.values()}
        for layer, cache in caches.items():
            group = inputs.attention.group_of_layer[layer]
            requests: Any = inputs.requests
            table = requests.block_tables[group][inputs.idx_mapping[: inputs.num_reqs].long()]
            size = cache.shape[2]
            for row in range(inputs.num_reqs):
                end = int(inputs.seq_lens[row] - inputs.num_rejected[row])  # P + 1
                for position in range(end, int(inputs.seq_lens[row])):
                    cache[:, int(table[row, position // size]), position % size] = 1e4

        def undo() -> None:
            for cache in caches.values():
                cache.copy_(kept[id(cache)])

        return undo

    pairs = spy(monkeypatch, poison)
    engine = make_engine(oracle)
    engine.run(prompts(4), max_tokens=12)
    engine.close()
    assert rejected > 10
    assert all(torch.equal(first, second) for first, second in pairs)


def test_k_steps_equal_k_single_calls_and_write_no_kv(
    oracle: AssistantOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same decode by hand, with fresh metadata for every step."""
    checked = []
    propose = DraftGraphs.propose

    def compared(self: DraftGraphs, inputs: DraftInputs) -> None:
        drafter: Any = self.speculator
        before = [cache.clone() for cache in inputs.attention.kv_caches.values()]
        propose(self, inputs)
        drafts = made_drafts(self, inputs).clone()
        for cache, kept in zip(inputs.attention.kv_caches.values(), before, strict=True):
            assert torch.equal(cache, kept)
        drafter.stage(inputs)
        rows = inputs.num_reqs
        ids, hidden = drafter.decode_ids[:rows].clone(), drafter.hidden[:rows].clone()
        positions = (inputs.seq_lens[:rows] - inputs.num_rejected - 1).long()
        for step in range(K):
            attention = self._decode_attention(rows, rows, None)
            normed, hidden = drafter.model(ids, positions, hidden, attention)
            ids = drafter.model.compute_logits(normed).argmax(-1).int()
            wanted = drafts[:, step]
            assert torch.equal(torch.where(wanted < 0, wanted, ids.long()), wanted)
        checked.append(rows)

    monkeypatch.setattr(DraftGraphs, "propose", compared)
    engine = make_engine(oracle)
    engine.run(prompts(3), max_tokens=8)
    engine.close()
    assert len(checked) > 4


def test_trap_08_all_groups_have_the_rows_of_the_batch(
    oracle: AssistantOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 requests, padded to 4: block tables of both KV groups, lengths and starts agree."""
    from slipstream.runner.attention.reference import ReferenceBuilder

    seen = []
    build = ReferenceBuilder.build

    def checking(self: Any, common: Any, desc: Any = None) -> Any:
        rows = common.num_reqs
        sizes = (common.block_table.shape[0], common.query_start_loc.shape[0] - 1)
        assert sizes == (rows, rows)
        assert common.seq_lens.shape[0] == common.seq_lens_cpu_upper_bound.shape[0] == rows
        seen.append(rows)
        return build(self, common, desc)

    monkeypatch.setattr(ReferenceBuilder, "build", checking)
    engine = make_engine(oracle)
    graphs = engine.engine._runner._draft_graphs
    engine.run(prompts(3), max_tokens=4)
    engine.engine._runner.synchronize()
    seen.clear()
    for padded in (3, 4):
        state = graphs._decode_attention(3, padded, None)
        assert len([m for m in state.metadata if m is not None]) == 2
    engine.close()
    assert seen == [3, 3, 4, 4]


def test_trap_09_embeddings_are_the_targets_although_sizes_differ(oracle: AssistantOracle) -> None:
    engine = make_engine(oracle)
    runner = engine.engine._runner
    model, target = runner.speculator.model, runner._target.model
    assert model.target[0].embed_tokens.weight.data_ptr() == target.embed_tokens.weight.data_ptr()
    assert model.config.hidden_size != target.config.hidden_size
    assert not hasattr(model, "embed_tokens")  # its own table serves as output head only
    sources = [layer.kv_source for layer in model.attention_layers()]
    assert sources == [2, 2, 2, 1]  # the last layers of each type that have a cache
    engine.close()


def test_ordered_head_equals_brute_force() -> None:
    torch.manual_seed(0)
    hidden, centroids, top_k = 16, 8, 3
    config = type("Config", (), {"num_centroids": centroids, "centroid_intermediate_top_k": top_k})
    fmt = WeightFormat(torch.device("cpu"), torch.float32)
    head, table = OrderedHead(config, hidden, VOCAB, fmt), Embedding(VOCAB, hidden, fmt)
    table.weight.normal_()
    assert head.centroids.weight is not None
    head.centroids.weight.normal_()
    ordering = torch.randperm(VOCAB)
    head.load_ordering(ordering)
    x = torch.randn(5, hidden)
    got = head.forward(x, table)
    for row in range(5):
        order = (head.centroids.weight @ x[row]).sort(descending=True).indices[:top_k].tolist()
        members = {
            int(token)
            for cluster in order
            for token in ordering[cluster * VOCAB // centroids : (cluster + 1) * VOCAB // centroids]
        }
        for token in range(VOCAB):
            wanted = float(table.weight[token] @ x[row]) if token in members else float("-inf")
            assert float(got[row, token]) == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(ModelLoadError, match="token_ordering"):
        head.load_ordering(torch.zeros(VOCAB))


def test_suppressed_tokens_are_never_drafted(oracle: AssistantOracle, tmp_path: Path) -> None:
    import json
    import shutil

    copy = tmp_path / "assistant"
    shutil.copytree(oracle.folder, copy)
    suppressed = list(range(0, VOCAB, 2))
    (copy / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    config = SpeculativeConfig(method="gemma4_mtp", model=str(copy), num_speculative_tokens=K)
    engine = TinyEngine(oracle.target_folder, config)
    with recorded_proposals() as seen:
        engine.run(prompts(3), max_tokens=8)
    engine.close()
    drafted = {token for _, drafts in seen for token in drafts if token >= 0}
    assert drafted and not drafted & set(suppressed)


def test_other_targets_and_checkpoints_are_refused(oracle: AssistantOracle, tmp_path: Path) -> None:
    llama = save_llama(tmp_path)
    with pytest.raises(ModelLoadError, match="needs a Gemma 4 target"):
        TinyEngine(llama, SpeculativeConfig(method="gemma4_mtp", model=str(oracle.folder)))
    with pytest.raises(ModelLoadError, match="needs a gemma4_assistant checkpoint"):
        TinyEngine(oracle.target_folder, SpeculativeConfig(method="gemma4_mtp", model=str(llama)))


def test_random_weights(oracle: AssistantOracle) -> None:
    engine = make_engine(oracle, load_format="dummy")
    assert engine.run(prompts(2), max_tokens=8).drafted > 0
    engine.close()
