"""The scales of keys and values that some checkpoints hold for an fp8 KV cache.

Each layer has one number for keys and one for values; a stored value is the value / its scale. The
names differ by the tool that wrote the file:

- `self_attn.k_scale`, `self_attn.v_scale` (compressed-tensors, with a `kv_cache_scheme`),
- `self_attn.attn.k_scale`, `self_attn.attn.v_scale`,
- `self_attn.k_proj.k_scale`, `self_attn.v_proj.v_scale` (ModelOpt),
- `self_attn.k_proj.output_scale`, `self_attn.v_proj.output_scale` (older compressed-tensors),
- `self_attn.kv_scale` (older fp8 files): one number for both.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...configs.model.quantisation import MODELOPT_FILE
from ..errors import ModelLoadError

logger = logging.getLogger(__name__)
_NAME = re.compile(
    r"^(?:model\.|language_model\.)*layers\.(?P<layer>\d+)\.(?:self_attn|attention|attn)\.(?:\w+\.)?"
    r"(?P<kind>k|v|kv)_scale$"
    r"|^(?:model\.|language_model\.)*layers\.(?P<old>\d+)\.self_attn\."
    r"(?P<part>k|v)_proj\.output_scale$"
)


def read_kv_scales(
    folder: Path, files: Mapping[str, str], hf_config: Any, num_layers: int
) -> dict[int, tuple[float, float]]:
    """The scales of keys and values by layer, of the layers that have any.

    `files` maps the stored names of scales to file names; those of queries and of attention's
    weights, which some files have as well, are left out. Layers from `num_layers` on belong to a
    drafter and are left out. Raises ModelLoadError for scales that are not one positive number.
    """
    other = _other_format(folder, hf_config)
    if other is not None:
        if files:
            logger.warning(
                "the KV-cache scales of %s are for %s, not for fp8: scale 1 is used", folder, other
            )
        return {}
    parts: dict[str, tuple[int, str]] = {}  # stored name -> (layer, "k", "v" or "kv")
    for name in files:
        if match := _NAME.match(name):
            kind, layer = match["kind"] or match["part"], int(match["layer"] or match["old"])
            if layer < num_layers:
                parts[name] = layer, kind
    found: dict[int, dict[str, float]] = {}
    for name, scale in _numbers(folder, {name: files[name] for name in parts}):
        layer, kind = parts[name]
        found.setdefault(layer, {}).update(dict.fromkeys(kind, scale))
    return {layer: (one.get("k", 1.0), one.get("v", 1.0)) for layer, one in found.items()}


def note_unused(folder: Path, names: Iterable[str]) -> None:
    """Log that the checkpoint's scales are not used, if it has any."""
    if any(_NAME.match(name) for name in names):
        logger.info(
            "%s has scales for an fp8 KV cache; they are not used with --kv-cache-dtype auto",
            folder,
        )


def _numbers(folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of stored tensors, file by file; `files`: name -> file name."""
    for file in sorted(set(files.values())):
        names = [name for name in files if files[name] == file]
        try:
            with safe_open(folder / file, framework="pt") as opened:
                tensors = [opened.get_tensor(name) for name in names]
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{folder / file} cannot be read: {error}.") from error
        for name, tensor in zip(names, tensors, strict=True):
            yield name, _number(tensor, name, folder / file)


def _number(tensor: Tensor, name: str, path: Path) -> float:
    if tensor.numel() != 1:
        raise ModelLoadError(
            f"tensor {name} of {path} has shape {list(tensor.shape)}: the KV cache supports one "
            "scale per layer for keys and one for values (--kv-cache-dtype auto uses none)."
        )
    scale = float(tensor.float())
    if not (math.isfinite(scale) and scale > 0):
        raise ModelLoadError(
            f"tensor {name} of {path} is {scale}, but a scale of the KV cache must be positive "
            "(--kv-cache-dtype auto uses none)."
        )
    return scale


def _other_format(folder: Path, hf_config: Any) -> str | None:
    """The format that the configs name for the KV cache, if it is not per-tensor fp8."""
    nested = getattr(hf_config, "text_config", None)
    settings = getattr(hf_config, "quantization_config", None) or {}
    settings = settings or getattr(nested, "quantization_config", None) or {}
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    scheme = settings.get("kv_cache_scheme")  # compressed-tensors, and ModelOpt in config.json
    if isinstance(scheme, dict):
        bits, kind = scheme.get("num_bits", 8), scheme.get("type", "float")
        return None if (bits, kind) == (8, "float") else f"{bits}-bit {kind}"
    for place in (settings, _model_opt(folder)):
        name = place.get("kv_cache_quant_algo")
        if isinstance(name, str) and "fp8" not in name.lower():
            return name
    return None


def _model_opt(folder: Path) -> dict[str, Any]:
    """What ModelOpt's own file says of quantisation; empty if there is none that can be read."""
    try:
        content = json.loads((folder / MODELOPT_FILE).read_text())
        return dict(content["quantization"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}
