"""Plain EAGLE heads: tiny checkpoints, and drafts recomputed without a cache.

They follow the papers over whole sequences in plain torch, one matrix at a time, and use nothing
of the package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

H, INNER, HEADS, KV_HEADS, D, EPS, THETA = 32, 48, 4, 2, 8, 1e-6, 10000.0
DRAFT_VOCAB, VOCAB = 24, 61
Weights = dict[str, Tensor]


def head_weights(
    eagle3: bool,
    seed: int = 1,
    width: int = H,
    vocab_size: int = VOCAB,
    draft_vocab_size: int = DRAFT_VOCAB,
) -> Weights:
    """Random weights under SafeAILab's names; EAGLE-3 with a draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    layer = "midlayer." if eagle3 else "layers.0."
    wide = 2 * width if eagle3 else width
    weights = {
        f"{layer}self_attn.q_proj.weight": normal(HEADS * D, wide),
        f"{layer}self_attn.k_proj.weight": normal(KV_HEADS * D, wide),
        f"{layer}self_attn.v_proj.weight": normal(KV_HEADS * D, wide),
        f"{layer}self_attn.o_proj.weight": normal(width, HEADS * D),
        f"{layer}mlp.gate_proj.weight": normal(INNER, width),
        f"{layer}mlp.up_proj.weight": normal(INNER, width),
        f"{layer}mlp.down_proj.weight": normal(width, INNER),
        f"{layer}post_attention_layernorm.weight": 1 + normal(width),
        "fc.weight": normal(width, 3 * H if eagle3 else 2 * H),
    }
    if eagle3:
        ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        has_id = torch.zeros(vocab_size, dtype=torch.bool)
        has_id[ids] = True
        weights |= {
            "midlayer.hidden_norm.weight": 1 + normal(width),
            "midlayer.input_layernorm.weight": 1 + normal(width),
            "norm.weight": 1 + normal(width),
            "lm_head.weight": normal(draft_vocab_size, width),
            "d2t": ids - torch.arange(draft_vocab_size),
            "t2d": has_id,
        }
    return weights


def save_head(folder: Path, weights: Weights, eagle3: bool, width: int = H, **more: object) -> Path:
    """A checkpoint folder in SafeAILab's and SpecForge's form."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if eagle3 else "LlamaForCausalLM"],
        "model_type": "llama", "hidden_size": width, "intermediate_size": INNER,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": D,
        "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": EPS, "rope_theta": THETA,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "bias": False,
    }  # fmt: skip
    if eagle3:
        config["draft_vocab_size"] = DRAFT_VOCAB
    (folder / "config.json").write_text(json.dumps(config | more))
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
    )
    return folder


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """A linear layer, with its bias if there is one."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def rotate(x: Tensor) -> Tensor:
    """x: [rows, heads, D], row i at position i."""
    frequencies = THETA ** (-torch.arange(0, D, 2) / D)
    angles = torch.arange(x.shape[0])[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def layer(w: Weights, prefix: str, attention_input: Tensor, residual: Tensor) -> Tensor:
    """One Llama layer from its attention's input on; [rows, ...] -> stream [rows, width]."""
    rows = attention_input.shape[0]

    def project(name: str, heads: int) -> Tensor:
        return linear(w, f"{prefix}self_attn.{name}_proj", attention_input).view(rows, heads, D)

    q, k, v = rotate(project("q", HEADS)), rotate(project("k", KV_HEADS)), project("v", KV_HEADS)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / D**0.5
    scores += torch.full((rows, rows), float("-inf")).triu(1)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(rows, HEADS * D)
    stream = residual + out @ w[f"{prefix}self_attn.o_proj.weight"].T
    x = norm(stream, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (linear(w, f"{prefix}mlp.{name}_proj", x) for name in ("gate", "up"))
    return stream + linear(w, f"{prefix}mlp.down_proj", F.silu(gate) * up)


class HeadOracle:
    """Drafts of a head after any list of tokens, recomputed from scratch."""

    def __init__(
        self, target: Path, weights: Weights, eagle3: bool, taps: Sequence[int] = (),
        norm_before_residual: bool = False, embeddings: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.model = LlamaForCausalLM.from_pretrained(target).eval()
        self.w, self.eagle3, self.taps = weights, eagle3, taps
        self.norm_before_residual = norm_before_residual
        own = weights.get("embed_tokens.weight")
        self.table = self.model.model.embed_tokens.weight.detach() if own is None else own

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """`tokens` are all known tokens, the newest one included; greedy drafts after them."""
        states = self.model(
            torch.tensor([list(tokens[:-1])]), output_hidden_states=True
        ).hidden_states
        if self.eagle3:
            hidden = torch.cat([states[b][0] for b in self.taps], dim=-1) @ self.w["fc.weight"].T
            if "input_norm.weight" in self.w:
                taps = torch.cat([states[b][0] for b in self.taps], dim=-1)
                hidden = norm(taps, self.w["input_norm.weight"]) @ self.w["fc.weight"].T
        else:
            hidden = states[-1][0]  # transformers norms the last one
        following, out = list(tokens[1:]), []
        for _ in range(count):
            embedding = self.table[torch.tensor(following)]
            stream = self._stream(embedding, hidden)
            out.append(self._token(stream[-1]))
            following.append(out[-1])
            hidden = torch.cat([hidden, stream[-1:]])
        return out

    def _stream(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        w = self.w
        if not self.eagle3:
            x = linear(w, "fc", torch.cat([embedding, hidden], dim=-1))
            return layer(w, "layers.0.", x, x)
        normed = norm(hidden, w["midlayer.hidden_norm.weight"])
        both = torch.cat([norm(embedding, w["midlayer.input_layernorm.weight"]), normed], dim=-1)
        return layer(w, "midlayer.", both, normed if self.norm_before_residual else hidden)

    def _token(self, stream: Tensor) -> int:
        if not self.eagle3:
            return int(self.model.lm_head(stream).argmax())
        draft = int((norm(stream, self.w["norm.weight"]) @ self.w["lm_head.weight"].T).argmax())
        return draft + int(self.w["d2t"][draft])
