"""A tiny Qwen3.5 or Qwen3-Next with its MTP module in one checkpoint, and drafts without a cache.

Target and block are transformers' own; only the module around the block is written here. Target
and module mostly follow the newest token, so that some drafts are right and some are wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen_next

from .tiny_engine import VOCAB

SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
EXPERTS = dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)  # fmt: skip
MODELING: dict[str, Any] = {"Qwen3_5": qwen, "Qwen3_5Moe": qwen_moe, "Qwen3Next": qwen_next}


class QwenOracle:
    """Builds target and module and saves them in `folder`; `noise` is what drafts get wrong."""

    def __init__(self, folder: Path, family: str = "Qwen3_5", noise: float = 0.08) -> None:
        torch.manual_seed(3)
        modeling = MODELING[family]
        settings = SHAPE if family == "Qwen3_5" else SHAPE | EXPERTS
        text = "" if family == "Qwen3Next" else "Text"
        config = getattr(transformers, f"{family}{text}Config")(**settings)
        config._attn_implementation = "eager"
        self.target: Any = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        _fill(self.target, noise)
        whole = copy.deepcopy(config)
        whole.layer_types = ["full_attention"]
        norm = getattr(modeling, f"{family}RMSNorm")
        size = config.hidden_size
        self.module: Any = torch.nn.ModuleDict(
            {
                "layers": torch.nn.ModuleList(
                    [getattr(modeling, f"{family}DecoderLayer")(whole, 0)]
                ),
                "fc": torch.nn.Linear(2 * size, size, bias=False),
                "pre_fc_norm_embedding": norm(size),
                "pre_fc_norm_hidden": norm(size),
                "norm": norm(size),
            }
        ).eval()
        _fill(self.module, noise)
        with torch.no_grad():
            self.module["fc"].weight.mul_(0.3)
            self.module["fc"].weight[:, :size].add_(torch.eye(size))
        self.post_norm, self.is_next = True, family == "Qwen3Next"
        self.target.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors |= {f"mtp.{n}": t.contiguous() for n, t in self.module.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """`tokens` are all known tokens, the newest one included; greedy drafts after them."""
        stream: list[Tensor] = []
        norm = self.target.model.norm
        hook = norm.register_forward_pre_hook(lambda _, args: stream.append(args[0]))
        hidden = self.target.model(torch.tensor([list(tokens[:-1])])).last_hidden_state
        hook.remove()
        if not self.post_norm:
            hidden = stream[0]
        following, out = list(tokens[1:]), []
        for _ in range(count):
            normed, raw = self._run(torch.tensor([following]), hidden)
            out.append(int(self.target.lm_head(normed[0, -1]).argmax()))
            following.append(out[-1])
            feedback = normed if self.post_norm else raw
            hidden = torch.cat([hidden, feedback[:, -1:]], dim=1)
        return out

    def _run(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """ids [1, M], hidden [1, M, H] -> normed and raw outputs [1, M, H]."""
        part, length = self.module, ids.shape[1]
        embedded = part["pre_fc_norm_embedding"](self.target.model.embed_tokens(ids))
        x = part["fc"](torch.cat([embedded, part["pre_fc_norm_hidden"](hidden)], dim=-1))
        positions = torch.arange(length)[None]
        if not self.is_next:
            positions = positions.expand(3, 1, -1)
        raw = part["layers"][0](
            x,
            position_embeddings=self.target.model.rotary_emb(x, positions),
            attention_mask=torch.full((1, 1, length, length), float("-inf")).triu(1),
        )
        return part["norm"](raw), raw


@torch.no_grad()
def _fill(module: Any, noise: float) -> None:
    """Random weights, of which the embeddings weigh most, and states that remember."""
    for name, tensor in module.named_parameters():
        if "norm" in name or "dt_bias" in name:
            tensor.copy_(torch.randn_like(tensor) * 0.1 + ("linear_attn.norm" in name))
        elif "A_log" in name:
            tensor.copy_(torch.randn_like(tensor) - 3)
        else:
            large = "embed_tokens" in name or "lm_head" in name
            tensor.copy_(torch.randn_like(tensor) * (1.0 if large else noise))
