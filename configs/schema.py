"""The frozen configuration sections; flags, YAML keys and the flag table are made from them.

Nothing here reads files or arguments (see `load`), and nothing writes into a section after
construction. Each option carries its one-line doc in `metadata["doc"]`; an option named
`max_model_len` is the flag `--max-model-len`, the YAML key `max_model_len` and the variable
`SLIPSTREAM_MAX_MODEL_LEN`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Formats that the server's parsers read; tests hold these lists against the parsers.
TOOL_CALL_FORMATS = (
    *("hermes", "qwen", "qwen25", "qwen3", "qwen3_coder", "qwen3_xml", "llama3_json"),
    *("llama4_json", "mistral", "deepseek_v3", "deepseek_v31", "gemma", "gemma3", "gemma4"),
    *("functiongemma", "pythonic", "llama4_pythonic"),
)
REASONING_FORMATS = ("deepseek_r1", "qwen3", "gemma", "gemma4")


def option(
    default: Any, doc: str, *, choices: tuple[str, ...] = (), short: str | None = None
) -> Any:
    """A dataclass field with its doc, allowed values and short flag."""
    return field(default=default, metadata={"doc": doc, "choices": choices, "short": short})


def internal(default: Any) -> Any:
    """A field for tests and measurements: it has no flag, YAML key or environment variable."""
    return field(default=default)


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP process."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one and prints it")
    api_key: tuple[str, ...] = option((), "accepted bearer tokens; repeat for several, none = open")
    api_key_file: str | None = option(
        None, "file with accepted bearer tokens, one a line, such as a container engine's secret"
    )
    admin_api_key: tuple[str, ...] = option(
        (), "bearer tokens for /v1/speculator, which is off without one"
    )
    admin_api_key_file: str | None = option(
        None, "file with bearer tokens for /v1/speculator, one a line"
    )
    served_model_name: tuple[str, ...] = option((), "names clients may use for the model")
    allowed_origins: tuple[str, ...] = option((), "CORS origins that browsers may call from")
    max_queue_size: int = option(1024, "requests waiting before the server answers 429")
    max_body_bytes: int = option(16 << 20, "largest accepted request body")
    drain_timeout: float = option(30.0, "seconds to let open requests finish on shutdown")
    worker_timeout: float = option(
        300.0, "seconds without a finished step before a busy worker is started anew; 0 = never"
    )
    client_timeout: float = option(
        60.0, "seconds a client may take to send a request, or may not read its reply; 0 = no limit"
    )
    metrics_prefix: str = option("slipstream", "prefix of the metric names")
    chat_template: str | None = option(None, "file with a chat template that replaces the model's")
    default_max_tokens: int | None = option(
        None,
        "output tokens of a chat or response that names no limit; default: what the context has"
        " left, on the default preset 1024",
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls (auto: by its chat template)",
        choices=("auto", "none", *TOOL_CALL_FORMATS),
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning (auto: by its chat template)",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    trust_request_chat_template: bool = option(
        False,
        "run chat templates that requests bring, each in a child process of 5 s and 1 GiB at most",
    )
    allow_special_tokens_in_content: bool = option(
        False, "let special tokens such as <|im_end|> in the content of chats be the control tokens"
    )
    per_request_spec_decode_metrics: str = option(
        "none",
        "what replies tell of their drafts' acceptance (metrics.speculative_decoding)",
        choices=("none", "summary", "detailed"),
    )
    root_path: str = option("", "path prefix when behind a proxy that strips it")
    ssl_keyfile: str | None = option(None, "TLS private key file")
    ssl_certfile: str | None = option(None, "TLS certificate file")
    capture_traffic: str | None = option(
        None, "folder that takes the prompts of requests, for `slipstream train`; never without it"
    )
    capture_traffic_max_bytes: int = option(
        64 << 20, "size at which --capture-traffic stops writing"
    )
    log_level: str = option(
        "info", "how much to log", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "how log lines look", choices=("text", "json"))
    access_log: bool = option(False, "log one line per HTTP request")
    otlp_traces_endpoint: str | None = option(
        None, "URL that takes OTLP traces over HTTP (ends in /v1/traces); needs the extra otel"
    )


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and in what form."""

    model: str = option("smollm2-135m", "Hugging Face id or folder, .gguf file, or preset name")
    tokenizer: str | None = option(
        None, "tokenizer folder, id or preset name, if not the model's own"
    )
    revision: str | None = option(None, "branch, tag or commit on the hub")
    dtype: str = option(
        "auto", "weights and activations", choices=("auto", "float32", "bfloat16", "float16")
    )
    load_format: str = option(
        "auto",
        "where weights come from",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    max_model_len: int | None = option(
        None,
        "longest prompt + output in tokens, such as 4k (4000) or 4K (4096); default: the model's",
    )
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    hf_overrides: str | None = option(None, "JSON object merged over the model's config.json")
    max_logprobs: int = option(20, "largest number of logprobs a request may ask for")
    seed: int = option(0, "seed of random weights and of requests that name none")


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "tokens per KV block")
    gpu_memory_utilization: float = option(0.9, "share of GPU memory the worker may use")
    kv_cache_memory_bytes: int | None = option(
        None, "size of the KV cache; default: from free memory (GPU) or 1 GiB (CPU)"
    )
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, for tests")
    enable_prefix_caching: bool = option(True, "reuse KV of shared prompt prefixes")


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int = option(64, "requests that run at once")
    max_num_batched_tokens: int = option(2048, "tokens in one step")
    enable_chunked_prefill: bool = option(True, "split long prompts over steps")
    async_scheduling: bool = option(True, "schedule step N+1 while step N runs")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafting; the JSON object of `--speculative-config`. `method="off"` turns it off."""

    method: str = option(
        "off",
        "off, ngram, draft_model, eagle, eagle3, mtp, gemma4_mtp, or a module:Class of your own",
    )
    model: str | None = option(None, "the drafter's folder or id")
    num_speculative_tokens: int | None = option(
        None, "drafts per step (K), or auto (default): chosen for each step, from none up"
    )
    max_speculative_tokens: int | None = option(
        None, "auto: the largest K; default: 5, for mtp 3, for ngram 8"
    )
    prompt_lookup_max: int = option(4, "n-gram: longest suffix to look for")
    prompt_lookup_min: int = option(2, "n-gram: shortest suffix to look for")
    draft_sampling: str = option(
        "auto", "how drafts are drawn", choices=("auto", "greedy", "probabilistic")
    )
    rejection_sampling: str = option(
        "standard", "how drafts are verified", choices=("standard", "coupled")
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        None, "benchmarks only: accept by these unconditional rates; NOT lossless"
    )
    max_model_len: int | None = option(None, "the drafter's own length limit")
    aux_hidden_state_boundaries: tuple[int, ...] | None = option(
        None, "EAGLE-3 taps as boundaries 0..n (stream after b layers); default: the checkpoint's"
    )
    mtp_feedback: str = option(
        "post_norm", "hidden state MTP feeds back", choices=("post_norm", "pre_norm")
    )
    position_offset: int = option(0, "Gemma 4 assistant: 0 = position P, 1 = P + 1")
    load_format: str = option("auto", "like the model's --load-format, for the drafter")
    watchdog: bool = option(True, "stop a drafter that seems broken, and try it again later")

    @property
    def max_drafts(self) -> int:
        """The largest K, fixed or chosen."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if self.max_speculative_tokens is not None:
            return self.max_speculative_tokens
        if self.synthetic_acceptance_rates is not None:
            return len(self.synthetic_acceptance_rates)
        return {"mtp": 3, "ngram": 8}.get(self.method, 5)

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """The K above 0 that a step may have. Each has graphs of its own, so not every large one
        is among them; a single one is fixed."""
        most = self.max_drafts
        if self.method == "off":
            return ()
        if self.num_speculative_tokens is not None:
            return (most,)
        return (*(k for k in (1, 2, 3, 4, 5, 6, 8, 11, 16, 23) if k < most), most)


@dataclass(frozen=True)
class GraphConfig:
    """CUDA graphs and kernels."""

    cudagraph_mode: str = option(
        "auto",
        "which steps are captured",
        choices=("auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"),
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = option(None, "token counts to capture")
    # One graph holds all draft decodes of a step where attention metadata is built on the device.
    cudagraph_draft_loop: bool = internal(True)
    # There, too, graphs gather the rows of decode steps, sample and commit their tokens.
    cudagraph_whole_step: bool = internal(True)
    enforce_eager: bool = option(False, "no graphs at all")
    attention_backend: str = option(
        "auto",
        "attention kernels",
        choices=("auto", "reference", "triton", "flashinfer", "flash_mla"),
    )
    linear_backend: str = option(
        "auto",
        "linear layers of few rows on a GPU; auto: Triton where it was measured to be quicker",
        choices=("auto", "torch", "triton"),
    )
    debug_compare_eager: bool = option(False, "run eager beside each replay and compare")


@dataclass(frozen=True)
class ParallelConfig:
    """Several GPUs."""

    tensor_parallel_size: int = option(1, "GPUs one model is split over", short="-tp")
    data_parallel_size: int = option(1, "copies of the model", short="-dp")


@dataclass(frozen=True)
class Config:
    """Everything, as one value that is handed to the worker process. `load` makes and checks it."""

    server: ServerConfig = field(default_factory=ServerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
