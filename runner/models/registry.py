"""The architectures that can be served, and building a model from its config. Imports them late."""

from __future__ import annotations

import importlib
from copy import copy
from typing import Any

from ...configs.model.model_config import NotServed, served_architecture
from ..errors import ModelLoadError
from .base import TextModel
from .layers import WeightFormat

# architecture in config.json -> (module, class); the same ones as in `configs.model.model_config`
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "LlamaModel"),
    "MistralForCausalLM": ("llama", "LlamaModel"),
    "Qwen2ForCausalLM": ("llama", "LlamaModel"),
    "Qwen3ForCausalLM": ("llama", "LlamaModel"),
    "Qwen2MoeForCausalLM": ("families.qwen_moe", "QwenMoeModel"),
    "Qwen3MoeForCausalLM": ("families.qwen_moe", "QwenMoeModel"),
    "MinistralForCausalLM": ("llama", "LlamaModel"),
    "Ministral3ForCausalLM": ("families.mistral3", "Mistral3Model"),
    "Mistral3ForConditionalGeneration": ("families.mistral3", "Mistral3Model"),
    "Phi3ForCausalLM": ("families.phi3", "PhiModel"),
    "Glm4MoeForCausalLM": ("families.glm4_moe", "GlmMoeModel"),
    "GptOssForCausalLM": ("families.gpt_oss", "GptOssModel"),
    "DeepseekV2ForCausalLM": ("deepseek", "DeepseekModel"),
    "DeepseekV3ForCausalLM": ("deepseek", "DeepseekModel"),
    "DeepseekV32ForCausalLM": ("families.deepseek_v32", "DeepseekV32Model"),
    "DeepseekV4ForCausalLM": ("deepseek_v4.model", "DeepseekV4Model"),
    "Qwen3_5ForCausalLM": ("qwen3_5", "Qwen3_5Model"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "Qwen3_5Model"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5", "Qwen3_5Model"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5", "Qwen3_5Model"),
    "Qwen3NextForCausalLM": ("qwen3_5", "Qwen3_5Model"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3Model"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3Model"),
    "Gemma4ForCausalLM": ("gemma4", "Gemma4Model"),
    "Gemma4ForConditionalGeneration": ("gemma4", "Gemma4Model"),
}

_TIED_AT_TOP = ("qwen3_5", "qwen3_5_moe")  # types that state `tie_word_embeddings` outside


def architecture_of(hf_config: Any) -> str:
    """The architecture that a config names. Raises ModelLoadError if it cannot be served."""
    stated = {
        "architectures": getattr(hf_config, "architectures", None),
        "model_type": hf_config.model_type,
    }
    try:
        return served_architecture(stated)
    except NotServed as error:
        raise ModelLoadError(str(error)) from error


def _text_part(hf_config: Any) -> Any:
    """The config of the language part; a copy where the whole config alone says that the head is
    tied to the embeddings."""
    text = getattr(hf_config, "text_config", None)
    if text is None:
        return hf_config
    if hf_config.model_type in _TIED_AT_TOP and hf_config.tie_word_embeddings:
        text = copy(text)
        text.tie_word_embeddings = True
    return text


def check_experts(model: TextModel) -> None:
    """Raise ModelLoadError unless the model has experts that ranks can divide."""
    from .moe import DividedExperts

    if not any(isinstance(part, DividedExperts) for part in model.modules()):
        raise ModelLoadError("--enable-expert-parallel needs a model with experts.")


def build_model(
    hf_config: Any, fmt: WeightFormat, max_position: int | None = None, layer_id_offset: int = 0
) -> TextModel:
    """Build a model with uninitialised weights, for positions below `max_position`."""
    module_name, class_name = ARCHITECTURES[architecture_of(hf_config)]
    module = importlib.import_module(f".{module_name}", __package__)
    text_config = _text_part(hf_config)
    max_position = max_position or text_config.max_position_embeddings
    model: TextModel = getattr(module, class_name)(text_config, fmt, max_position, layer_id_offset)
    for part in model.modules():
        # plain attributes make submodules cheap to look up, which saves half a millisecond per CPU
        # step
        part.__dict__.update(part._modules)
    return model.eval()
