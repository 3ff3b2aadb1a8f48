"""A tiny target and an EAGLE-3 head that was really trained on its greedy texts, in seconds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from ..eagle_oracle import HeadOracle, Weights, head_weights, norm, save_head
from ..tiny_engine import save_llama

V, LAYERS, NUM_DRAFTED = 24, 8, 18
BOUNDARIES = (2, 4, 5)  # EAGLE-3's usual ones for eight layers
REPLY, STEPS = 24, 90


def prompts(count: int, seed: int) -> list[list[int]]:
    """Random prompts of six tokens."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, V, (count, 6), generator=draw).tolist()


@torch.no_grad()
def texts_of(model: Any, starts: Sequence[Sequence[int]]) -> Tensor:
    """Prompts of equal length and the model's greedy replies, [texts, tokens]."""
    tokens = torch.tensor(starts)
    for _ in range(REPLY):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens


class Trained:
    """A pair: `weights` are the head's, `folder` holds the target's and the heads' checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = save_llama(folder / "target", layers=LAYERS, std=0.25, vocab_size=V)
        model: Any = LlamaForCausalLM.from_pretrained(self.target).eval()
        texts = texts_of(model, prompts(24, 0))
        self.counts = Counter(texts[:, 6:].flatten().tolist())
        ids = sorted(token for token, _ in self.counts.most_common(NUM_DRAFTED))
        ids += [token for token in range(V) if token not in ids][: NUM_DRAFTED - len(ids)]
        fresh = head_weights(eagle3=True, vocab_size=V, draft_vocab_size=NUM_DRAFTED)
        self.weights = with_ids({k: uneven(w) for k, w in fresh.items()}, sorted(ids))
        self.losses = self._train(model, texts)

    def _train(self, model: Any, texts: Tensor) -> list[float]:
        with torch.no_grad():
            states = model(texts, output_hidden_states=True).hidden_states
        features = torch.cat([states[b] for b in BOUNDARIES], dim=-1)
        oracle = HeadOracle(self.target, self.weights, eagle3=True, taps=BOUNDARIES)
        place = {int(token): i for i, token in enumerate(ids_of(self.weights))}
        wanted = torch.tensor([[place.get(t, -100) for t in text] for text in texts.tolist()])
        trained = [w for w in self.weights.values() if w.is_floating_point()]
        for weight in trained:
            weight.requires_grad_()
        optimizer = torch.optim.Adam(trained, lr=0.01)
        losses = []
        stream_of = torch.vmap(oracle._stream)
        for _ in range(STEPS):
            hidden = features[:, :-2] @ self.weights["fc.weight"].T
            stream = stream_of(oracle.table[texts[:, 1:-1]], hidden)
            logits = norm(stream, self.weights["norm.weight"]) @ self.weights["lm_head.weight"].T
            loss = F.cross_entropy(logits[:, 4:].flatten(0, 1), wanted[:, 6:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        for weight in trained:
            weight.requires_grad_(False)
        return losses

    def head(self, name: str, weights: Weights | None = None, **config: object) -> Path:
        """The checkpoint of the head, or of one with other weights or another config."""
        options: dict[str, Any] = {
            "vocab_size": V, "draft_vocab_size": NUM_DRAFTED,
            "eagle_aux_hidden_state_layer_ids": list(BOUNDARIES), **config,
        }  # fmt: skip
        return save_head(self.folder / name, weights or self.weights, True, **options)

    def target_config(self) -> dict[str, Any]:
        """The target's config.json."""
        found: dict[str, Any] = json.loads((self.target / "config.json").read_text())
        return found


def uneven(weight: Tensor) -> Tensor:
    """A matrix with rows and columns of different size, as long training leaves them."""
    if weight.ndim != 2:
        return weight
    draw = torch.Generator().manual_seed(weight.numel())
    rows, columns = (torch.randn(n, generator=draw) * 0.4 for n in weight.shape)
    return weight * rows.exp()[:, None] * columns.exp()


def ids_of(weights: Weights) -> Tensor:
    """The target's tokens that the head can draft."""
    return weights["d2t"] + torch.arange(len(weights["d2t"]))


def with_ids(weights: Weights, ids: Sequence[int]) -> Weights:
    """The same weights for other tokens."""
    mask = torch.zeros(V, dtype=torch.bool)
    mask[torch.tensor(ids)] = True
    return {**weights, "d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": mask}
