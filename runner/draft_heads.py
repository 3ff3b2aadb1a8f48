"""Loads draft heads (EAGLE-1, EAGLE-3): finds the checkpoint, reads its config."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from ..configs.schema import ModelConfig, SpeculativeConfig
from .errors import ModelLoadError
from .hub import find_model
from .layers import WeightFormat
from .weights import (
    ResolvedModel,
    _read_json,
    load_checkpoint,
    load_random,
    make_hf_config,
    open_checkpoint,
)


class HeadHost(Protocol):
    """What a head needs of the runner."""

    device: torch.device
    max_model_len: int
    target_model: Any


def load_head(
    kind: str, speculative: SpeculativeConfig, host: HeadHost, layer_id: int
) -> nn.Module:
    """Build and fill the head of `kind` ("eagle", "eagle3"); its first layer has id `layer_id`."""
    from .models.draft_config import read_draft_config

    if speculative.model is None:
        raise ModelLoadError(
            f"speculative method {kind} needs a model: the drafter's folder or id."
        )
    source = ModelConfig(model=speculative.model, load_format=speculative.load_format)
    path = find_model(source)
    target = host.target_model
    raw = _read_json(path / "config.json")
    head = read_draft_config(
        raw,
        kind == "eagle3",
        target.config.hidden_size,
        target.config.num_hidden_layers,
        speculative.aux_hidden_state_boundaries,
    )
    config = make_hf_config(head.layer, str(path), check_architecture=False)
    if config.vocab_size != target.config.vocab_size:
        raise ModelLoadError(
            f"the drafter's vocabulary has {config.vocab_size} tokens, "
            f"the target's {target.config.vocab_size}."
        )
    fmt: WeightFormat = target.format
    # A drafter's rotary table covers the target's positions, also beyond its own trained length.
    args = (head, config, fmt, target, host.max_model_len, layer_id)
    model: Any
    if kind == "eagle3":
        from .models.eagle3 import Eagle3Head

        model = Eagle3Head(*args)
    else:
        from .models.eagle import EagleHead

        model = EagleHead(*args)
    dummy = speculative.load_format == "dummy"
    if dummy:
        load_random(model.checkpoint_slots(), host.device, seed=1)
    else:
        resolved = ResolvedModel(path, "safetensors", config)
        checkpoint = open_checkpoint(resolved)
        load_checkpoint(model.checkpoint_slots(), checkpoint, model.checkpoint_name, str(path))
    model.finish_loading(dummy)
    return model  # type: ignore[no-any-return]
