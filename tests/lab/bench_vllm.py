"""Measures vLLM's decode speed with random weights, for comparison with `slipstream bench offline`.

    python tests/lab/bench_vllm.py NAME MODEL SPEC BATCHES KV_GIB [GATE] [INPUT_LEN] [OUTPUT_LEN]
        [OPTIONS]

It needs vLLM 0.26, with VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ENABLE_V1_MULTIPROCESSING=0. MODEL is a
folder with a config.json. SPEC is `none`, a speculative config of vLLM as JSON, or
DRAFTER:K:r1/../rK, for EAGLE-3 with synthetic unconditional acceptance rates by position. BATCHES
is a list, for example 1,32,256. OPTIONS is a JSON object of further arguments of vLLM's engine.
As in `slipstream bench offline`, prompts have 128 random ids, and the time for one token is
subtracted from the time for 257; INPUT_LEN and OUTPUT_LEN change these. Prompts from 2,048 tokens
on are cached by prefix, as with `--same-prompts --enable-prefix-caching`.
If the folder GATE is given and not empty, the script writes GATE/NAME.ready after its start and
waits for GATE/NAME.go before it measures, so that several engines can start at the same time.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

PROMPT, TOKENS, LONG = 128, 256, 2048


def start(
    model: str,
    spec: str,
    kv_gib: float,
    max_model_len: int,
    keeps_prompts: bool,
    more: dict[str, Any],
) -> Any:
    """Start vLLM's engine; `more` are further arguments of it."""
    options: dict[str, Any] = {"max_num_seqs": 256} | more
    if spec.startswith("{"):
        options["speculative_config"] = json.loads(spec)
    elif spec != "none":
        drafter, num_drafts, rates = spec.split(":")
        options["speculative_config"] = {
            "method": "eagle3",
            "model": drafter,
            "num_speculative_tokens": int(num_drafts),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [float(rate) for rate in rates.split("/")],
        }
    return import_module("vllm").LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=int(kv_gib * 2**30),
        enable_prefix_caching=keeps_prompts,
        disable_log_stats=True,
        **options,
    )


def measure(
    engine: Any, batch: int, prompt_len: int, decoded: int, speculates: bool
) -> dict[str, Any]:
    """Measure the decode speed of one batch size, in tokens per second.

    From the time for `decoded + 1` tokens it subtracts the time for one token, the best of three
    runs. The former is the best of two runs, or with drafts the mean of enough runs for at least
    16 requests. A few tokens are generated before, so that all kernels of this batch are compiled.
    """
    make_params = import_module("vllm").SamplingParams
    vocab = engine.model_config.get_vocab_size()
    draw = random.Random(0)
    prompts = [
        {"prompt_token_ids": [draw.randrange(10, vocab - 10) for _ in range(prompt_len)]}
        for _ in range(batch)
    ]
    best = {}
    whole_runs = 2 * (max(1, 8 // batch) if speculates else 1)
    for tokens, runs in ((9, 1), (1, 3), (decoded + 1, whole_runs)):
        params = make_params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        times = []
        for _ in range(runs):
            began = time.time()
            replies = engine.generate(prompts, params, use_tqdm=False)
            times.append(time.time() - began)
        assert all(len(reply.outputs[0].token_ids) == tokens for reply in replies)
        best[tokens] = sum(times) / runs if speculates and tokens > 1 else min(times)
    speed = batch * decoded / (best[decoded + 1] - best[1])
    return {"batch": batch, "prefill_s": round(best[1], 4), "decode_tok_s": round(speed, 1)}


def main() -> None:
    name, model, spec, batches, kv_gib, *more = sys.argv[1:]
    gate, prompt_len, decoded, options = [*more, *["", PROMPT, TOKENS, "{}"][len(more) :]]
    prompt_len, decoded = int(prompt_len), int(decoded)
    began = time.time()
    # 4096 as in the published figures, unless the requests need more
    longest, keeps_prompts = max(4096, prompt_len + decoded + 65), prompt_len >= LONG
    engine = start(model, spec, float(kv_gib), longest, keeps_prompts, json.loads(options))
    print(json.dumps({"name": name, "start_s": round(time.time() - began, 1)}), flush=True)
    if gate:
        folder = Path(gate)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.ready").touch()
        while not (folder / f"{name}.go").exists():
            time.sleep(0.2)
    for batch in map(int, batches.split(",")):
        print(
            json.dumps(
                {"name": name} | measure(engine, batch, prompt_len, decoded, spec != "none")
            ),
            flush=True,
        )
    if gate:
        (folder / f"{name}.done").touch()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process running


if __name__ == "__main__":
    main()
