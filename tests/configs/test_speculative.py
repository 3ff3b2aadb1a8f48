"""Loading the configuration of speculation: methods, drafters and numbers of drafts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest

from slipstream.configs.load import add_flags
from slipstream.configs.options import ConfigError
from slipstream.configs.schema import SpeculativeConfig
from slipstream.configs.speculative import METHODS, NEED_MODEL

from .loading import load, yaml_file


@pytest.mark.parametrize("method", ["mtp", *sorted(NEED_MODEL)])
def test_a_missing_drafter_is_refused(method: str, folder: str, tmp_path: Path) -> None:
    def refused(drafter: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load("-sc", json.dumps({"method": method, "model": drafter}))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refused("/nope") == (
        "the drafter '/nope' does not exist: there is no such file or folder"
    )
    assert "unknown drafter 'nope': it must be a folder, a .gguf file or a" in refused("nope")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty' has no config.json and no .gguf file" in refused(str(empty))
    (empty / "a.gguf").touch()  # a whole model may be one
    wanted = json.dumps({"method": method, "model": str(empty)})
    if method not in ("eagle", "eagle3"):
        assert load("-sc", wanted).speculative.model == str(empty)
    else:
        expected = f"empty' must be a folder with a config.json for method {method}"
        assert expected in refused(str(empty))
        assert "a.gguf' must be a folder with a config.json" in refused(str(empty / "a.gguf"))
    for there in (folder, "owner/name"):  # the hub is contacted later
        load("-sc", json.dumps({"method": method, "model": there}))
    load("-sc", '{"method": "my.drafters:Mine", "model": "anything at all"}')


@pytest.mark.parametrize("off", ["off", "OFF", "none"])
def test_speculation_can_be_turned_off(off: str, tmp_path: Path) -> None:
    assert load("-sc", off).speculative == SpeculativeConfig()
    file = yaml_file(tmp_path, "speculative_config: off")  # YAML reads that as False
    assert load("--config", file).speculative == SpeculativeConfig()
    assert load(SLIPSTREAM_SPECULATIVE_CONFIG=off).speculative == SpeculativeConfig()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, name)
        for name in METHODS
        if name not in ("draft_model", "eagle", "eagle3", "gemma4_mtp")
    ]
    + [("NGRAM", "ngram"), ('"ngram"', "ngram"), ("my.drafters:Mine", "my.drafters:Mine")],
)
def test_a_bare_name_is_a_method(name: str, method: str, tmp_path: Path) -> None:
    wanted = SpeculativeConfig(method=method)
    assert load("-sc", name).speculative == wanted
    assert load(SLIPSTREAM_SPECULATIVE_CONFIG=name).speculative == wanted
    file = yaml_file(tmp_path, f"speculative_config: {name}")
    assert load("--config", file).speculative == wanted


def test_speculative_object_replaces_the_presets() -> None:
    config = load("-sc", '{"method": "ngram", "num_speculative_tokens": 7}')
    assert config.speculative == SpeculativeConfig(method="ngram", num_speculative_tokens=7)


@pytest.mark.parametrize("given", ["", ', "num_speculative_tokens": "auto"'])
@pytest.mark.parametrize(
    ("method", "counts"),
    [
        ("mtp", (1, 2, 3)),
        ("ngram", (1, 2, 3, 4, 5, 6, 8)),
        ("my.module:Drafter", (1, 2, 3, 4, 5)),
    ],
)
def test_the_number_of_drafts_is_chosen_unless_it_is_given(
    method: str, counts: tuple[int, ...], given: str
) -> None:
    spec = load("-sc", f'{{"method": "{method}"{given}}}').speculative
    assert (spec.num_speculative_tokens, spec.draft_counts) == (None, counts)
    assert spec.max_drafts == counts[-1]
    fixed = load("-sc", f'{{"method": "{method}", "num_speculative_tokens": 2}}').speculative
    assert fixed.draft_counts == (2,)


def test_the_largest_chosen_number_of_drafts_can_be_given() -> None:
    rates = '{"method": "mtp", "synthetic_acceptance_rates": [0.8, 0.6, 0.4, 0.2]}'
    assert load("-sc", rates).speculative.draft_counts == (1, 2, 3, 4)
    most = '{"method": "mtp", "max_speculative_tokens": 7}'
    assert load("-sc", most).speculative.draft_counts == (1, 2, 3, 4, 5, 6, 7)
    assert load("-sc", "off").speculative.draft_counts == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('{"method": "nonsense"}', "method must be one of off, ngram.*not 'nonsense'"),
        ('{"methd": "ngram"}', r"has no key 'methd' \(did you mean method"),
        ('{"num_speculative_tokens": 3}', "must name a method"),
        ("{", "--speculative-config is not valid JSON: "),
        ("[]", r"must be a method \(off, ngram, .*, gemma4_mtp\) or a JSON object, not \[\]"),
        ("", r"must be a method \(off, ngram, .*\) or a JSON object, not ''"),
        ("5", r"must be a method \(off, ngram, .*\) or a JSON object, not 5"),
        ("ngrams", r"or a JSON object, not 'ngrams' \(did you mean ngram\?\)"),
        ("eagle3", "model must name the drafter for method eagle3$"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "from 1 to 32, not 0"),
        ('{"method": "ngram", "num_speculative_tokens": "x"}', "must be an integer, not 'x'"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', r"at least prompt_lookup_min \(5\)"),
        ('{"method": "ngram", "prompt_lookup_min": 0}', "prompt_lookup_min must be at least 1"),
        ('{"method": "ngram", "model": "x"}', "no model"),
        ('{"method": "eagle3"}', "model must name the drafter for method eagle3$"),
        ('{"method": "mtp", "position_offset": 2}', "position_offset must be 0 or 1"),
        ('{"method": "mtp", "aux_hidden_state_boundaries": [3, 1]}', "increasing"),
        ('{"method": "mtp", "draft_sampling": "no"}', "must be one of auto, greedy"),
        ('{"method": "ngram", "max_speculative_tokens": 33}', "from 1 to 32, not 33"),
        ('{"method":"mtp","num_speculative_tokens":2,"max_speculative_tokens":3}', "be left out"),
        (
            '{"method":"mtp","num_speculative_tokens":4,"synthetic_acceptance_rates":[0.5]}',
            "be 4 rates from 0 to 1",
        ),
        (
            '{"method":"mtp","num_speculative_tokens":2,"synthetic_acceptance_rates":[0.5,0.6]}',
            "none above the one before it",
        ),
    ],
)
def test_wrong_speculation_is_one_clear_sentence(value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("-sc", value)


def test_the_help_lists_the_keys_of_the_speculative_config_and_their_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    parser = argparse.ArgumentParser("serve")
    add_flags(parser)
    shown = parser.format_help()
    _, _, keys = shown.partition("--speculative-config METHOD|JSON\n")
    lines = re.split(r"\n {24}(?! )", keys.partition("\n\n")[0])
    entries = [" ".join(line.split()) for line in lines if re.match(r"\w+: ", line)]
    assert [line.partition(":")[0] for line in entries] == [
        field.name for field in dataclasses.fields(SpeculativeConfig)
    ]
    drawn = "draft_sampling: how drafts are sampled: auto, greedy, probabilistic (default: auto)"
    lookup = "prompt_lookup_max: ngram: longest suffix to search for, in tokens (default: 4)"
    watchdog = "watchdog: turn off a drafter that seems broken, and retry it later (default: on)"
    assert {"model: the drafter's folder or Hugging Face id", drawn, lookup, watchdog} <= {*entries}
    assert re.search(r"\n {24}\w[^\n]*\n {24}\w", shown)  # other texts wrap without indentation


def test_the_ranks_of_a_drafter_are_one_or_those_of_its_target() -> None:
    def spec(size: object) -> str:
        return json.dumps({"method": "mtp", "draft_tensor_parallel_size": size})

    for size in (1, 4):
        given = load("-tp", "4", "-sc", spec(size)).speculative
        assert given.draft_tensor_parallel_size == size
    assert load("-tp", "4", "-sc", "mtp").speculative.draft_tensor_parallel_size is None
    with pytest.raises(
        ConfigError,
        match=r"^--speculative-config: draft_tensor_parallel_size must be 1 or "
        "--tensor-parallel-size, which is 4, not 2$",
    ):
        load("-tp", "4", "-sc", spec(2))
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size must be 1, not 2$"):
        load("-sc", spec(2))
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size must be an integer, not 'a'"):
        load("-sc", spec("a"))
