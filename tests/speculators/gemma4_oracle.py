"""A tiny Gemma 4 with its assistant, both transformers' own; drafts recomputed without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, WINDOW = 64, 8
TARGET = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
    max_position_embeddings=128, sliding_window=WINDOW, num_kv_shared_layers=3,
    layer_types=["sliding_attention", "full_attention"] * 3, final_logit_softcapping=30.0,
    vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
    eos_token_id=None, bos_token_id=None, pad_token_id=0,
)  # fmt: skip
# transformers' mask lets a sliding layer of the assistant see window + 1 keys
ASSISTANT = TARGET | dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_kv_shared_layers=4,
    layer_types=["sliding_attention"] * 3 + ["full_attention"], sliding_window=WINDOW - 1,
    vocab_size_per_layer_input=0, hidden_size_per_layer_input=0, final_logit_softcapping=None,
)  # fmt: skip


def _randomise(model: Any) -> None:
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or "scalar" in name:
                tensor.copy_(torch.rand_like(tensor) * 0.8 + 0.6)
            elif not any(part in name for part in ("inv_freq", "embed_scale", "ordering")):
                tensor.copy_(torch.randn_like(tensor) * 0.3)


class AssistantOracle:
    """Saves target and assistant; `folder` gets two folders."""

    def __init__(
        self,
        folder: Path,
        ordered: bool = False,
        seed: int = 1,
        vocab_size: int = VOCAB,
        **both: Any,
    ) -> None:
        torch.manual_seed(seed)
        both |= {"vocab_size": vocab_size}
        own = {"vocab_size_per_layer_input": vocab_size}
        target = transformers.Gemma4TextConfig(**{**TARGET, **both, **own})
        text = transformers.Gemma4TextConfig(**{**ASSISTANT, **both})
        assistant = transformers.Gemma4AssistantConfig(
            text_config=text, backbone_hidden_size=48, use_ordered_embeddings=ordered,
            num_centroids=8, centroid_intermediate_top_k=3,
        )  # fmt: skip
        target._attn_implementation = "eager"
        assistant._attn_implementation = "eager"
        self.target = transformers.Gemma4ForCausalLM(target).eval()
        self.assistant = transformers.Gemma4AssistantForCausalLM(assistant).eval()
        _randomise(self.target)
        _randomise(self.assistant)
        if ordered:
            self.assistant.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size))
        self.target_folder, self.folder = folder / "target", folder / "assistant"
        self.target.save_pretrained(self.target_folder)
        self.assistant.save_pretrained(self.folder)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int, offset: int) -> list[int]:
        """Greedy drafts after `tokens`; with `offset` 1 the queries have transformers'
        positions."""
        known = torch.tensor([list(tokens[:-1])])
        out = self.target.model(known, return_shared_kv_states=True, use_cache=False)
        hidden = out.last_hidden_state[:, -1:]
        position = torch.tensor([[len(tokens) - 2 + offset]])
        drafts, token = [], torch.tensor([[tokens[-1]]])
        for _ in range(count):
            embedding = self.target.get_input_embeddings()(token)
            step = self.assistant(
                inputs_embeds=torch.cat([embedding, hidden], dim=-1), position_ids=position,
                shared_kv_states=out.shared_kv_states, attention_mask=None,
            )  # fmt: skip
            token, hidden = step.logits.argmax(-1), step.last_hidden_state
            drafts.append(int(token))
        return drafts
