"""Another checkpoint in the shape of a running draft head, and the exchange of their contents.

Contents are copied from tensor to tensor, because graphs bake the addresses of the running ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .draft_heads import load_head
from .errors import RunnerError
from .layers import Linear

_CONSTANTS = ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
_HEAD = (
    *("aux_boundaries", "draft_vocab_size", "target_hidden_size"),
    *("norm_before_residual", "norm_before_fc", "fc_bias", "para_norm"),
)


def load_other(speculator: Any, model: str) -> nn.Module:
    """Another head in the running one's shape; RunnerError says what differs."""
    ours = speculator.model
    config = replace(speculator.config, model=model)
    layer_id = ours.attention_layers()[0].layer_id
    other: Any = load_head(config.method, config, speculator.host, layer_id)
    for name in _HEAD:
        _same(name, getattr(ours.head, name), getattr(other.head, name))
    for name in _CONSTANTS:
        _same(name, getattr(ours.config, name), getattr(other.config, name))
    shapes = [
        {name: tuple(buffer.shape) for name, buffer in _buffers(head).items()}
        for head in (ours, other)
    ]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        _same(f"shape of {name}", shapes[0].get(name), shapes[1].get(name))
    for ours_part, other_part in zip(_linears(ours), _linears(other), strict=True):
        _same(
            "shape of a projection",
            (ours_part.in_features, ours_part.out_features),
            (other_part.in_features, other_part.out_features),
        )
    return other  # type: ignore[no-any-return]


def _same(what: str, ours: object, other: object) -> None:
    if ours != other:
        raise RunnerError(
            f"the drafter does not fit into the running one's memory: its {what} is {other}, the "
            f"running one's is {ours}"
        )


def _linears(head: nn.Module) -> list[Linear]:
    return [module for module in head.modules() if isinstance(module, Linear)]


def _buffers(head: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor but the weights of projections, which may be packed."""
    packed = {id(module.weight) for module in _linears(head) if module.weight is not None}
    return {name: b for name, b in head.named_buffers() if id(b) not in packed}


def exchange(ours: nn.Module, other: nn.Module) -> None:
    """Swap the contents of two heads of one shape; no tensor of `ours` moves."""
    theirs = _buffers(other)
    for name, buffer in _buffers(ours).items():
        _swap(buffer, theirs[name])
    for mine, its in zip(_linears(ours), _linears(other), strict=True):
        if mine._packed is None and its._packed is None:
            assert mine.weight is not None and its.weight is not None
            _swap(mine.weight, its.weight)
        else:  # on a CPU, where no graph knows an address
            mine._packed, its._packed = its._packed, mine._packed
            mine.weight, its.weight = its.weight, mine.weight


def _swap(a: torch.Tensor, b: torch.Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
