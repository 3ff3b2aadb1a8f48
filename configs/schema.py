"""Defines the frozen configuration sections; flags, YAML keys and docs/flags.md are made from them.

Nothing here reads files or arguments (`load` does), and nothing changes a section after
construction. Each option carries its one-line doc in `metadata["doc"]`; an option named
`max_model_len` is the flag `--max-model-len`, the YAML key `max_model_len` and the variable
`SLIPSTREAM_MAX_MODEL_LEN`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Formats that the server's parsers read; tests compare these lists with the parsers.
TOOL_CALL_FORMATS = (
    *("hermes", "qwen", "qwen25", "qwen3", "qwen3_coder", "qwen3_xml", "llama3_json"),
    *("llama4_json", "mistral", "deepseek_v3", "deepseek_v31", "deepseek_v32"),
    *("deepseek_v4", "gemma", "gemma3", "gemma4"),
    *("functiongemma", "pythonic", "llama4_pythonic", "gpt_oss", "openai"),
)
REASONING_FORMATS = ("deepseek_r1", "deepseek_v4", "qwen3", "gemma", "gemma4")
_LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def option(
    default: Any, doc: str, *, choices: tuple[str, ...] = (), short: str | None = None
) -> Any:
    """A dataclass field with a doc, its allowed values (empty = any) and a short flag."""
    return field(default=default, metadata={"doc": doc, "choices": choices, "short": short})


def internal(default: Any) -> Any:
    """A field for tests and measurements: it has no flag, YAML key or environment variable."""
    return field(default=default)


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free port and prints it")
    api_key: tuple[str, ...] = option(
        (), "bearer token that clients must send, or several; without one the API is open"
    )
    api_key_file: str | None = option(
        None, "file with accepted bearer tokens, one per line, such as a container secret"
    )
    admin_api_key: tuple[str, ...] = option(
        (), "bearer token for /v1/speculator, or several; without one it is disabled"
    )
    admin_api_key_file: str | None = option(
        None, "file with bearer tokens for /v1/speculator, one per line"
    )
    served_model_name: tuple[str, ...] = option(
        (), "name of the model in the API, or several; default: MODEL"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "origin from which browsers may call the API (CORS), or several"
    )
    live_page: bool = option(
        True, "serve the page /live, a chat that shows drafts and charts of the server"
    )
    max_queue_size: int = option(1024, "most requests that may wait; beyond it the answer is 429")
    max_body_bytes: int = option(16 << 20, "largest accepted request body")
    drain_timeout: float = option(30.0, "seconds that open requests get to finish at shutdown")
    worker_timeout: float = option(
        300.0, "restart a busy worker that finishes no step for this many seconds; 0 = never"
    )
    client_timeout: float = option(
        60.0,
        "disconnect a client that takes this many seconds to send a request, or reads nothing of"
        " its reply for as long; 0 = never",
    )
    sse_keep_alive: float = option(
        15.0, "seconds of silence after which a stream gets a comment that clients skip; 0 = never"
    )
    metrics_prefix: str = option("slipstream", "prefix of metric names")
    chat_template: str | None = option(None, "chat template file to use instead of the model's")
    default_max_tokens: int | None = option(
        None,
        "output limit, in tokens, of chats and responses that set none; default: the rest of the"
        " context (the default preset sets 1024)",
    )
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls (auto: detected from its chat template)",
        choices=("auto", "none", *TOOL_CALL_FORMATS),
    )
    reasoning_parser: str = option(
        "auto",
        "format of the model's reasoning (auto: detected from its chat template)",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    trust_request_chat_template: bool = option(
        False,
        "accept chat templates in requests; each runs in a child process, limited to 5 s and 1 GiB",
    )
    allow_special_tokens_in_content: bool = option(
        False, "treat special tokens such as <|im_end|> in chat content as control tokens, not text"
    )
    per_request_spec_decode_metrics: str = option(
        "none",
        "draft acceptance that each reply reports, in metrics.speculative_decoding",
        choices=("none", "summary", "detailed"),
    )
    root_path: str = option("", "path prefix that a proxy in front of the server strips")
    ssl_keyfile: str | None = option(None, "TLS private key file")
    ssl_certfile: str | None = option(None, "TLS certificate file")
    capture_traffic: str | None = option(
        None,
        "write the prompts of requests to this folder, for `slipstream train`; without it no prompt"
        " is stored",
    )
    capture_traffic_max_bytes: int = option(
        64 << 20, "size of the file at which --capture-traffic stops writing"
    )
    log_level: str = option(
        "info", "lowest level to log", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "format of log lines", choices=("text", "json"))
    access_log: bool = option(False, "log one line per HTTP request")
    otlp_traces_endpoint: str | None = option(
        None, "URL to send OTLP traces to over HTTP (ends in /v1/traces); needs the extra otel"
    )


@dataclass(frozen=True)
class ModelConfig:
    """The model and how it is loaded."""

    model: str = option("smollm2-135m", "Hugging Face id, folder, .gguf file or preset name")
    tokenizer: str | None = option(
        None, "tokenizer folder, Hugging Face id or preset name; default: the model's own"
    )
    revision: str | None = option(None, "branch, tag or commit on the Hugging Face hub")
    dtype: str = option(
        "auto",
        "data type of weights and activations",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = option(
        "auto", "format of the weights (dummy: random numbers, no file)", choices=_LOAD_FORMATS
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus output, in tokens, such as 4k (4000) or 4K (4096); default: the"
        " model's limit",
    )
    device: str = option("auto", "device that runs the model", choices=("auto", "cpu", "cuda"))
    hf_overrides: str | None = option(None, "JSON object merged into the model's config.json")
    max_logprobs: int = option(20, "most logprobs per token that a request may ask for")
    seed: int = option(0, "random seed of dummy weights, and of requests that set no seed")


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "tokens per KV block")
    state_block_size: int = option(
        1024, "tokens between saved recurrent states, from which cached prefixes continue"
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of cached keys and values (auto: that of the model; fp8 means fp8_e4m3, with"
        " the checkpoint's scales or 1)",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    gpu_memory_utilization: float = option(0.9, "fraction of GPU memory that the worker may use")
    kv_cache_memory_bytes: int | None = option(
        None, "size of the KV cache; default: as much as GPU memory allows, or 1 GiB on the CPU"
    )
    num_gpu_blocks_override: int | None = option(
        None, "number of KV blocks, for tests; default: as many as fit into the KV cache"
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of shared prompt prefixes")


@dataclass(frozen=True)
class StepLimits:
    """The limits of a step: those of `SchedulerConfig`, once the worker has chosen what is open."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may contain, and when it is scheduled."""

    max_num_seqs: int | None = option(
        None,
        "most requests that run at once; default: 256 on a large GPU (Hopper or newer, 60 GiB) with"
        " room for the model, else 64",
    )
    max_num_batched_tokens: int | None = option(
        None, "most tokens in one step; default: 8192 on such a GPU, else 2048"
    )
    enable_chunked_prefill: bool = option(True, "split long prompts across several steps")
    async_scheduling: bool = option(True, "schedule the next step while the current one runs")
    max_itl_ms: float | None = option(
        None,
        "compute prompts in chunks so small that a step in which a request decodes should take at"
        " most this many milliseconds; default: no limit, on the CPU about 200",
    )


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: which drafter runs, and how its drafts are verified."""

    method: str = option(
        "off",
        "off, ngram, draft_model, eagle, eagle3, mtp, gemma4_mtp, or module:Class of your own",
    )
    model: str | None = option(None, "the drafter's folder or Hugging Face id")
    num_speculative_tokens: int | None = option(
        None, "draft length K, or auto (default): a new choice for each step, which may be 0"
    )
    max_speculative_tokens: int | None = option(
        None, "largest K that auto may choose; default: 5, for mtp 3, for ngram 8"
    )
    prompt_lookup_max: int = option(4, "ngram: longest suffix to search for, in tokens")
    prompt_lookup_min: int = option(2, "ngram: shortest suffix to search for, in tokens")
    draft_sampling: str = option(
        "auto", "how drafts are sampled", choices=("auto", "greedy", "probabilistic")
    )
    rejection_sampling: str = option(
        "standard", "how drafts are verified", choices=("standard", "coupled")
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        None,
        "benchmarks only: accept drafts at these rates, one per position, each the share of steps"
        " that accept up to there; the output is NOT the model's",
    )
    max_model_len: int | None = option(
        None, "sequence length, in tokens, beyond which the drafter stops drafting"
    )
    aux_hidden_state_boundaries: tuple[int, ...] | None = option(
        None,
        "eagle3: take auxiliary hidden states after these numbers of layers (0: the embeddings);"
        " default: the checkpoint's",
    )
    mtp_feedback: str = option(
        "post_norm",
        "mtp: hidden state passed to the next draft, after or before the final norm; for Qwen's"
        " modules also that of the target, passed to the first; DeepSeek V4's passes its streams",
        choices=("post_norm", "pre_norm"),
    )
    position_offset: int = option(
        0, "gemma4_mtp: drafts run at position P (0) or P + 1 (1), P being the last verified token"
    )
    load_format: str = option(
        "auto", "format of the drafter's weights, as --load-format", choices=_LOAD_FORMATS
    )
    draft_tensor_parallel_size: int | None = option(
        None,
        "with -tp: 1 (whole on each rank) or the number of ranks; default: what should be faster",
    )
    watchdog: bool = option(True, "turn off a drafter that seems broken, and retry it later")

    @property
    def max_drafts(self) -> int:
        """The largest K of any step, whether K is fixed or chosen for each step."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if self.max_speculative_tokens is not None:
            return self.max_speculative_tokens
        if self.synthetic_acceptance_rates is not None:
            return len(self.synthetic_acceptance_rates)
        return {"mtp": 3, "ngram": 8}.get(self.method, 5)

    @property
    def max_row_tokens(self) -> int:
        """The most tokens of a request that decodes, in one step: its newest and its drafts."""
        return 1 if self.method == "off" else self.max_drafts + 1

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Every K above 0 that a step may have, ascending; empty if speculation is off.

        Each K has CUDA graphs of its own, so large values are spaced out. A fixed K is the only
        one."""
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
        "which steps run as CUDA graphs",
        choices=(
            *("auto", "none", "piecewise", "full", "full_decode_only"),
            *("full_and_piecewise", "full_and_full"),
        ),
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = option(
        None, "token counts for which CUDA graphs are captured; default: chosen from the limits"
    )
    # Whether one graph holds all draft decodes of a step, where an attention back end builds its
    # metadata on the device.
    cudagraph_draft_loop: bool = internal(True)
    # Whether, with such a back end, graphs also gather the rows of decode steps, and sample and
    # commit their tokens.
    cudagraph_whole_step: bool = internal(True)
    enforce_eager: bool = option(False, "use no CUDA graphs")
    attention_backend: str = option(
        "auto",
        "attention kernels to use",
        choices=("auto", "reference", "triton", "flashinfer", "flash_mla"),
    )
    linear_backend: str = option(
        "auto",
        "kernels of linear layers with few rows on a GPU (auto: Triton where it measured faster)",
        choices=("auto", "torch", "triton"),
    )
    batch_invariant: bool = option(
        False,
        "compute every token alike, bit for bit, whatever else runs: other requests, drafts,"
        " chunks, cached prefixes; slower",
    )
    debug_compare_eager: bool = option(
        False, "also run each replayed step without a graph and compare the results; slow"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Several devices for one server."""

    tensor_parallel_size: int = option(
        1,
        "number of GPUs that share the model; on a CPU, the number of processes",
        short="-tp",
    )
    data_parallel_size: int = option(
        1, "replicas of the model behind one server, each on devices of its own", short="-dp"
    )
    enable_expert_parallel: bool = option(
        False,
        "divide whole experts among all GPUs of -tp and -dp; replicas of -dp then step together",
    )
    all2all_backend: str = option(
        "allgather_reducescatter",
        "exchange of tokens between replicas of -dp that share experts; with all_to_all and"
        " without CUDA graphs, a token goes only to the GPUs of its experts",
        choices=("allgather_reducescatter", "all_to_all"),
    )
    disable_custom_all_reduce: bool = option(
        False, "add up small tensors of -tp through NCCL, too, not through shared GPU memory"
    )

    @property
    def shares_experts(self) -> bool:
        """Whether the engines of `-dp` share their experts, so that they step together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1


@dataclass(frozen=True)
class HostsConfig:
    """Several hosts for one server."""

    distributed_executor_backend: str = option(
        "mp",
        "what starts the processes of -tp and -dp: each host its own, or a Ray cluster",
        choices=("mp", "ray"),
    )
    nnodes: int = option(1, "number of hosts that share the processes of -tp and -dp")
    node_rank: int = option(0, "number of this host; 0 serves HTTP, the others only compute")
    master_addr: str = option("127.0.0.1", "address of host 0, at which the other hosts reach it")
    master_port: int = option(29501, "port of host 0 on which the other hosts join")
    group_key: str | None = option(None, "secret of 16 characters or more that all hosts share")
    group_key_file: str | None = option(
        None, "file with the secret that all hosts share, such as a container secret"
    )
    join_timeout: float = option(600.0, "seconds that hosts wait for each other at the start")


@dataclass(frozen=True)
class Config:
    """The whole configuration, which the server also sends to the worker process.

    `load.load_config` makes and checks it."""

    server: ServerConfig = field(default_factory=ServerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
