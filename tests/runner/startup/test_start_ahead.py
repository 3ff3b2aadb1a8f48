"""Compiling ahead: what its stamp depends on, when it is skipped, and how the worker waits."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
)
from slipstream.kernels.device import Card
from slipstream.runner.startup import compile_ahead as start_ahead
from slipstream.runner.startup.compile_ahead import (
    ATTENTION,
    GRAPHS,
    STAGES,
    STEPS,
    CompileAhead,
    is_wanted,
    start_key,
)

CARD = Card("NVIDIA H100 80GB HBM3", (9, 0), 132)
Start = Callable[..., CompileAhead]


def folder(at: Path, **values: Any) -> str:
    at.mkdir(exist_ok=True)
    (at / "config.json").write_text(json.dumps({"hidden_size": 64} | values))
    return str(at)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    drafts = SpeculativeConfig(
        method="eagle3", model=folder(tmp_path / "head"), num_speculative_tokens=3
    )
    return Config(model=ModelConfig(model=folder(tmp_path / "llama")), speculative=drafts)


def test_limits_names_and_seeds_leave_the_stamp_as_it_is(config: Config, tmp_path: Path) -> None:
    copy = folder(tmp_path / "copy", _name_or_path="elsewhere", eos_token_id=[1, 2])
    others = [
        replace(config, server=ServerConfig(port=9)),
        replace(config, scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)),
        replace(config, cache=CacheConfig(kv_cache_memory_bytes=1 << 30)),
        replace(config, cache=CacheConfig(gpu_memory_utilization=0.5)),
        replace(config, graph=GraphConfig(cudagraph_capture_sizes=(1, 2))),
        replace(config, model=replace(config.model, model=copy, seed=5, max_logprobs=3)),
        replace(config, speculative=replace(config.speculative, model=copy, watchdog=False)),
    ]
    assert {start_key(other) for other in others} == {start_key(config)}


def test_what_kernels_depend_on_makes_another_stamp(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = folder(tmp_path / "wider", hidden_size=128)
    drafts = config.speculative
    others = [
        config,
        replace(config, model=replace(config.model, model=wider)),
        replace(config, model=replace(config.model, model="owner/name")),
        replace(config, model=replace(config.model, model="owner/name", revision="v2")),
        replace(config, model=replace(config.model, dtype="float16")),
        replace(config, model=replace(config.model, max_model_len=100)),
        replace(config, cache=CacheConfig(block_size=32)),
        replace(config, graph=GraphConfig(linear_backend="torch")),
        replace(config, graph=GraphConfig(attention_backend="reference")),
        replace(config, graph=GraphConfig(enforce_eager=True)),
        replace(config, speculative=SpeculativeConfig()),
        replace(config, speculative=replace(drafts, num_speculative_tokens=5)),
        replace(config, speculative=replace(drafts, model=wider)),
        replace(config, model=replace(config.model, hf_overrides='{"num_hidden_layers": 3}')),
        replace(config, cache=CacheConfig(kv_cache_dtype="fp8")),
        replace(config, parallel=ParallelConfig(tensor_parallel_size=2)),
        replace(config, parallel=ParallelConfig(enable_expert_parallel=True)),
        replace(config, parallel=ParallelConfig(1, 2, enable_expert_parallel=True)),
        replace(config, parallel=ParallelConfig(all2all_backend="all_to_all")),
    ]
    keys = {start_key(other) for other in others}
    for name in ("SLIPSTREAM_HOPPER_PREFILL", "SLIPSTREAM_PDL", "SLIPSTREAM_ROW_LAYER"):
        monkeypatch.setenv(name, "0")
        keys.add(start_key(config))
    assert len(keys) == len(others) + 3


def test_a_start_without_a_gpu_or_on_the_cpu_starts_no_process(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = tmp_path / "driver"
    there.touch()
    monkeypatch.setattr(start_ahead, "_MIN_CORES", 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv(start_ahead.OFF, raising=False)
    monkeypatch.setattr(start_ahead, "_DRIVERS", (str(there),))
    assert is_wanted(config)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    for least, is_enough in ((3, True), (4, False)):
        monkeypatch.setattr(start_ahead, "_MIN_CORES", least)
        assert is_wanted(config) == is_enough
    monkeypatch.setattr(start_ahead, "_MIN_CORES", 1)
    assert not is_wanted(replace(config, model=replace(config.model, device="cpu")))
    monkeypatch.setenv(start_ahead.OFF, "0")
    assert not is_wanted(config)
    monkeypatch.setenv(start_ahead.OFF, "1")
    monkeypatch.setattr(start_ahead, "_DRIVERS", (str(tmp_path / "none"),))
    assert not is_wanted(config)


@pytest.fixture
def start(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Replace the dry start by a script, which gets the write ends of the pipes as `gates`."""

    python = sys.executable  # which the first script replaces

    def begin(script: str, card: Card = CARD) -> CompileAhead:
        program = tmp_path / "python"
        program.write_text(
            f"#!{python}\nimport json, os, sys, time\n"
            "gates = [int(gate) for gate in sys.argv[4:]]\n"
            "config, card = sys.stdin.readline(), json.loads(sys.stdin.readline())\n" + script
        )
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        ahead = CompileAhead(config)
        ahead.wait_for(ATTENTION)
        assert ahead.seconds == 0  # nothing compiles before the GPU is known
        ahead.tell(card)
        return ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return begin


def waits(ahead: CompileAhead) -> list[float]:
    """The seconds that the worker waits at each stage."""
    found = []
    for stage in STAGES:
        before = ahead.seconds
        ahead.wait_for(stage)
        found.append(ahead.seconds - before)
    return found


def test_a_stage_ends_with_the_last_of_its_compilations(start: Start, tmp_path: Path) -> None:
    """One of a stage's processes may still run when the next stage has begun or ended."""
    ahead = start(
        f"""
open({str(tmp_path / "began")!r}, "w").close()
if os.fork() == 0:  # compiles for the first stage
    time.sleep(0.8)
    os._exit(0)
os.close(gates[0])
if os.fork() == 0:
    os._exit(0)
os.close(gates[1])
if os.fork() == 0:
    time.sleep(1.6)
    os._exit(0)
os.close(gates[2])
print(json.dumps({{"num_compiled": 3}}))
"""
    )
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    first, second, third = waits(ahead)
    assert first > 0.2 and second < 0.5 and third > 0.2
    assert ahead.is_compiling
    report = ahead.wait()
    assert report is not None and report.num_compiled == 3 and not report.error
    assert ahead.seconds >= first + second + third
    assert not ahead.is_compiling and waits(ahead) == [0, 0, 0] and ahead.wait() is None
    assert len(list((tmp_path / "cache").iterdir())) == 1  # the stamp


def test_a_start_on_other_cores_finds_what_was_compiled(start: Start) -> None:
    """The number of compiling processes does not change their result."""
    ahead = start("print(json.dumps({}))")
    assert ahead.wait() is not None
    again = start("time.sleep(60)")
    assert not again.is_compiling and again.wait() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(ahead.num_processes + 3)))
        others = start("time.sleep(60)")
        assert others.num_processes == ahead.num_processes + 3
        assert not others.is_compiling


def test_the_worker_stops_waiting_for_a_process_that_dies(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = start("os._exit(7)")
    assert sum(waits(ahead)) < 10
    with caplog.at_level(logging.WARNING):
        report = ahead.wait()
    assert report is not None and "status 7" in report.error
    assert "not all kernels were compiled ahead" in caplog.text
    assert not (tmp_path / "cache").exists()


def test_a_process_that_hangs_is_ended_after_the_longest_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_ahead, "MAX_WAIT_SECONDS", 0.3)
    ahead = start("time.sleep(60)")
    began = time.monotonic()
    ahead.wait_for(ATTENTION)
    assert 0.2 < time.monotonic() - began < 5
    ahead.wait_for(GRAPHS)
    ahead.wait_for(STEPS)
    report = ahead.wait()
    assert report is not None and "more than" in report.error
    assert time.monotonic() - began < 5 and not ahead.is_compiling


def test_a_start_compiled_before_waits_for_nothing(start: Start, config: Config) -> None:
    first = start("""print("{}")""")
    assert first.wait() is not None
    second = start("time.sleep(60)")
    assert not second.is_compiling and waits(second) == [0, 0, 0] and second.wait() is None
    assert not start("time.sleep(60)", replace(CARD, memory_bytes=1 << 30)).is_compiling
    other = start("time.sleep(60)", replace(CARD, num_processors=78))
    assert other.is_compiling
    other.stop()


def test_kernels_that_failed_are_compiled_again_by_the_next_start(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    assert start("""print('{"num_compiled": 5, "num_failed": 2}')""").wait() is not None
    assert "2 kernels failed to compile" in caplog.text
    again = start("time.sleep(60)")
    assert again.is_compiling
    again.stop()


def test_the_process_starts_before_the_gpu_is_known_and_ends_with_the_context(
    start: Start, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_ahead, "is_wanted", lambda config: True)
    start("""print("{}")""").stop()
    with start_ahead.start_ahead(config) as ahead:
        assert ahead is not None and ahead._process is not None
        process = ahead._process
    assert process.returncode is not None
    assert start("""print("{}")""").wait() is not None
    with start_ahead.start_ahead(config) as ahead:  # all is compiled, so it waits for `tell`
        assert ahead is not None and ahead._process is None


def test_a_start_continues_if_no_process_can_be_started(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    ahead = CompileAhead(config)
    ahead.tell(CARD)
    assert not ahead.is_compiling and waits(ahead) == [0, 0, 0] and ahead.wait() is None
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open
    assert "no kernels are compiled ahead" in caplog.text
    assert not (tmp_path / "cache").exists()
