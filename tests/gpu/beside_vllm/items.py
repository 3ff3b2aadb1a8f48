"""What is measured beside vLLM: models, loads, and the command lines of both sides."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SLIPSTREAM = [sys.executable, "-m", "slipstream.server.commands"]
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
KV_GIB = 32  # of each server; no load of below fills it
DECODED = 128  # tokens of each request of `bench offline`


@dataclass(frozen=True)
class Drafts:
    """A drafter with random weights whose drafts are accepted at given rates, by position."""

    method: str
    head: str  # its folder; empty: the model's own module
    rates: tuple[float, ...]

    def config(self, models: Path, side: str, chosen: bool = False) -> dict[str, Any]:
        """The speculative config of either side; with `chosen` our K is chosen in each step."""
        found: dict[str, Any] = {"method": self.method, "num_speculative_tokens": len(self.rates)}
        if self.head:
            found["model"] = str(models / self.head)
        found["synthetic_acceptance_rates"] = list(self.rates)
        if side == "vllm":
            return found | {"rejection_sample_method": "synthetic"}
        if chosen:
            found["num_speculative_tokens"] = "auto"
        return found | {"load_format": "dummy"}


@dataclass(frozen=True)
class Offline:
    """Decoding alone: one model at several batch sizes."""

    model: str
    batches: tuple[int, ...]
    kv_gib: int
    drafts: Drafts | None = None
    gpus: int = 1
    max_num_seqs: int = 256
    own_kv_gib: int = 0  # of ours, if it differs: recurrent states are in vLLM's KV cache


RATES = (0.80, 0.60, 0.42)
FEW, ALL, PAIR = (1, 8, 32, 128), (1, 8, 32, 64, 128, 256), (1, 32, 256)


def eagle3(head: str) -> Drafts:
    """An EAGLE-3 head with K = 3."""
    return Drafts("eagle3", head, RATES)


EAGLE_8B, EAGLE_70B = eagle3("eagle3-8b"), eagle3("eagle3-70b")
EAGLE_QWEN, EAGLE_OSS = eagle3("eagle3-30b-a3b"), eagle3("eagle3-gpt-oss-20b")
MTP = Drafts("mtp", "", (0.85, 0.70))
OFFLINE = {
    "qwen3-30b-a3b": Offline("qwen3-30b-a3b", FEW, 8, max_num_seqs=128),
    "qwen3-30b-a3b-fp8": Offline("qwen3-30b-a3b-fp8", FEW, 8, max_num_seqs=128),
    "gpt-oss-20b": Offline("gpt-oss-20b", FEW, 8, max_num_seqs=128),
    "qwen3.5-27b": Offline("qwen3.5-27b", FEW, 30, max_num_seqs=128, own_kv_gib=8),
    "qwen3-30b-a3b+eagle3": Offline("qwen3-30b-a3b", FEW, 8, EAGLE_QWEN, 1, 128),
    "qwen3-30b-a3b-fp8+eagle3": Offline("qwen3-30b-a3b-fp8", FEW, 8, EAGLE_QWEN, 1, 128),
    "gpt-oss-20b+eagle3": Offline("gpt-oss-20b", FEW, 8, EAGLE_OSS, 1, 128),
    "qwen3.5-27b+mtp": Offline("qwen3.5-27b", FEW, 68, MTP, 1, 128, 8),
    "llama-8b": Offline("llama-8b", ALL, 14),
    "llama-8b-fp8": Offline("llama-8b-fp8", ALL, 14),
    "llama-8b-int4": Offline("llama-8b-int4", ALL, 14),
    "llama-8b-fp8+eagle3": Offline("llama-8b-fp8", ALL, 14, EAGLE_8B),
    "llama-8b-tp2": Offline("llama-8b", PAIR, 8, gpus=2),
    "llama-8b-tp2+eagle3": Offline("llama-8b", PAIR, 8, EAGLE_8B, 2),
    "llama-70b-tp2": Offline("llama-70b", PAIR, 14, gpus=2),
    "llama-70b-tp2+eagle3": Offline("llama-70b", PAIR, 14, EAGLE_70B, 2),
}


def offline_command(side: str, item: Offline, models: Path, figures: Path, gate: Path) -> list[str]:
    """Our `bench offline`, which writes its figures to a file, or vLLM's `bench_vllm.py`.

    The latter waits for a file in `gate` before it measures, and prints a line for each batch."""
    batches = ",".join(map(str, item.batches))
    folder, seqs = str(models / item.model), str(item.max_num_seqs)
    if side == "vllm":
        spec = json.dumps(item.drafts.config(models, side)) if item.drafts else "none"
        width = len(item.drafts.rates) + 1 if item.drafts else 1
        # A start captures only the graphs that these batches replay; 512 is vLLM's largest.
        rows = [*item.batches, *(batch * width for batch in item.batches), 512 // width * width]
        sizes = sorted({min(512, count) for count in rows})
        options: dict[str, Any] = {
            "max_num_seqs": item.max_num_seqs,
            "compilation_config": {"cudagraph_capture_sizes": sizes},
        }
        if item.gpus > 1:
            options["tensor_parallel_size"] = item.gpus
            # FlashInfer's sums may use NVLink multicast, which must stay off on a shared host.
            options["compilation_config"]["pass_config"] = {"fuse_allreduce_rms": False}
        if item.model.startswith("qwen3.5"):
            # The prompts' kernel of FlashInfer would be compiled for minutes; only decodes count.
            options |= {"language_model_only": True, "gdn_prefill_backend": "triton"}
        return [
            sys.executable, str(ROOT / "tests/lab/bench_vllm.py"), "measured", folder, spec,
            batches, str(item.kv_gib), str(gate), "128", str(DECODED), json.dumps(options),
        ]  # fmt: skip
    drafts = json.dumps(item.drafts.config(models, side)) if item.drafts else "off"
    own_kv = f"{item.own_kv_gib or item.kv_gib}G"
    return [
        *SLIPSTREAM, "bench", "offline", folder, "--load-format", "dummy",
        "--batch-sizes", batches, "--output-len", str(DECODED), "--num-iters", "2",
        "--max-model-len", "4096", "--max-num-seqs", seqs, "--max-num-batched-tokens", "8192",
        "--no-enable-prefix-caching", "--kv-cache-memory-bytes", own_kv,
        "-tp", str(item.gpus), "-sc", drafts, "--output", str(figures),
    ]  # fmt: skip


@dataclass(frozen=True)
class Load:
    """A run of `bench serve`, and the figures of it that count."""

    name: str
    server: str  # off or eagle3
    flags: tuple[str, ...]
    figures: tuple[str, ...] = ("output_throughput",)
    about_s: int = 15


def _closed(name: str, server: str, dataset: str, count: int, users: int, *more: str) -> Load:
    figure = "total_token_throughput" if dataset == "random" else "output_throughput"
    flags = (
        "--dataset-name",
        dataset,
        "--num-prompts",
        str(count),
        "--max-concurrency",
        str(users),
    )
    return Load(name, server, (*flags, *more), (figure,))


_LONG = ("--random-input-len", "3000", "--random-output-len", "64")
# 80 % of what vLLM reached in the closed loop: 13,604 tokens/s of replies of 195 tokens.
OPEN_RATE = 56
LOADS = (
    _closed("lognormal, 4 x 64", "off", "lognormal", 1000, 256),
    _closed("lognormal, 4 x 64", "eagle3", "lognormal", 1000, 256),
    _closed("prompts of 3,000, 64 at once", "off", "random", 192, 64, *_LONG),
    _closed("shared prefix of 2,000, 4 x 64", "off", "custom", 800, 256),
    Load(
        f"open loop, {OPEN_RATE} requests/s", "off",
        ("--dataset-name", "lognormal", "--num-prompts", str(20 * OPEN_RATE),
         "--request-rate", str(OPEN_RATE)),
        ("ttft_ms p99", "tpot_ms p99", "ttft_ms median", "output_throughput"), 25,
    ),
    _closed("lognormal, 32 at once", "eagle3", "lognormal", 320, 32),
)  # fmt: skip


def load_command(
    load: Load, url: str, seed: int, output: Path, data: Path, clients: int
) -> list[str]:
    """The client of both sides; each run has a seed of its own, so that no prompt is cached."""
    custom = ["--dataset-path", str(data)] if "custom" in load.flags else []
    return [
        *SLIPSTREAM, "bench", "serve", "--base-url", url, "--ignore-eos", "--temperature", "0",
        "--seed", str(seed), "--client-processes", str(clients), "--output", str(output),
        *load.flags, *custom,
    ]  # fmt: skip


def server_command(side: str, folder: Path, port: int, drafts: dict[str, Any] | None) -> list[str]:
    """The server of a model with its own defaults but for the KV cache."""
    model, memory = str(folder), KV_GIB << 30
    if not (folder / "model.safetensors").exists():
        dummy = ["--load-format", "dummy"]
    else:
        dummy, memory = [], 4 << 30
    same = ["--port", str(port), "--max-model-len", "4096", "--kv-cache-memory-bytes", str(memory)]
    if side == "vllm":
        spec = ["--speculative-config", json.dumps(drafts)] if drafts else []
        return [
            *VLLM, "serve", model, "--host", "127.0.0.1", *same, *dummy,
            "--gpu-memory-utilization", "0.05", "--disable-uvicorn-access-log", *spec,
        ]  # fmt: skip
    return [
        *SLIPSTREAM,
        "serve",
        model,
        *same,
        *dummy,
        "-sc",
        json.dumps(drafts or "off").strip('"'),
    ]
