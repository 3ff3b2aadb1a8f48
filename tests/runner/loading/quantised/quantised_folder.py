"""Turns the matrices of a saved checkpoint into random ones of a quantised format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .stored_formats import FORMATS, tensors_of


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def quantise(
    folder: Path,
    name: str,
    pattern: str = r"_proj\.weight$",
    size: float = 0.1,
    seed: int = 0,
    config: bool = True,
) -> dict[str, Tensor]:
    """Replace the matrices whose names match by random ones of the format `name`.

    Returns all numbers by name, those of the new matrices in float32. Numbers have a deviation of
    about `size` only where the format allows it.
    """
    path, made = folder / "model.safetensors", FORMATS[name]
    stored, numbers = {}, {}
    rng = np.random.default_rng(seed)
    for key, tensor in load_file(path).items():
        numbers[key] = tensor
        if tensor.dim() != 2 or not re.search(pattern, key):
            stored[key] = tensor
            continue
        fields, values = made.write(rng, *tensor.shape)
        numbers[key] = torch.from_numpy(np.ascontiguousarray(values))
        module = key.removesuffix("weight")
        stored |= {f"{module}{leaf}": field for leaf, field in tensors_of(fields).items()}
    save_file(stored, path)
    if config:
        edit_config(folder, quantization_config=made.config)
    return numbers
