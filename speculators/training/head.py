"""The EAGLE-3 head in training: all positions of a batch at once, unrolled over K drafts.

Training-time test (Li et al. 2025): a chain of drafts starts at each row t, and draft k of it reads
the hidden state that the head computed for draft k - 1. It attends to the keys of true hidden
states up to row t, and to the k keys of its own chain. No draft attends to another row's chain, so
those k keys are diagonals: row t of step 1, row t of step 2, and so on.

"Taps" are the boundaries at which it reads hidden states of its target: boundary b is the residual
stream after b layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DAMPING = 0.35  # factor on the target's norm; see `start_from`


class Norm(nn.Module):
    """RMSNorm in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> [..., size] fp32."""
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide * inverse * self.weight


class Attention(nn.Module):
    """Attention with queries, keys and values computed from [embedding, hidden state]."""

    def __init__(self, geometry: HeadGeometry) -> None:
        super().__init__()
        wide, dim = 2 * geometry.hidden_size, geometry.head_dim
        self.dim, self.groups = dim, geometry.num_heads // geometry.num_kv_heads
        self.q_proj = nn.Linear(wide, geometry.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(wide, geometry.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(wide, geometry.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(geometry.num_heads * dim, geometry.hidden_size, bias=False)
        self.theta = geometry.rope_theta

    def forward(self, x: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, T, 2H] of step k = len(chain) -> [B, T, H]; appends its keys and values to `chain`.

        `chain` holds those of earlier steps, each [B, heads, T, dim]. The first entry belongs to
        the true prefix.
        """
        step = len(chain)
        query = self._rotate(self._heads(self.q_proj(x)), step)
        key = self._rotate(self._heads(self.k_proj(x)), step).repeat_interleave(self.groups, 1)
        value = self._heads(self.v_proj(x)).repeat_interleave(self.groups, 1)
        chain.append((key, value))
        query = query * self.dim**-0.5
        prefix_key, prefix_value = chain[0]
        rows = x.shape[1]
        scores = (query @ prefix_key.transpose(-1, -2)).float()  # [B, heads, T, T]
        ahead = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
        own = [(query * k).sum(-1, keepdim=True).float() for k, _ in chain[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(value.dtype)
        out = weights[..., :rows] @ prefix_value
        for index, (_, own_value) in enumerate(chain[1:]):
            out = out + weights[..., rows + index, None] * own_value
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.dim).transpose(1, 2)  # [B, heads, T, dim]

    def _rotate(self, x: Tensor, step: int) -> Tensor:
        """Rotary embedding, where row t of step k has position t + k."""
        half = self.dim // 2
        exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
        positions = torch.arange(step, step + x.shape[2], device=x.device, dtype=torch.float32)
        angles = positions[:, None] * torch.pow(self.theta, -exponents)
        cos, sin = angles.cos(), angles.sin()
        low, high = x[..., :half].float(), x[..., half:].float()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class MLP(nn.Module):
    """A SiLU-gated feed-forward layer."""

    def __init__(self, geometry: HeadGeometry) -> None:
        super().__init__()
        hidden, inner = geometry.hidden_size, geometry.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, H] -> [B, T, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, geometry: HeadGeometry) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.hidden_norm = Norm(hidden, eps)
        self.input_layernorm = Norm(hidden, eps)
        self.self_attn = Attention(geometry)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = MLP(geometry)

    def forward(
        self, embedding: Tensor, hidden: Tensor, chain: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """embedding, hidden: [B, T, H] -> the residual stream [B, T, H]."""
        both = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], dim=-1)
        stream = hidden + self.self_attn(both, chain)
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


class TrainingHead(nn.Module):
    """The whole head in fp32. Its parameters have the names of SpecForge's checkpoints."""

    def __init__(self, geometry: HeadGeometry, seed: int = 0) -> None:
        super().__init__()
        hidden = geometry.hidden_size
        self.geometry = geometry
        self.fc = nn.Linear(len(geometry.taps) * hidden, hidden, bias=False)
        self.midlayer = Layer(geometry)
        self.norm = Norm(hidden, geometry.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, geometry.draft_vocab_size, bias=False)
        self._initialise(seed)

    def unroll(self, taps: Tensor, embeddings: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yield the logits [B, T, D] of draft 0, 1, ... for chains that start at every row.

        taps [B, T, taps * H] and embeddings [B, T, H] are those of the true tokens. Row t starts
        from the target's state at position t and the embedding of token t + 1; its draft k predicts
        token t + 2 + k. Rows that read tokens after the end read zeros; their logits are invalid.
        """
        hidden = self.fc(taps)
        chain: list[tuple[Tensor, Tensor]] = []
        following = embeddings
        for _ in range(num_steps):
            following = F.pad(following[:, 1:], (0, 0, 0, 1))
            hidden = self.midlayer(following, hidden, chain)
            yield self.lm_head(self.norm(hidden))

    @torch.no_grad()
    def start_from(self, lm_head: Tensor, norm: Tensor | None) -> None:
        """Initialise from the target's output head: its rows [D, H] for the draft vocabulary, and
        the weight [H] of its final norm.

        The norm is damped, because an untrained head should not be confident.
        """
        self.lm_head.weight.copy_(lm_head)
        if norm is not None:
            self.norm.weight.copy_(norm * _DAMPING)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5 * 0.5
                module.weight.normal_(0, std, generator=generator)
        # Initially the stream is the target's highest auxiliary hidden state, and the layer adds
        # little.
        size = self.geometry.hidden_size
        self.fc.weight.mul_(0.02)
        self.fc.weight[:, -size:] += torch.eye(size)
        for module in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):
            module.weight.mul_(0.2)


NUM_TAPS = 3  # the number that other engines expect


@dataclass(frozen=True)
class HeadGeometry:
    """The shape of a head with one Llama decoder layer.

    Its width is the target's, because it shares the target's embeddings.
    """

    hidden_size: int  # H, for target and head
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # D <= V
    taps: tuple[int, ...]  # boundaries, ascending
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    def num_parameters(self) -> int:
        """The number of trained parameters: what the checkpoint stores, without the vocabulary
        maps."""
        wide, heads = 2 * self.hidden_size, self.num_heads + 2 * self.num_kv_heads
        attention = wide * heads * self.head_dim + self.num_heads * self.head_dim * self.hidden_size
        return (
            len(self.taps) * self.hidden_size * self.hidden_size
            + attention
            + 3 * self.hidden_size * self.intermediate_size
            + 4 * self.hidden_size
            + self.draft_vocab_size * self.hidden_size
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for a checkpoint's fingerprint."""
        return asdict(self)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high boundaries: the defaults of vLLM and SGLang.

    Those exist only for targets of at least 7 layers; smaller ones get other boundaries.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    low = min(1, max(num_layers - 2, 0))
    high = num_layers - 1 if num_layers >= 4 else num_layers
    return (low, (low + high) // 2, high)


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError for taps that a head cannot have."""
    rising = list(taps) == sorted(set(taps))
    if len(taps) != NUM_TAPS or not rising or taps[0] < 0 or taps[-1] > num_layers:
        raise ValueError(
            f"EAGLE-3 reads auxiliary hidden states at {NUM_TAPS} ascending boundaries within "
            f"0 .. {num_layers}, not {list(taps)}."
        )
