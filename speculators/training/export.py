"""Writes a trained head as a checkpoint folder that other engines can load, too.

"specforge" is the flat config and the tensor names of SafeAILab and SpecForge, which SGLang and
vLLM read. "speculators" is the nested config of vLLM's library of that name, which vLLM reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from .head import HeadGeometry
from .vocabulary import DraftVocabulary

FORMATS = ("specforge", "speculators")
_TAPS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Verifier:
    """The target, which the `speculators` format calls the verifier."""

    name: str
    architectures: tuple[str, ...]


def save_head(
    folder: Path,
    weights: Mapping[str, Tensor],
    geometry: HeadGeometry,
    vocabulary: DraftVocabulary,
    verifier: Verifier,
    num_drafts: int,
    form: str = "specforge",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json and model.safetensors. `weights` are the parameters of a `TrainingHead`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().to(dtype) for name, tensor in weights.items()}
    if not vocabulary.is_whole:
        target_ids = vocabulary.target_ids.cpu()
        tensors["d2t"] = target_ids - torch.arange(vocabulary.size)
        tensors["t2d"] = vocabulary.t2d()
    if form == "speculators":
        tensors = {name.replace("midlayer.", "layers.0.", 1): t for name, t in tensors.items()}
        config = _speculators_config(geometry, verifier, num_drafts, dtype)
    else:
        config = _specforge_config(geometry, dtype)
    contiguous = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    scratch = folder / "model.safetensors.writing"
    # Not `save_file`, whose files only the owner may read: the server is often another user.
    scratch.write_bytes(save(contiguous, metadata={"format": "pt"}))
    os.replace(scratch, folder / "model.safetensors")
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _layer_config(geometry: HeadGeometry) -> dict[str, Any]:
    """The head's decoder layer as a Llama config."""
    return {
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "max_position_embeddings": geometry.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": geometry.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": geometry.num_kv_heads,
        "rms_norm_eps": geometry.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": geometry.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": geometry.vocab_size,
    }


def _specforge_config(geometry: HeadGeometry, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(geometry),
        "torch_dtype": _name(dtype),
        "draft_vocab_size": geometry.draft_vocab_size,
        "target_hidden_size": geometry.hidden_size,
        "norm_before_residual": False,
        # vLLM reads the top-level key, which counts the inputs of layers; SGLang reads the nested
        # one, which counts their outputs. Both lists mean the same hidden states.
        _TAPS: list(geometry.taps),
        "eagle_config": {
            "use_aux_hidden_state": True,
            _TAPS: [boundary - 1 for boundary in geometry.taps],
        },
    }


def _speculators_config(
    geometry: HeadGeometry, verifier: Verifier, num_drafts: int, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_drafts,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": verifier.name,
                "architectures": list(verifier.architectures),
            },
        },
        "transformer_layer_config": _layer_config(geometry),
        "draft_vocab_size": geometry.draft_vocab_size,
        "target_hidden_size": geometry.hidden_size,
        "norm_before_residual": False,
        _TAPS: list(geometry.taps),
        "embed_requires_grad": False,
        "torch_dtype": _name(dtype),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
