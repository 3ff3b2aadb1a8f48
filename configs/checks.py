"""Checks a complete configuration: values in range, files that exist, options that agree."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from .hosts import check_hosts
from .options import ConfigError, all_options, did_you_mean
from .paths import PathError, local_path, shown
from .preset import preset_names
from .schema import Config
from .speculative import METHODS

_MIN = {
    "port": 0,
    "max_queue_size": 1,
    "max_body_bytes": 1024,
    "default_max_tokens": 1,
    "capture_traffic_max_bytes": 1,
    "drain_timeout": 0,
    "worker_timeout": 0,
    "client_timeout": 0,
    "sse_keep_alive": 0,
    "max_model_len": 1,
    "max_logprobs": 0,
    "seed": 0,
    "block_size": 1,
    "state_block_size": 1,
    "kv_cache_memory_bytes": 1,
    "num_gpu_blocks_override": 2,  # block 0 is reserved
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_itl_ms": 1,
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "master_port": 1,
    "join_timeout": 0,
}
_MAX = {
    "tensor_parallel_size": 64,
    "data_parallel_size": 64,
    "port": 65535,
    "master_port": 65535,
    "seed": 2**63 - 1,
    "gpu_memory_utilization": 1.0,
    "block_size": 1024,
    "state_block_size": 1 << 20,
}


def check(config: Config) -> Config:
    """Return the configuration unchanged; raises ConfigError at the first rule it breaks."""
    _check_ranges(config)
    _check_parallel(config)
    _check_batch_invariant(config)
    check_hosts(config)
    _check_server(config)
    _check_model(config)
    _check_drafter(config)
    _check_budget(config)
    return config


def _fail(name: str, value: object, rule: str) -> None:
    raise ConfigError(f"{all_options()[name].flag} {value}: {rule}")


def _check_ranges(config: Config) -> None:
    for name, option in all_options().items():
        value = getattr(getattr(config, option.section), name)
        if value is None:
            continue
        if name in _MIN and value < _MIN[name]:
            _fail(name, value, f"must be at least {_MIN[name]}")
        if name in _MAX and value > _MAX[name]:
            _fail(name, value, f"must be at most {_MAX[name]}")
    if not config.cache.gpu_memory_utilization > 0:
        _fail("gpu_memory_utilization", config.cache.gpu_memory_utilization, "must be above 0")
    sizes = config.graph.cudagraph_capture_sizes
    if sizes is not None and (not sizes or min(sizes) < 1):
        _fail("cudagraph_capture_sizes", ",".join(map(str, sizes)), "each must be at least 1")


def _check_parallel(config: Config) -> None:
    parallel = config.parallel
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if parallel.enable_expert_parallel and ranks == 1:
        raise ConfigError(
            "--enable-expert-parallel needs --tensor-parallel-size or --data-parallel-size above 1"
        )
    size, drafter = parallel.tensor_parallel_size, config.speculative.draft_tensor_parallel_size
    if drafter not in (None, 1, size):
        allowed = "1" if size == 1 else f"1 or --tensor-parallel-size, which is {size}"
        raise ConfigError(
            f"--speculative-config: draft_tensor_parallel_size must be {allowed}, not {drafter}"
        )
    if parallel.all2all_backend == "all_to_all" and not parallel.shares_experts:
        raise ConfigError(
            "--all2all-backend all_to_all needs --enable-expert-parallel and --data-parallel-size "
            "above 1; the ranks of -tp alone have all tokens and exchange none"
        )
    if parallel.shares_experts and config.graph.debug_compare_eager:
        raise ConfigError(
            "--debug-compare-eager does not work with --enable-expert-parallel and "
            "--data-parallel-size above 1: the other engines would wait for the second run"
        )


def _check_batch_invariant(config: Config) -> None:
    """Refuse what would make a request's text depend on others; the worker checks the model."""
    graph, parallel = config.graph, config.parallel
    if not graph.batch_invariant:
        return
    rules = {
        f"--tensor-parallel-size {parallel.tensor_parallel_size}, whose sums over GPUs depend on "
        "the number of tokens; use 1": parallel.tensor_parallel_size > 1,
        "--enable-expert-parallel, with which engines compute each other's tokens; leave it "
        "out": parallel.shares_experts,
        "--enable-expert-parallel, whose sums over GPUs depend on the experts that tokens choose; "
        "leave it out": parallel.enable_expert_parallel,
        "--linear-backend torch, whose kernels are chosen by the number of tokens; leave it "
        "out": graph.linear_backend == "torch",
        f"--attention-backend {graph.attention_backend}, whose splits depend on other requests; "
        "use auto": graph.attention_backend in ("flashinfer", "flash_mla"),
        "synthetic_acceptance_rates, with which the output is not the model's; leave them "
        "out": config.speculative.synthetic_acceptance_rates is not None,
    }
    for what, holds in rules.items():
        if holds:
            raise ConfigError(f"--batch-invariant does not work with {what}")


def _check_server(config: Config) -> None:
    server = config.server
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", server.metrics_prefix):
        rule = "must consist of letters, digits and underscores, and not start with a digit"
        _fail("metrics_prefix", server.metrics_prefix, rule)
    if server.root_path and not server.root_path.startswith("/"):
        _fail("root_path", server.root_path, "must start with /")
    for name in ("chat_template", "ssl_keyfile", "ssl_certfile"):
        path = getattr(server, name)
        if path is not None and not os.path.isfile(path):
            _fail(name, shown(path)[1:-1], "there is no such file")
        if path is not None and not os.access(path, os.R_OK):
            _fail(name, shown(path)[1:-1], "cannot be read: permission denied")
    if (server.ssl_keyfile is None) != (server.ssl_certfile is None):
        raise ConfigError("--ssl-keyfile and --ssl-certfile must be given together")
    if server.ssl_keyfile is not None and server.ssl_certfile is not None:
        _check_tls(server.ssl_keyfile, server.ssl_certfile)
    endpoint = server.otlp_traces_endpoint
    if endpoint is not None and not _is_http_url(endpoint):
        rule = "must be a URL, such as http://localhost:4318/v1/traces"
        _fail("otlp_traces_endpoint", repr(endpoint), rule)


def _check_tls(keyfile: str, certfile: str) -> None:
    """Load key and certificate as the server will; raises ConfigError if they do not fit."""
    import ssl

    is_encrypted = False

    def password() -> str:  # without it, OpenSSL would prompt on the terminal
        nonlocal is_encrypted
        is_encrypted = True
        return ""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password)
    except OSError as error:  # the base class of ssl.SSLError
        key, cert = shown(keyfile)[1:-1], shown(certfile)[1:-1]
        if is_encrypted:
            rule = "is encrypted; decrypt it first, because the server cannot ask for its password"
            _fail("ssl_keyfile", key, rule)
        reason = getattr(error, "reason", None) or ""
        if reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"--ssl-keyfile {key} is not the key of the certificate --ssl-certfile {cert}"
            ) from None
        try:
            context.load_verify_locations(certfile)
        except OSError:
            _fail("ssl_certfile", cert, "is not a certificate in PEM format")
        why = reason.lower().replace("_", " ") or "it may not be a key in PEM format"
        raise ConfigError(
            f"--ssl-keyfile {key} cannot be used with --ssl-certfile {cert} ({why})"
        ) from None


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        known = url.scheme in ("http", "https") and url.port != 0
    except ValueError:  # an incomplete IPv6 address, or a port that is not a number
        return False
    return known and bool(url.hostname) and not re.search(r"\s", text)


def _check_model(config: Config) -> None:
    model = config.model.model
    path = _check_location("model", model)
    if path is None and model.count("/") != 1:
        presets = preset_names()
        raise ConfigError(
            f"unknown model {model!r}: it must be a folder, a .gguf file, a hub id (owner/name) "
            f"or a preset ({', '.join(presets)}){did_you_mean(model, presets)}"
        )
    if config.model.hf_overrides is not None:
        try:
            is_object = isinstance(json.loads(config.model.hf_overrides), dict)
        except ValueError:
            is_object = False
        if not is_object:
            _fail("hf_overrides", config.model.hf_overrides, "must be a JSON object")


def _check_drafter(config: Config) -> None:
    method, drafter = config.speculative.method, config.speculative.model
    if drafter is None or method not in METHODS:  # a user's own class interprets the name itself
        return
    path = _check_location("drafter", drafter)
    if path is None and drafter.count("/") != 1:
        raise ConfigError(
            f"unknown drafter {drafter!r}: it must be a folder, a .gguf file or a hub id "
            "(owner/name)"
        )
    lacks_config = path is not None and not (path / "config.json").is_file()
    if method in ("eagle", "eagle3") and lacks_config:
        raise ConfigError(
            f"the drafter {drafter!r} must be a folder with a config.json for method {method}"
        )


def _check_location(what: str, name: str) -> Path | None:
    """The local file or folder that `name` means, or None if it may be a hub id.

    Raises ConfigError for a path that does not exist or cannot be a model; `what` is "model" or
    "drafter", for the message."""
    try:
        path = local_path(name)
    except PathError as error:
        raise ConfigError(f"the {what} {error}") from None
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf")
    if (looks_like_path or not name) and path is None:
        raise ConfigError(f"the {what} {name!r} does not exist: there is no such file or folder")
    if path is None:
        return None
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"the {what} {name!r} is a file, but not a .gguf file")
    if (
        path.is_dir()
        and not os.access(path / "config.json", os.R_OK)
        and not any(path.glob("*.gguf"))
    ):
        raise ConfigError(f"the {what} folder {name!r} has no config.json and no .gguf file")
    return path


def _check_budget(config: Config) -> None:
    scheduler, spec = config.scheduler, config.speculative
    tokens, per_request = scheduler.max_num_batched_tokens, spec.max_row_tokens
    needed = (scheduler.max_num_seqs or 1) * per_request
    if tokens is not None and tokens < needed:
        given = scheduler.max_num_seqs
        each = "a request" if given is None else f"each of --max-num-seqs {given} requests"
        rule = f"must be at least {needed}, since {each} may need {per_request} tokens in a step"
        _fail("max_num_batched_tokens", tokens, rule)
    if scheduler.max_itl_ms is not None and not scheduler.enable_chunked_prefill:
        rule = "needs chunked prefill; leave out --no-enable-chunked-prefill"
        _fail("max_itl_ms", scheduler.max_itl_ms, rule)
    longest = config.model.max_model_len
    if (
        not scheduler.enable_chunked_prefill
        and longest is not None
        and tokens is not None
        and tokens < longest
    ):
        _fail(
            "max_num_batched_tokens",
            tokens,
            f"must be at least --max-model-len {longest} when --no-enable-chunked-prefill is given",
        )
