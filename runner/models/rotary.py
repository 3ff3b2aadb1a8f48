"""Rotary position embedding: inverse frequencies for every scaling rule, and a step's rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.device import use_triton
from ...kernels.linear.norm_rope import apply_rotary, rotary_embedding, rotary_factors
from ...kernels.linear.rotation import Rotation
from ..errors import ModelLoadError


def rope_parameters(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """Normalise the rope settings of a config to one dict with `rope_type` and `rope_theta`.

    Reads `rope_parameters`, which may be split by layer type, or the older `rope_theta` and
    `rope_scaling`, with `type` or `rope_type`.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if layer_type is not None and isinstance(parameters.get(layer_type), dict):
        parameters = dict(parameters[layer_type])
    if not parameters:
        parameters = dict(getattr(config, "rope_scaling", None) or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = getattr(config, "rope_theta", None) or 10000.0
    for name in ("original_max_position_embeddings", "max_position_embeddings"):
        value = getattr(config, name, None)
        if value is not None:
            parameters.setdefault("original_max_position_embeddings", value)
    parameters.setdefault("max_position_embeddings", getattr(config, "max_position_embeddings", 0))
    return parameters


def inverse_frequencies(parameters: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """Return ([rot_dim / 2] fp32 frequencies, factor on cos and sin) for heads of size `dim`.

    `parameters` are those of `rope_parameters`. Raises ModelLoadError for unknown scaling rules.
    """
    kind = parameters["rope_type"]
    theta = float(parameters["rope_theta"])
    partial = parameters.get("partial_rotary_factor")
    partial = 1.0 if partial is None else float(partial)
    if kind == "proportional":
        # the exponent runs over the whole head; dimensions that do not rotate have frequency 0
        rotating = int(partial * dim // 2)
        frequencies = torch.zeros(dim // 2)
        frequencies[:rotating] = _frequencies(theta, 2 * rotating, dim)
        return frequencies / float(parameters.get("factor", 1.0)), 1.0
    dim = int(dim * partial)
    frequencies = _frequencies(theta, dim, dim)
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / float(parameters["factor"]), 1.0
    if kind == "llama3":
        return _llama3(frequencies, parameters), 1.0
    if kind == "yarn":
        return _yarn(frequencies, parameters, theta, dim)
    if kind == "longrope":
        return _longrope(frequencies, parameters)
    if kind == "divisors":  # GGUF stores llama3 scaling as one divisor per frequency
        return frequencies / torch.tensor(parameters["divisors"], dtype=torch.float32), 1.0
    raise ModelLoadError(
        f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn, "
        "longrope, proportional."
    )


def _frequencies(theta: float, rot_dim: int, dim: int) -> Tensor:
    exponents = torch.arange(0, rot_dim, 2, dtype=torch.int64).float() / dim
    frequencies: Tensor = torch.pow(theta, -exponents)
    return frequencies


def _llama3(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Llama 3's scaling: long waves are stretched by `factor`, short ones kept, others blended."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0 = stretched, 1 = kept
    scaled: Tensor = (1 - blend) * frequencies / factor + blend * frequencies
    return scaled


def _yarn(
    frequencies: Tensor, parameters: dict[str, Any], theta: float, dim: int
) -> tuple[Tensor, float]:
    """YaRN's scaling (arXiv 2309.00071): blended by the number of turns in the original context."""
    original = parameters["original_max_position_embeddings"]
    factor = yarn_factor(parameters)

    def dim_with_turns(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dim_with_turns(float(parameters.get("beta_fast") or 32))
    high = dim_with_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    scaled = frequencies / factor * stretch + frequencies * (1 - stretch)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        else:
            attention_factor = yarn_mscale(factor)
    return scaled, float(attention_factor)


def _longrope(frequencies: Tensor, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """LongRoPE's scaling (arXiv 2402.13753): one divisor per frequency, from the long list if the
    server allows contexts beyond the original length, else from the short one.

    All positions must use the same list, because cached keys are not rotated again.
    """
    original = parameters["original_max_position_embeddings"]
    longest = parameters["max_position_embeddings"]
    is_long = parameters.get("served_positions", longest) > original
    divisors = parameters["long_factor" if is_long else "short_factor"]
    factor = parameters.get("factor") or longest / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
        attention_factor = attention_factor if factor > 1 else 1.0
    return frequencies / torch.tensor(divisors, dtype=torch.float32), float(attention_factor)


def yarn_factor(parameters: dict[str, Any]) -> float:
    """YaRN's scaling factor. If a config has none, it is the ratio of the two context lengths."""
    if parameters.get("factor") is not None:
        return float(parameters["factor"])
    ratio = parameters["max_position_embeddings"] / parameters["original_max_position_embeddings"]
    return float(ratio)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RotaryStep(Rotation):
    """The rotation of one step's tokens, computed once and used by every layer."""

    cos: Tensor | None = None  # [M, 1, rot_dim]; None if a kernel reads cos_sin_cache itself
    sin: Tensor | None = None  # [M, 1, rot_dim], signed

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x [M, heads, head_dim]."""
        if self.cos is not None and self.sin is not None:
            return apply_rotary(x, self.cos, self.sin, self.interleaved)
        return rotary_embedding(x, None, self)[0]


class RotaryEmbedding(nn.Module):
    """A table of cos and sin for every position."""

    cos_sin_cache: Tensor

    def __init__(
        self,
        parameters: dict[str, Any],
        head_dim: int,
        max_position: int,
        device: torch.device,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        parameters = {**parameters, "served_positions": max_position}
        frequencies, factor = inverse_frequencies(parameters, head_dim)
        if device.type == "meta":
            # Its values are never read, and computing them would import torch's compiler for
            # seconds.
            table = torch.empty(max_position, 2 * len(frequencies), device=device)
        else:
            every = torch.arange(max_position, dtype=torch.float32)
            angles = torch.outer(every, frequencies)
            table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
        self.register_buffer("cos_sin_cache", table.to(device), persistent=False)
        self.interleaved = interleaved

    def at(self, positions: Tensor) -> RotaryStep:
        """The rotation of tokens at `positions` [M] int64."""
        cos = sin = None
        if not use_triton(positions):
            cos, sin = rotary_factors(positions, self.cos_sin_cache, self.interleaved)
        return RotaryStep(positions, self.cos_sin_cache, self.interleaved, cos=cos, sin=sin)
