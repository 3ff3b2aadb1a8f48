"""Two ranks that divide a drafter make the drafts of one, from half of the weights each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs.schema import ModelConfig, SpeculativeConfig
from slipstream.kernels.cpu import weight
from slipstream.runner.drafters.division import choose_size
from slipstream.runner.drafters.heads import FoundDrafter, HeadHost, find_configured, load_head
from slipstream.runner.loading import file_reader
from slipstream.runner.loading.weights import resolve_model
from slipstream.runner.models.layers import Linear, WeightFormat
from slipstream.runner.models.registry import build_model
from slipstream.runner.parallel.packet_sums import silent_packets
from slipstream.runner.parallel.ranks import CannotDivide, Ranks, Silent

from ...cases import some
from ...speculators.all_drafters import Drafters
from ...speculators.eagle_oracle import head_weights, save_head
from ...speculators.mtp_oracle import MtpOracle
from ...speculators.qwen_oracle import QwenOracle
from ...speculators.recorded_graphs import behave_as_on_a_gpu, recording
from ...speculators.recorded_proposals import Proposals, recorded_proposals
from ...speculators.tiny_engine import Run, TinyEngine, prompts, save_llama
from ...speculators.v4_mtp_oracle import V4MtpOracle
from ..loading.quantised.quantised_folder import quantise
from .engine_threads import Rows
from .test_engines_on_ranks import make
from .thread_group import ThreadGroup, build_on_threads
from .threads import on_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


def runs(
    target: Path, spec: SpeculativeConfig, size: int, dtype: str = "float32", tokens: int = 10
) -> tuple[list[Run], Proposals]:
    """A greedy run and one that draws with seeds, and all proposals of all ranks."""
    groups: list[ThreadGroup] = []
    build = {} if size == 1 else {"build": partial(build_on_threads, groups)}
    engine = TinyEngine(target, spec, dtype=dtype, **build)
    try:
        with recorded_proposals() as seen:
            asked = prompts(3, longest=14)
            found = [engine.run(asked, tokens, temperature=heat) for heat in (0.0, 0.9)]
    finally:
        engine.close()
    for group in groups:
        group.check()
    return found, seen


def compare(target: Path, spec: SpeculativeConfig, dtype: str = "float32") -> None:
    alone, drafts = runs(target, spec, 1, dtype)
    both, drafts_of_both = runs(target, replace(spec, draft_tensor_parallel_size=2), 2, dtype)
    for one, two in zip(alone, both, strict=True):
        assert two.tokens == one.tokens and one.drafted > 0
        assert (two.num_drafts, two.accepted_per_pos) == (one.num_drafts, one.accepted_per_pos)
    assert sorted(drafts_of_both) == sorted(2 * drafts)  # each rank made them
    assert alone[0].tokens != alone[1].tokens


METHODS = ("eagle", "eagle3", "draft_model", "mtp", "gemma4_mtp")


@pytest.mark.parametrize("method", some(METHODS, ("eagle3", "mtp")))
def test_two_ranks_make_the_drafts_of_one(method: str, drafters: Drafters) -> None:
    """Greedy drafts, and drafts with the distributions that verification reads."""
    target = drafters.pair(method)[0]
    compare(target, drafters.speculative(method, draft_sampling="auto"))


MODULES = ("Glm4Moe", "DeepseekV32", "DeepseekV4", "Qwen3_5", "Qwen3Next")


@pytest.mark.parametrize("family", some(MODULES, ()))
def test_modules_of_every_family(family: str, tmp_path: Path) -> None:
    if family == "DeepseekV4":
        V4MtpOracle(tmp_path)
    elif family.startswith("Qwen"):
        QwenOracle(tmp_path, family)
    else:
        MtpOracle(tmp_path, family=family)
    compare(tmp_path, SpeculativeConfig(method="mtp", num_speculative_tokens=2))


@pytest.mark.skipif(not weight.available(), reason="no native CPU kernels on this machine")
def test_a_quantised_head(tmp_path: Path) -> None:
    """As the CPU computes it by default: in GGUF's formats, by its own kernels."""
    target = make(tmp_path / "target", "Llama")
    head = save_head(
        *(tmp_path / "head", head_weights(True), True),
        eagle_aux_hidden_state_layer_ids=[0, 2, 3],
    )
    quantise(head, "int4 zeros", size=0.3)
    compare(target, SpeculativeConfig("eagle3", str(head), 3), "auto")


def test_a_copy_of_the_target_is_accepted_at_every_position(tmp_path: Path) -> None:
    target = save_llama(tmp_path, layers=2)
    spec = SpeculativeConfig("draft_model", str(target), 4, draft_tensor_parallel_size=2)
    for run in runs(target, spec, 2, tokens=11)[0]:  # p = q, also where drafts are drawn
        assert run.accepted_per_pos[:2] == [run.num_drafts] * 2
        assert run.accepted >= run.drafted - 2 * len(run.tokens)  # the last steps are cut off


@pytest.mark.parametrize("loop", some([True, False], [True]))
def test_draft_decodes_in_graphs_contain_the_exchanges(loop: bool, drafters: Drafters) -> None:
    """The ranks replay equally many graphs, which make the drafts of eager passes."""
    target = drafters.pair("eagle3")[0]
    spec = drafters.speculative("eagle3", draft_sampling="auto", draft_tensor_parallel_size=2)
    found = []
    for graphs in (False, True):
        groups: list[ThreadGroup] = []
        build = partial(build_on_threads, groups, communicator=Rows, adapt=keeps_drafts)
        with recording((1, 4), graphs, loop=loop) as (recorder, replays):
            engine = TinyEngine(target, spec, build=build, scheduler={"max_num_seqs": 4})
            behave_as_on_a_gpu(engine.engine)
            try:
                with recorded_proposals() as seen:
                    run = engine.run(prompts(3, longest=14), 10, temperature=0.9)
            finally:
                engine.close()
        groups[0].check()
        found.append((run.tokens, sorted(seen)))
        decodes = "draft loop" if loop else "draft decode"
        for name in ("target", "draft prefill", decodes):
            assert replays.get(name, 0) % 2 == 0 and graphs == bool(replays.get(name))
    assert found[0] == found[1]
    names = [graph.node_names for graph in recorder.graphs]
    assert sum("slipstream_tests.everyones.default" in nodes for nodes in names) > len(names) / 2


def keeps_drafts(runner: Any) -> None:
    runner._on_cpu = False


def loaded(
    ranks: Ranks | None, target: Path, spec: SpeculativeConfig, device: torch.device = CPU
) -> tuple[Any, int]:
    """The drafter's model, and the bytes that were read for it."""
    resolved, read = resolve_model(ModelConfig(model=str(target))), [0]

    def loading(done: int, total: int) -> None:
        read[0] = done

    model = build_model(resolved.hf_config, WeightFormat(device, torch.float32, ranks=ranks))
    host = HeadHost(64, model, resolved, device, loading)
    return load_head(spec.method, spec, host, 4), read[0]


def size_of(model: Any) -> int:
    buffers = {id(b): b for n, b in model.named_buffers() if "cos_sin" not in n}
    return sum(b.nbytes for n, b in buffers.items())


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_reads_and_holds_its_part_alone(
    method: str, drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reader, "_MIN_ROW_BYTES", 1)
    target = drafters.pair(method)[0]
    spec = drafters.speculative(method)
    whole, everything = loaded(None, target, spec)
    own = replace(spec, draft_tensor_parallel_size=2)
    for part, read in on_ranks(2, lambda ranks: loaded(ranks, target, own)):
        assert size_of(part) < (0.8 if method == "gemma4_mtp" else 0.65) * size_of(whole)
        assert read < (0.8 if method == "gemma4_mtp" else 0.65) * everything
        for mine, layer in zip(part.attention_layers(), whole.attention_layers(), strict=True):
            assert 2 * mine.num_heads == layer.num_heads
            assert layer.is_mla or 2 * mine.num_kv_heads == layer.num_kv_heads
    for other, _ in on_ranks(
        2, lambda ranks: loaded(ranks, target, replace(own, draft_tensor_parallel_size=1))
    ):
        assert size_of(other) == size_of(whole) or method == "gemma4_mtp"


class Outline:
    """A drafter of one layer whose part on a rank has this many bytes."""

    def __init__(self, num_bytes: int) -> None:
        fmt = WeightFormat(torch.device("meta"), torch.bfloat16)
        self.linear = Linear(1 << 10, num_bytes >> 11, fmt)

    def modules(self) -> list[Any]:
        return [self, self.linear]

    def attention_layers(self) -> list[Any]:
        return [None]


def test_ranks_divide_a_drafter_where_that_spares_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    spec, slow = SpeculativeConfig("eagle3", "head"), Ranks(1, 2, Silent(2))
    fast = replace(slow, packets=silent_packets(2, CPU))
    sizes: list[int | None] = []

    def outline(num_bytes: int, own: SpeculativeConfig) -> Any:
        sizes.append(own.draft_tensor_parallel_size)
        if not num_bytes:
            raise CannotDivide("the model's 3 KV heads cannot be divided among 2 ranks.")
        return Outline(num_bytes)

    def choose(
        ranks: Ranks | None, num_bytes: int = 1 << 29, size: int | None = None, device: str = "meta"
    ) -> int:
        own = replace(spec, draft_tensor_parallel_size=size)
        fmt = WeightFormat(torch.device(device), torch.bfloat16, ranks=ranks)
        return choose_size(own, fmt, partial(outline, num_bytes))

    assert choose(None) == choose(slow) == choose(fast, size=1) == 1
    assert choose(slow, size=2) == 2 and not sizes
    assert choose(fast) == 2 and choose(fast, 1 << 20) == 1 and choose(fast, 0) == 1
    assert choose(slow, 1 << 22, device="cpu") == 2 and choose(slow, 1 << 21, device="cpu") == 1
    assert sizes == [2] * 5
    said = [record.message for record in caplog.records]
    assert said == [
        "each rank has the whole drafter: sums over the ranks are slow here",
        "the 2 ranks divide the drafter",
        "each rank has the whole drafter: it is small, so that sums over the ranks would take "
        "longer than they spare",
        "each rank has the whole drafter: the model's 3 KV heads cannot be divided among 2 ranks",
        *said[1:3],
    ]


def test_a_head_that_cannot_be_divided_is_refused_if_asked_to(drafters: Drafters) -> None:
    target = drafters.pair("eagle3")[0]
    own = drafters.speculative("eagle3", draft_tensor_parallel_size=3)
    resolved = resolve_model(ModelConfig(model=str(target)))
    found = find_configured(own, resolved)
    assert isinstance(found, FoundDrafter)

    def load(ranks: Ranks) -> None:
        model = build_model(resolved.hf_config, WeightFormat(CPU, torch.float32))
        model.format = replace(model.format, ranks=ranks)
        load_head("eagle3", own, HeadHost(64, model, resolved, CPU), 4, found)

    with pytest.raises(CannotDivide, match="4 attention heads cannot be divided among .* 3 ranks"):
        on_ranks(3, load)
