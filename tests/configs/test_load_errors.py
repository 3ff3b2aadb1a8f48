"""Values that a configuration refuses: one sentence names the flag, file or variable."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.configs.options import ConfigError

from .loading import load, yaml_file

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed (Debian: openssl)"
)


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
            "--ssl-certfile /.*test_load_errors.py: is not a certificate in PEM format",
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
        ("port: 1\nhost: a\nport: 2", r"my.yaml: 'port' is set twice, in lines 1 and 3; keep one"),
        (
            "speculative_config: {method: ngram, method: off}",
            "'method' is set twice, in lines 1 and 1",
        ),
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
