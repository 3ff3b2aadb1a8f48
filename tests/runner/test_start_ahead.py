"""What the stamp of a compiled start depends on, and where none is compiled ahead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    GraphConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
)
from slipstream.runner import start_ahead
from slipstream.runner.start_ahead import is_wanted, start_key


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
    ]
    keys = {start_key(other) for other in others}
    monkeypatch.setenv("SLIPSTREAM_PDL", "0")
    assert len(keys | {start_key(config)}) == len(others) + 1


def test_a_start_without_a_card_or_on_the_cpu_has_no_process_beside_it(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = tmp_path / "driver"
    there.touch()
    monkeypatch.setattr(start_ahead, "_MIN_CORES", 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv(start_ahead.OFF, raising=False)
    monkeypatch.setattr(start_ahead, "_DRIVERS", (str(there),))
    assert is_wanted(config)
    assert not is_wanted(replace(config, model=replace(config.model, device="cpu")))
    monkeypatch.setenv(start_ahead.OFF, "0")
    assert not is_wanted(config)
    monkeypatch.setenv(start_ahead.OFF, "1")
    monkeypatch.setattr(start_ahead, "_DRIVERS", (str(tmp_path / "none"),))
    assert not is_wanted(config)
