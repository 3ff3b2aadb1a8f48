"""A tiny DeepSeek V3, V3.2 or GLM-4.5 with its MTP module in one checkpoint, and its plain drafts.

Target and module are transformers' own; only the reuse of one module for K drafts is written here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

LAYERS, VOCAB = 3, 61
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, moe_intermediate_size=24,
    num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
    n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=1, q_lora_rank=40,
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=20, n_group=4,
    topk_group=2, routed_scaling_factor=1.7, max_position_embeddings=128, num_mtp_layers=1,
    eos_token_id=None, bos_token_id=None,
)  # fmt: skip


GLM_SHAPE = dict(
    head_dim=16, num_key_value_heads=2, use_qk_norm=True, attention_bias=True, n_group=1,
    topk_group=1,
)  # fmt: skip
V32_SHAPE = dict(
    index_topk=6, index_head_dim=32, index_n_heads=16, mtp_layer_types=["indexed_attention"],
    mtp_mlp_layer_types=["sparse"],
)  # fmt: skip
_DEEPSEEK = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class MtpOracle:
    """Builds both models and saves them as DeepSeek does, the module after the last layer."""

    def __init__(
        self, folder: Path, post_norm: bool = True, family: str = "DeepseekV3", **settings: Any
    ) -> None:
        torch.manual_seed(1)
        shape: dict[str, Any] = dict(SHAPE)
        if family == "Glm4Moe":
            shape = {k: v for k, v in SHAPE.items() if k not in _DEEPSEEK} | GLM_SHAPE
        if family == "DeepseekV32":
            shape |= V32_SHAPE
        config = getattr(transformers, f"{family}Config")(**{**shape, **settings})
        config._attn_implementation = "eager"
        self.model_class = getattr(transformers, f"{family}ForCausalLM")
        self.target = self.model_class(config).eval()
        self.mtp = MtpModel(self.target, 1).eval()
        with torch.no_grad():
            # every parameter: transformers leaves some of the module's uninitialised
            for part in (self.target, self.mtp.layers):
                for name, tensor in (*part.named_parameters(), *part.named_buffers()):
                    if "norm" in name:
                        tensor.copy_(torch.rand_like(tensor) * 1.8 + 0.1)
                    elif "inv_freq" not in name:
                        tensor.copy_(torch.randn_like(tensor) * 0.3)
        self.post_norm = post_norm
        self.target.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors |= self.module_tensors(f"model.layers.{LAYERS}.", folder.parent / "module")
        save_file(tensors, folder / "model.safetensors")

    def module_tensors(self, prefix: str, scratch: Path) -> dict[str, Tensor]:
        """The module under a prefix, copies of the target's embeddings and head included."""
        # transformers stores a layer's experts one by one: let it rename those of a target's layer
        clone = self.model_class(self.target.config)
        clone.model.layers[LAYERS - 1] = self.mtp.layers[0].mtp_block
        clone.save_pretrained(scratch)
        own = f"model.layers.{LAYERS - 1}."
        tensors = {
            prefix + name.removeprefix(own): tensor
            for name, tensor in load_file(scratch / "model.safetensors").items()
            if name.startswith(own)
        }
        for name, tensor in self.mtp.layers[0].state_dict().items():
            if not name.startswith("mtp_block."):
                stored = name.replace("post_norm.", "shared_head.norm.")
                tensors[prefix + stored] = tensor.clone()
        tensors[f"{prefix}embed_tokens.weight"] = self.target.model.embed_tokens.weight.data.clone()
        tensors[f"{prefix}shared_head.head.weight"] = self.target.lm_head.weight.data.clone()
        return tensors

    def save_export(self, folder: Path) -> Path:
        """The module alone, as NextN exports have it: layer 0 of a folder of its own."""
        folder.mkdir()
        config = self.target.config.to_dict() | {
            "architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        tensors = self.module_tensors("model.layers.0.", folder.parent / "module")
        save_file(tensors, folder / "model.safetensors")
        return folder

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """`tokens` are all known tokens, the newest one included; greedy drafts after them."""
        hidden = self.target.model(torch.tensor([list(tokens[:-1])])).last_hidden_state
        following, out = list(tokens[1:]), []
        for _ in range(count):
            ids = torch.tensor([following])
            normed, raw = self._run(ids, hidden)
            out.append(int(self.target.lm_head(normed[0, -1]).argmax()))
            following.append(out[-1])
            feedback = normed if self.post_norm else raw
            hidden = torch.cat([hidden, feedback[:, -1:]], dim=1)
        return out

    @torch.no_grad()
    def first_draft_of_transformers(self, tokens: Sequence[int]) -> int:
        """The draft of `MtpModel.forward` itself, which places rows one position later."""
        hidden = self.target.model(torch.tensor([list(tokens[:-1])])).last_hidden_state
        positions = torch.arange(1, len(tokens))[None]
        ids = torch.tensor([list(tokens[1:])])
        return int(self.mtp(ids, hidden, None, positions, None)[0])

    def _run(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """ids [1, M], hidden [1, M, H] -> normed and raw outputs [1, M, H]."""
        layer: Any = self.mtp.layers[0]
        positions = torch.arange(ids.shape[1])[None]
        mask = torch.full((1, 1, ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
        layer.use_post_norm = False
        raw = layer(
            self.target.model.embed_tokens(ids), hidden,
            position_embeddings=self.target.model.rotary_emb(hidden, position_ids=positions),
            position_ids=positions, attention_mask=mask, cache=None,
        )  # fmt: skip
        layer.use_post_norm = True
        return layer.post_norm(raw), raw
