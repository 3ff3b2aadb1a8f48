"""The text part of Mistral 3 (Mistral Small 3.1, Ministral 3), whose queries grow with positions.

A query at position p is multiplied by 1 + beta * log(1 + floor(p / original length)), which is 1
within the original context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gemma3 import text_name
from ..layers import WeightFormat
from ..llama import LlamaModel
from ..rotary import rope_parameters


def query_scales(config: Any, max_position: int) -> Tensor | None:
    """The factors of queries by position, [max_position] float32; None if all are 1."""
    rope = rope_parameters(config)
    beta, original = rope.get("llama_4_scaling_beta"), rope["original_max_position_embeddings"]
    if not beta or max_position <= original:
        return None
    positions = torch.arange(max_position, dtype=torch.float32)
    return 1 + float(beta) * torch.log(1 + torch.floor(positions / original))


class Mistral3Model(LlamaModel):
    """The whole text model. It skips the tensors of the checkpoint's vision part."""

    def __init__(
        self, config: Any, fmt: WeightFormat, max_position: int, layer_id_offset: int = 0
    ) -> None:
        super().__init__(config, fmt, max_position, layer_id_offset)
        scales = query_scales(config, max_position)
        if scales is None:
            return
        self.decoder = None  # the native code does not scale queries
        table = scales.to(fmt.device)
        for block in self.blocks:
            block.self_attn.query_scales = table

    def checkpoint_name(self, name: str) -> str | None:
        text = text_name(name)
        return None if text is None else super().checkpoint_name(text)
