"""Engines that share their experts step together: texts of one engine, equal collectives, rest."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode, StepMode
from slipstream.configs.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.runner.attention.base import AttentionState
from slipstream.runner.group_key import derive_key
from slipstream.runner.messages import AddRequest, SamplingParams
from slipstream.runner.parallel.engine_group import Calls
from slipstream.runner.process import EngineOrders, Hosted
from slipstream.runner.step.target import Target
from slipstream.speculators.autoregressive import AutoRegressiveSpeculator

from ...cases import some
from ...speculators.all_drafters import Drafters
from ...speculators.recorded_graphs import behave_as_on_a_gpu, recording
from ...speculators.tiny_engine import TinyEngine, prompts
from .engine_threads import EngineThread, check, start_engines


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


ALL_TO_ALL = "all_to_all"
GATHER = "allgather_reducescatter"


def configured(target: Path, spec: SpeculativeConfig, backend: str, size: int = 2) -> Config:
    return Config(
        model=ModelConfig(model=str(target), dtype="float32", device="cpu"),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=400),
        speculative=spec,
        parallel=ParallelConfig(1, size, enable_expert_parallel=True, all2all_backend=backend),
    )


def test_calls_between_hosts_reach_holders_of_the_key_only() -> None:
    keys = [derive_key("a secret of the nodes"), derive_key("another secret here")]
    places = [EngineOrders(engine, 3, "", "tcp://127.0.0.1:1") for engine in range(3)]
    here = [
        Calls(place, Hosted("127.0.0.1", key))
        for place, key in zip(places, (keys[0], keys[0], keys[1]), strict=True)
    ]
    try:
        assert len({calls.endpoint for calls in here}) == 3
        for calls in here:
            calls.meet([each.endpoint for each in here])
        here[2].send(9)  # a stranger
        here[0].send(4)
        here[0].send(5)
        deadline = time.monotonic() + 20
        found: list[int] = []
        while 5 not in found and time.monotonic() < deadline:
            here[1].socket.poll(100)
            if (wave := here[1].heard()) is not None:
                found.append(wave)
        assert found and set(found) <= {4, 5} and found[-1] == 5
        assert here[0].heard() is None and here[2].heard() is None
    finally:
        for calls in here:
            calls.close()


def wait_until_idle(engines: list[EngineThread]) -> None:
    """Wait until no request is open and the group rests."""
    deadline = time.monotonic() + 60
    while any(engine.num_open or engine.runner.sync.is_active for engine in engines):
        check(engines)
        assert time.monotonic() < deadline, "a request hangs"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("method", "steps", "backend"),
    some([("off", 1000, GATHER), ("mtp", 1000, GATHER), ("ngram", 300, GATHER),
          ("off", 100, GATHER), ("mtp", 120, GATHER), ("off", 1000, ALL_TO_ALL),
          ("mtp", 1000, ALL_TO_ALL), ("off", 100, ALL_TO_ALL), ("mtp", 120, ALL_TO_ALL)],
         [("off", 100, GATHER), ("off", 100, ALL_TO_ALL)]),
)  # fmt: skip
def test_random_steps_give_the_texts_of_one_engine(
    method: str, steps: int, backend: str, drafters: Drafters, tmp_path: Path
) -> None:
    target, _ = drafters.pair("mtp")  # DeepSeek V3's layers: the drafter has experts too
    spec = SpeculativeConfig(method=method, num_speculative_tokens=3)
    if method == "mtp":
        spec = drafters.speculative("mtp", num_speculative_tokens=None)  # K varies
    alone = TinyEngine(target, spec)
    wanted = alone.run(prompts(9), max_tokens=40).tokens
    alone.close()
    engines = start_engines(configured(target, spec, backend), tmp_path)
    rng, asked = random.Random(5), {}
    while engines[0].runner.sync.num_exchanges < steps:
        check(engines)
        engine = rng.choice(engines)
        if engine.num_open < 4:
            index, length = rng.randrange(9), rng.choice((1, 3, 12, 40))
            name = f"{len(asked)}"
            asked[name] = (index, length)
            sampling = SamplingParams(seed=index, max_tokens=length, temperature=0.0)
            engine.submit(AddRequest(name, prompts(9)[index], sampling))
        time.sleep(rng.choice((0.0, 0.01, 0.04)))
        if rng.random() < 0.1:  # so that the group comes to rest at times
            wait_until_idle(engines)
    wait_until_idle(engines)
    for engine in engines:
        engine.stop()
    check(engines)
    found = engines[0].run.tokens | engines[1].run.tokens
    for name, (index, length) in asked.items():
        assert found[name] == wanted[str(index)][:length]
    assert engines[0].run.tokens and engines[1].run.tokens
    first, second = (engine.runner.sync for engine in engines)
    assert first.num_exchanges == second.num_exchanges >= steps
    assert first.wave == second.wave >= 1 and not first.is_active  # more often on an idle machine
    # What one engine counts as computed elsewhere, the other one has computed.
    pairs = list(zip(first.loads._layers, second.loads._layers, strict=True))
    assert len(pairs) == 2  # layers with experts
    for one, other in pairs:
        assert int(one[0]) == int(other[1:].sum()) > 0 < int(other[0]) == int(one[1:].sum())
    assert engines[0].rows.num_collectives == engines[1].rows.num_collectives > steps
    num_sorted = [engine.rows.num_sorted for engine in engines]
    assert num_sorted[0] == num_sorted[1] >= (steps if backend == ALL_TO_ALL else 0)


@pytest.mark.parametrize(
    ("mode", "backend"),
    some(
        [
            (CUDAGraphMode.FULL_DECODE_ONLY, GATHER),
            (CUDAGraphMode.FULL_AND_FULL, GATHER),
            (CUDAGraphMode.FULL_DECODE_ONLY, ALL_TO_ALL),
            (CUDAGraphMode.FULL_AND_FULL, ALL_TO_ALL),
        ],
        [(CUDAGraphMode.FULL_DECODE_ONLY, GATHER)],
    ),
)
def test_whole_steps_hold_the_same_collectives_on_every_engine(
    mode: CUDAGraphMode,
    backend: str,
    drafters: Drafters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests come to one engine while the other is idle, end at different times, and are more
    than the largest graph holds: then steps run without graphs."""
    target, _ = drafters.pair("mtp")
    spec = drafters.speculative("mtp", 2)
    alone = TinyEngine(target, spec)
    wanted = alone.run(prompts(9), max_tokens=20).tokens
    alone.close()
    dummies: list[StepMode] = []
    run_dummy = Target.run_dummy

    def quiet(self: Target, desc: BatchExecutionDescriptor) -> AttentionState | None:
        caches = self.cache.kv_caches.values()
        before = [cache.clone() for cache in caches]
        state = run_dummy(self, desc)
        dummies.append(self.step_mode(desc))
        assert (state is None) == (dummies[-1] is StepMode.WHOLE)
        assert all(map(torch.equal, before, caches)), "a dummy pass has written KV"
        return state

    fills: list[int] = []  # of the drafter's buffers, outside graphs
    fill_dummy = AutoRegressiveSpeculator.fill_dummy

    def counted(self: AutoRegressiveSpeculator, num_reqs: int) -> None:
        fills.append(num_reqs)
        fill_dummy(self, num_reqs)

    monkeypatch.setattr(Target, "run_dummy", quiet)
    monkeypatch.setattr(AutoRegressiveSpeculator, "fill_dummy", counted)
    config = configured(target, spec, backend)
    with recording((1, 3), mode=mode, sizes=(2, 3, 6, 12)) as (recorder, replays):
        engines = start_engines(config, tmp_path, behave_as_on_a_gpu)
        fills.clear()
        for indices in ([[0], []], [[1, 2], [3]], [[], [4, 5]], [[6], [7, 8, 0, 1, 2, 3]]):
            for engine, own in zip(engines, indices, strict=True):
                for index in own:
                    length = 8 + index
                    sampling = SamplingParams(seed=0, max_tokens=length, temperature=0.0)
                    name = f"{index} {time.monotonic()}"
                    engine.submit(AddRequest(name, prompts(9)[index], sampling))
            wait_until_idle(engines)
        for engine in engines:
            engine.stop()
    check(engines)
    for engine in engines:
        for name, found in engine.run.tokens.items():
            index = int(name.split()[0])
            assert found == wanted[str(index)][: 8 + index]
    counts = [engine.rows.num_collectives for engine in engines]
    assert counts[0] == counts[1] > 100
    num_sorted = [engine.rows.num_sorted for engine in engines]
    assert num_sorted[0] == num_sorted[1] and (num_sorted[0] > 0) == (backend == ALL_TO_ALL)
    for name in ("target", "draft prefill", "draft loop"):
        assert replays[name] % 2 == 0 < replays[name]
    # An engine without requests runs the graphs of a whole step too, except that it samples.
    assert dummies.count(StepMode.WHOLE) > 5 and StepMode.EAGER in dummies
    assert len(fills) == len(dummies) - dummies.count(StepMode.WHOLE)
    assert 0 < replays["token selection"] <= replays["target"] - dummies.count(StepMode.WHOLE)
    names = [graph.node_names for graph in recorder.graphs]
    exchanges = ["slipstream_tests.everyones.default" in nodes for nodes in names]
    selecting = sum(
        report.num_graphs["FULL"]
        for engine in engines
        for report in engine.runner._token_graphs.capture_reports
    )
    assert exchanges.count(False) == selecting > 0  # only these hold no experts
