"""DeepSeek V4's MTP module in NumPy, from its formulas; the target is transformers'.

transformers has no module of this kind. Nothing here is shared with the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from ..runner.tiny_v4 import make_v4

Array = NDArray[np.float64]


def rms(x: Array, weight: Array | float = 1.0, eps: float = 1e-6) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class V4MtpOracle:
    """Makes a target with a random module, saves both, and drafts without a cache."""

    def __init__(self, folder: Path, spread: float = 0.3, **changes: Any) -> None:
        self.target = make_v4(folder, spread=spread, **changes)
        self.config = c = self.target.config
        hidden, heads, dim, count = c.hidden_size, c.num_attention_heads, c.head_dim, c.hc_mult
        rng = np.random.default_rng(5)
        sites = count * (2 + count)
        shapes: dict[str, tuple[int, ...]] = {
            "e_proj.weight": (hidden, hidden), "h_proj.weight": (hidden, hidden),
            "attn.wq_a.weight": (c.q_lora_rank, hidden),
            "attn.wq_b.weight": (heads * dim, c.q_lora_rank),
            "attn.wkv.weight": (dim, hidden), "attn.attn_sink": (heads,),
            "attn.wo_a.weight": (c.o_groups * c.o_lora_rank, heads * dim // c.o_groups),
            "attn.wo_b.weight": (hidden, c.o_groups * c.o_lora_rank),
            "ffn.gate.weight": (c.n_routed_experts, hidden), "ffn.gate.bias": (c.n_routed_experts,),
            "hc_head_fn": (count, count * hidden), "hc_head_base": (count,), "hc_head_scale": (1,),
        }  # fmt: skip
        for site in ("hc_attn", "hc_ffn"):
            shapes |= {f"{site}_fn": (sites, count * hidden), f"{site}_base": (sites,)}
            shapes |= {f"{site}_scale": (3,)}
        names = [f"experts.{e}" for e in range(c.n_routed_experts)]
        for name in (*names, "shared_experts"):
            shapes |= {f"ffn.{name}.{w}.weight": (16, hidden) for w in ("w1", "w3")}
            shapes |= {f"ffn.{name}.w2.weight": (hidden, 16)}
        weights = {name: rng.normal(0, spread, shape) for name, shape in shapes.items()}
        norms = {"enorm": hidden, "hnorm": hidden, "norm": hidden, "attn_norm": hidden}
        norms |= {"ffn_norm": hidden, "attn.q_norm": c.q_lora_rank, "attn.kv_norm": dim}
        weights |= {f"{n}.weight": rng.uniform(0.5, 1.5, size) for n, size in norms.items()}
        self.w = {n: w.astype(np.float32).astype(np.float64) for n, w in weights.items()}
        tensors = load_file(folder / "model.safetensors")
        own = {f"mtp.0.{n}": torch.from_numpy(w).float() for n, w in self.w.items()}
        save_file(tensors | own, folder / "model.safetensors", {"format": "pt"})
        state = self.target.state_dict()
        self.embeddings = state["model.embed_tokens.weight"].double().numpy()
        self.head = state["lm_head.weight"].double().numpy()

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """`tokens` are all known tokens, the newest one included; greedy drafts after them."""
        streams = self._target_streams(tokens[:-1])
        following, out = list(tokens[1:]), []
        for _ in range(count):
            fed_back = self.block(following, streams)
            logits = self.head @ rms(self._head_mix(fed_back[-1:]), self.w["norm.weight"])[0]
            out.append(int(logits.argmax()))
            following.append(out[-1])
            streams = np.concatenate([streams, fed_back[-1:]])
        return out

    def _target_streams(self, tokens: Sequence[int]) -> Array:
        """The streams before the target's head mixes them, [M, n, H]."""
        seen: list[torch.Tensor] = []
        head = self.target.model.hc_head
        hook = head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        with torch.no_grad():
            self.target(torch.tensor([list(tokens)]))
        hook.remove()
        streams: Array = seen[0][0].double().numpy()
        return streams

    def block(self, ids: Sequence[int], streams: Array) -> Array:
        """ids [M] one token later than streams [M, n, H] -> the block's streams."""
        embedded = self.embeddings[list(ids)].copy()
        embedded[0] = 0.0
        token = rms(embedded, self.w["enorm.weight"]) @ self.w["e_proj.weight"].T
        x = rms(streams, self.w["hnorm.weight"]) @ self.w["h_proj.weight"].T + token[:, None]
        for site, layer in (("attn", self._attention), ("ffn", self._experts)):
            pre, post, comb = self._mix(x, f"hc_{site}")
            mixed = np.einsum("mi,mid->md", pre, x)
            y = layer(rms(mixed, self.w[f"{site}_norm.weight"]))
            x = post[..., None] * y[:, None] + np.einsum("mjk,mjd->mkd", comb, x)
        return x

    def _mix(self, x: Array, site: str) -> tuple[Array, Array, Array]:
        n, eps = self.config.hc_mult, self.config.hc_eps
        flat = x.reshape(len(x), -1)
        m = rms(flat) @ self.w[f"{site}_fn"].T
        base, scale = self.w[f"{site}_base"], self.w[f"{site}_scale"]
        pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = softmax((m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + eps
        comb /= comb.sum(1, keepdims=True) + eps
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb /= comb.sum(2, keepdims=True) + eps
            comb /= comb.sum(1, keepdims=True) + eps
        return pre, post, comb

    def _head_mix(self, x: Array) -> Array:
        m = rms(x.reshape(len(x), -1)) @ self.w["hc_head_fn"].T
        pre = sigmoid(m * self.w["hc_head_scale"] + self.w["hc_head_base"]) + self.config.hc_eps
        out: Array = np.einsum("mi,mid->md", pre, x)
        return out

    def _rotated(self, x: Array, sign: int = 1) -> Array:
        """x [M, heads, D], turned by its row number in the last rot_dim values."""
        rot = self.config.qk_rope_head_dim
        theta = self.config.rope_parameters["main"]["rope_theta"]
        angle = np.arange(len(x))[:, None, None] * theta ** -(np.arange(0, rot, 2) / rot) * sign
        out, start = x.copy(), x.shape[-1] - rot
        even, odd = x[..., start::2], x[..., start + 1 :: 2]
        out[..., start::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., start + 1 :: 2] = odd * np.cos(angle) + even * np.sin(angle)
        return out

    def _attention(self, x: Array) -> Array:
        c, w = self.config, {n.removeprefix("attn."): v for n, v in self.w.items()}
        rows, heads, dim = len(x), c.num_attention_heads, c.head_dim
        low = rms(x @ w["wq_a.weight"].T, w["q_norm.weight"])
        q = self._rotated(rms((low @ w["wq_b.weight"].T).reshape(rows, heads, dim)))
        kv = rms(x @ w["wkv.weight"].T, w["kv_norm.weight"])
        kv = self._rotated(kv[:, None])[:, 0]
        scores = np.einsum("mhd,sd->mhs", q, kv) * dim**-0.5
        ago = np.arange(rows)[:, None] - np.arange(rows)[None]
        scores[
            np.broadcast_to(((ago < 0) | (ago >= c.sliding_window))[:, None], scores.shape)
        ] = -np.inf
        sinks = np.broadcast_to(w["attn_sink"][None, :, None], (rows, heads, 1))
        shares = softmax(np.concatenate([scores, sinks], -1))[..., :-1]
        out = self._rotated(np.einsum("mhs,sd->mhd", shares, kv), -1)
        groups = out.reshape(rows, c.o_groups, -1)
        wo_a = w["wo_a.weight"].reshape(c.o_groups, c.o_lora_rank, -1)
        low = np.einsum("mgi,gri->mgr", groups, wo_a).reshape(rows, -1)
        result: Array = low @ w["wo_b.weight"].T
        return result

    def _experts(self, x: Array) -> Array:
        c, w = self.config, {n.removeprefix("ffn."): v for n, v in self.w.items()}
        scores = np.sqrt(np.log1p(np.exp(x @ w["gate.weight"].T)))
        chosen = (-(scores + w["gate.bias"])).argsort(-1)[:, : c.num_experts_per_tok]
        out = self._expert(x, "shared_experts", w)
        for row, experts in enumerate(chosen):
            total = scores[row, experts].sum()
            for expert in experts:
                share = scores[row, expert] / total * c.routed_scaling_factor
                out[row] += share * self._expert(x[row], f"experts.{expert}", w)
        return out

    def _expert(self, x: Array, name: str, w: dict[str, Array]) -> Array:
        limit = self.config.swiglu_limit
        gate = np.minimum(x @ w[f"{name}.w1.weight"].T, limit)
        up = np.clip(x @ w[f"{name}.w3.weight"].T, -limit, limit)
        result: Array = (gate * sigmoid(gate) * up) @ w[f"{name}.w2.weight"].T
        return result
