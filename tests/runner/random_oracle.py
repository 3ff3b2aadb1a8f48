"""Tiny random models of transformers, which ours must equal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


def random_oracle(
    family: str,
    settings: Mapping[str, Any],
    folder: Path | None = None,
    config: str = "Config",
    seed: int = 1,
) -> Any:
    """A causal language model of this family and size; see `randomised`.

    `config` ends the name of the family's class of configurations.
    """
    torch.manual_seed(seed)
    size = getattr(transformers, f"{family}{config}")(**settings)
    size._attn_implementation = "eager"
    return randomised(getattr(transformers, f"{family}ForCausalLM")(size), folder)


def randomised(oracle: Any, folder: Path | None = None) -> Any:
    """Change every weight, as some begin as zeros or ones, and save the model to `folder`."""
    with torch.no_grad():
        for name, tensor in (*oracle.named_parameters(), *oracle.named_buffers()):
            if "inv_freq" not in name and "embed_scale" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
                tensor.copy_(tensor.half())  # a CPU keeps these weights as fp16
    if folder is not None:
        oracle.save_pretrained(folder)
    return oracle.eval()
