"""Reads the configs of draft heads, whichever project wrote the checkpoint, into one form.

Formats: SafeAILab and SpecForge (a Llama config with additional keys) and `speculators` (a Llama
config nested under transformer_layer_config).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import ModelLoadError

logger = logging.getLogger(__name__)

# The model is built before a weight file could contradict these numbers, so larger ones would use
# up all memory.
_MOST_LAYERS, _MOST_HEAD_DIM = 64, 1024
_SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("draft_vocab_size", "target_hidden_size"),
)


@dataclass(frozen=True)
class DraftHeadConfig:
    """The architecture of a draft head."""

    format: str  # "specforge" (SafeAILab too) or "speculators"
    layer: dict[str, Any]  # the raw Llama config of its decoder layers
    target_hidden_size: int
    draft_vocab_size: int
    aux_boundaries: tuple[int, ...]  # EAGLE-3: boundary b = residual stream after b layers
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_bias: bool = False
    para_norm: bool = False  # EAGLE-1 heads trained by HASS normalise both halves of their input


def read_draft_config(
    raw: dict[str, Any],
    eagle3: bool,
    target_hidden_size: int,
    num_target_layers: int,
    boundaries: tuple[int, ...] | None = None,
) -> DraftHeadConfig:
    """Read the architecture of a head from the contents `raw` of its config.json.

    `boundaries` are the auxiliary hidden states that the user chose; None reads them from the
    config. Raises ModelLoadError if the config is incomplete or does not fit the target.
    """
    nested = "transformer_layer_config" in raw
    layer = dict(_object(raw, "transformer_layer_config") if nested else raw)
    layer.setdefault("model_type", "llama")
    if layer["model_type"] != "llama":
        layer["model_type"] = "llama"  # heads for other targets are Llama layers, too
    if layer.get("vocab_size") is None or layer.get("hidden_size") is None:
        raise ModelLoadError("the drafter's config has no vocab_size or hidden_size.")
    if layer.get("num_hidden_layers") is None:
        layer["num_hidden_layers"] = 1
    _check_sizes(layer | {name: raw.get(name) or None for name in _SIZES[-2:]})
    target_hidden = raw.get("target_hidden_size") or target_hidden_size
    if target_hidden != target_hidden_size:
        raise ModelLoadError(
            f"the drafter was trained for a target of hidden size {target_hidden}, "
            f"but this one has {target_hidden_size}."
        )
    return DraftHeadConfig(
        format="speculators" if nested else "specforge",
        layer=layer,
        target_hidden_size=target_hidden,
        draft_vocab_size=raw.get("draft_vocab_size") or layer["vocab_size"],
        aux_boundaries=(
            choose_boundaries(raw, nested, num_target_layers, boundaries) if eagle3 else ()
        ),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        fc_bias=bool(raw.get("bias", raw.get("fusion_bias", False))),  # replaced by `has_bias`
        para_norm=bool(raw.get("add_para_norm", False)),
    )


def has_bias(names: Iterable[str], *layers: str) -> bool:
    """Whether the checkpoint stores a bias for one of these linear layers, in any format's names.

    Configs often omit biases that SafeAILab's code assumes, so the stored tensors decide.
    """
    endings = tuple(f"{layer}.bias" for layer in layers)
    return any(name.endswith(endings) for name in names)


def choose_boundaries(
    raw: dict[str, Any],
    speculators_format: bool,
    num_layers: int,
    chosen: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Return the boundaries of the auxiliary hidden states, ascending, and log where they are from.

    Boundary b is the residual stream after b layers, 0 to `num_layers`. Raises ModelLoadError if
    the numbers are not ascending or not in this range.

    An id in a config means either the *input* of that layer (boundary = id) or its *output*
    (boundary = id + 1). Configs of `speculators` mean inputs. SpecForge's defaults mean outputs and
    start at layer 1, which no list of inputs does, so a first id of 1 indicates outputs. A config
    with both lists (ours: vLLM reads one, SGLang the other) is unambiguous.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    at_top, below = raw.get(key), _object(raw, "eagle_config").get(key)
    ids = at_top or below
    for listed in (at_top, below):
        if listed and not (isinstance(listed, list) and all(type(i) is int for i in listed)):
            raise ModelLoadError(
                f"the drafter's {key} is {_short(listed)}, but must be a list of layer numbers."
            )
    has_both = bool(at_top and below) and [i - 1 for i in at_top or ()] == list(below or ())
    if chosen is not None:
        found, reason = tuple(chosen), "set by the user"
    elif ids is None:
        found, reason = (2, num_layers // 2, num_layers - 3), "the default: the config names none"
    elif not speculators_format and not has_both and ids[0] == 1:
        found, reason = tuple(i + 1 for i in ids), f"outputs of layers {ids}"
    else:
        found, reason = tuple(ids), f"inputs of layers {ids}"
    if not found or list(found) != sorted(set(found)) or found[0] < 0 or found[-1] > num_layers:
        raise ModelLoadError(
            f"EAGLE-3's auxiliary hidden states have boundaries {list(found)} ({reason}), which "
            f"must be ascending numbers from 0 to {num_layers}; set aux_hidden_state_boundaries."
        )
    level = logging.WARNING if chosen is None and ids is None else logging.INFO
    message = "EAGLE-3 reads auxiliary hidden states after %s layers (%s)"
    logger.log(level, message, list(found), reason)
    return found


def _check_sizes(layer: dict[str, Any]) -> None:
    for name in _SIZES:
        size = layer.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ModelLoadError(
                f"the drafter's {name} is {_short(size)}, but must be a positive integer."
            )
    heads = layer.get("num_attention_heads") or 1
    head_dim = layer.get("head_dim") or layer["hidden_size"] // heads
    if layer["num_hidden_layers"] > _MOST_LAYERS or head_dim > _MOST_HEAD_DIM:
        raise ModelLoadError(
            f"the drafter has {layer['num_hidden_layers']} layers and heads of size {head_dim}; "
            f"at most {_MOST_LAYERS} and {_MOST_HEAD_DIM} are supported."
        )


def _object(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """The JSON object `key`, empty if there is none; raises ModelLoadError for other values."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"the drafter's {key} is {_short(value)}, but must be a JSON object.")
    return value


def _short(value: object) -> str:
    return f"{value!r:.60}"
