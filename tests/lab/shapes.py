"""Writes model folders without weights, for `--load-format dummy`.

`python tests/lab/shapes.py FOLDER` writes FOLDER/llama-8b (the shape of Llama 8B),
FOLDER/llama-8b-16k (the same for contexts of up to 16,384 tokens), FOLDER/llama-8b-fp8 (the same
with fp8 weights by channel) and -int4 (GPTQ in groups of 128), FOLDER/qwen3-30b-a3b (of
Qwen3-30B-A3B; -fp8 and -int4 are the same in these formats), FOLDER/gpt-oss-20b and EAGLE-3 heads:
FOLDER/eagle3-8b for the first two, FOLDER/eagle3-30b-a3b and FOLDER/eagle3-gpt-oss-20b.
FOLDER/deepseek-v4-flash-7 has the widths of DeepSeek V4 Flash and seven of its 43 layers, of every
kind: with the module for multi-token prediction and 16-bit experts they fill an H200.
FOLDER/deepseek-v3-7 has the widths of DeepSeek V3, its three dense layers and four with experts;
with the module's experts they take 120 GB.
FOLDER/deepseek-v32-5 has the widths of DeepSeek V3.2 and its first five layers, two of them with
experts.
FOLDER/llama-70b has the shape of Llama 3 70B; its head is FOLDER/eagle3-70b. FOLDER/qwen3.5-27b
has the shape of Qwen3.5-27B with its module for multi-token prediction.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000,
    "eos_token_id": 128001,
}  # fmt: skip
EAGLE3_8B = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
    "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "hidden_act": "silu", "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None, "attention_bias": False,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 48,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088,
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "hidden_act": "silu", "swiglu_limit": 7.0,
    "attention_bias": True, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "initial_context_length": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 200002,
    "pad_token_id": 199999,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
    },
}  # fmt: skip

_RAW, _INDEXED, _PLAIN = (
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip
DEEPSEEK_V4_FLASH_7 = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 129280,
    "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 7,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_nextn_predict_layers": 1,
    "layer_types": [_RAW, _RAW, *[_INDEXED, _PLAIN] * 2, _INDEXED],
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 4,
    "compress_rates": {_INDEXED: 4, _PLAIN: 128},
    "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

DEEPSEEK_V3_7 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 7, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 163840, "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
DEEPSEEK_V32_5 = DEEPSEEK_V3_7 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
    "num_hidden_layers": 5, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip


def eagle3(target: dict[str, Any], boundaries: list[int], inner: int) -> dict[str, Any]:
    """The config of an EAGLE-3 head for a target with experts: one dense Llama layer."""
    same = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return LLAMA_8B | {name: target[name] for name in same} | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
        "intermediate_size": inner, "draft_vocab_size": 32000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": target["max_position_embeddings"],
        "eagle_aux_hidden_state_layer_ids": boundaries,
    }  # fmt: skip


FP8_BLOCKS = {
    "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
INT4_GROUPS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 128,
            },
        }
    },
}  # fmt: skip
FP8_ROWS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel",
            },
            "input_activations": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token",
                "dynamic": True,
            },
        }
    },
}  # fmt: skip
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip
EAGLE3_70B = LLAMA_70B | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
    "eagle_aux_hidden_state_layer_ids": [2, 40, 77],
}  # fmt: skip
QWEN35_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "silu",
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "attention_bias": False,
        "attn_output_gate": True, "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 248044,
    },
}  # fmt: skip
LONG = LLAMA_8B | {"max_position_embeddings": 16384}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    "llama-8b-16k": LONG,
    "llama-8b-fp8": LLAMA_8B | {"quantization_config": FP8_ROWS},
    "llama-8b-int4": LLAMA_8B | {"quantization_config": GPTQ},
    "eagle3-8b": EAGLE3_8B,
    "llama-70b": LLAMA_70B,
    "eagle3-70b": EAGLE3_70B,
    "qwen3.5-27b": QWEN35_27B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-30b-a3b-fp8": QWEN3_30B_A3B | {"quantization_config": FP8_BLOCKS},
    "qwen3-30b-a3b-int4": QWEN3_30B_A3B | {"quantization_config": INT4_GROUPS},
    "eagle3-30b-a3b": eagle3(QWEN3_30B_A3B, [2, 24, 45], 6144),
    "gpt-oss-20b": GPT_OSS_20B,
    "eagle3-gpt-oss-20b": eagle3(GPT_OSS_20B, [2, 12, 21], 17280),
    "deepseek-v4-flash-7": DEEPSEEK_V4_FLASH_7,
    "deepseek-v3-7": DEEPSEEK_V3_7,
    "deepseek-v32-5": DEEPSEEK_V32_5,
}


def write(folder: Path) -> None:
    """Write all model folders; each has a config.json, and llama-8b and DeepSeek a tokenizer of
    one word a token."""
    for name, config in SHAPES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("llama-8b", "deepseek-v4-flash-7", "deepseek-v32-5"):
        write_tokenizer(folder / name, SHAPES[name]["vocab_size"])


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose token i is the word "wi", so that the shape can be served as text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
