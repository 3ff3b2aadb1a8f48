"""The flags of several hosts: which go together, and the secret from a file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from slipstream.configs.hosts import check_one_host, num_processes, uses_hosts
from slipstream.configs.load import add_flags, load_config
from slipstream.configs.options import ConfigError
from slipstream.configs.schema import Config

KEY = "0123456789abcdef"


def load(*flags: str, **variables: str) -> Config:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return load_config(parser.parse_args(["Qwen/Qwen3-8B", *flags]), variables)


def test_one_host_is_the_default() -> None:
    config = load()
    assert not uses_hosts(config) and num_processes(config) == 1


def test_the_secret_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    flags = ("-tp", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1")
    config = load(*flags, SLIPSTREAM_GROUP_KEY=KEY)
    assert config.hosts.group_key == KEY and config.hosts.node_rank == 1
    assert uses_hosts(config) and num_processes(config) == 2
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert load(*flags, "--group-key-file", str(file)).hosts.group_key == KEY
    file.write_text(f"{KEY}\nanother key of the group")
    with pytest.raises(ConfigError, match="must name one key together"):
        load(*flags, "--group-key-file", str(file))
    assert uses_hosts(load("--distributed-executor-backend", "ray"))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--nnodes 2 -tp 3", "--nnodes 2: must divide .* which is 3"),
        ("--nnodes 2 -tp 2 --node-rank 2", "--node-rank 2: must be below --nnodes, which is 2"),
        ("--node-rank 1", "--node-rank 1: must be below --nnodes, which is 1"),
        ("--nnodes 2 -dp 2 --group-key short", "must have at least 16 characters"),
        ("--nnodes 2 -dp 2", "set SLIPSTREAM_GROUP_KEY or --group-key-file on each of them"),
        (
            f"--nnodes 2 -dp 2 --group-key {KEY} --distributed-executor-backend ray",
            "--nnodes does not go with --distributed-executor-backend ray",
        ),
        (f"--nnodes 2 -tp 2 --group-key {KEY} --master-port 0", "must be at least 1"),
    ],
)
def test_flags_that_do_not_agree_are_refused_in_one_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        load(*flags.split())
    assert "\n" not in str(refused.value) and "short" not in str(refused.value)


def test_commands_that_measure_one_engine_run_on_one_host() -> None:
    with pytest.raises(ConfigError, match="are flags of `slipstream serve`"):
        check_one_host(load("--distributed-executor-backend", "ray"))
    assert check_one_host(load("-tp", "2")).parallel.tensor_parallel_size == 2
