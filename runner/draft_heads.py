"""Loads draft heads: finds the checkpoint, reads its config, fills the model.

`check_drafter` does all but the last, for every drafter, so that a wrong one is known early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
    resolve_model,
)

if TYPE_CHECKING:
    from .models.draft_config import DraftHeadConfig


class HeadHost(Protocol):
    """What a head needs of the runner."""

    device: torch.device
    max_model_len: int
    target_model: Any
    target_resolved: ResolvedModel | None  # where the target came from


class _Drafter(NamedTuple):
    """How the checkpoint of one kind is found, and its head built and filled."""

    find: Callable[[SpeculativeConfig, ResolvedModel], ResolvedModel]  # of the target
    load: Callable[[SpeculativeConfig, HeadHost, int], nn.Module] | None  # None: no head


def check_drafter(speculative: SpeculativeConfig, target: ResolvedModel) -> None:
    """ModelLoadError if there is no drafter as configured, or its config does not suit the
    target's; reads no weights."""
    drafter = _DRAFTERS.get(speculative.method)
    if drafter is None:  # without a model, or one's own, which reads the name itself
        return
    source = drafter.find(speculative, target)
    if source.kind != "dummy":
        open_checkpoint(source)


def load_head(
    kind: str, speculative: SpeculativeConfig, host: HeadHost, layer_id: int
) -> nn.Module:
    """Build and fill the head of `kind`; its first layer has id `layer_id`."""
    drafter = _DRAFTERS.get(kind)
    if drafter is None or drafter.load is None:
        raise ModelLoadError(f"there is no draft head of kind {kind!r}.")
    return drafter.load(speculative, host, layer_id)


def _find_whole_model(speculative: SpeculativeConfig, target: ResolvedModel) -> ResolvedModel:
    source = _own_or_target(speculative, None, check_architecture=True)
    check_vocabulary("draft model's", source.text_config.vocab_size, target.text_config.vocab_size)
    return source


def _find_eagle(kind: str, speculative: SpeculativeConfig, target: ResolvedModel) -> ResolvedModel:
    return _read_eagle(kind, speculative, target.text_config, tell=False)[0]


def _read_eagle(
    kind: str, speculative: SpeculativeConfig, target_config: Any, tell: bool = True
) -> tuple[ResolvedModel, DraftHeadConfig]:
    from .models.draft_config import read_draft_config

    if speculative.model is None:
        raise ModelLoadError(
            f"speculative method {kind} needs a model: the drafter's folder or id."
        )
    path = find_model(ModelConfig(model=speculative.model, load_format=speculative.load_format))
    head = read_draft_config(
        _read_json(path / "config.json"),
        kind == "eagle3",
        target_config.hidden_size,
        target_config.num_hidden_layers,
        speculative.aux_hidden_state_boundaries,
        tell,
    )
    config = make_hf_config(head.layer, str(path), check_architecture=False)
    check_vocabulary("drafter's", config.vocab_size, target_config.vocab_size)
    kind_of_weights = "dummy" if speculative.load_format == "dummy" else "safetensors"
    return ResolvedModel(path, kind_of_weights, config), head


def check_vocabulary(whose: str, size: int, target_size: int) -> None:
    """ModelLoadError if the two models cannot have the same tokens."""
    if size != target_size:
        raise ModelLoadError(
            f"the {whose} vocabulary has {size} tokens, "
            f"the target's {target_size}: they do not share a tokenizer."
        )


def _load_eagle(
    kind: str, speculative: SpeculativeConfig, host: HeadHost, layer_id: int
) -> nn.Module:
    target = host.target_model
    source, head = _read_eagle(kind, speculative, target.config)
    fmt: WeightFormat = target.format
    # A drafter's rotary table covers the target's positions, also beyond its own trained length.
    args = (head, source.hf_config, fmt, target, host.max_model_len, layer_id)
    model: Any
    if kind == "eagle3":
        from .models.eagle3 import Eagle3Head

        model = Eagle3Head(*args)
    else:
        from .models.eagle import EagleHead

        model = EagleHead(*args)
    _fill(model, source, host.device)
    return model  # type: ignore[no-any-return]


def _find_mtp(speculative: SpeculativeConfig, target: ResolvedModel) -> ResolvedModel:
    _needs_deepseek(target.text_config)
    return _own_or_target(speculative, target)


def _load_mtp(speculative: SpeculativeConfig, host: HeadHost, layer_id: int) -> nn.Module:
    """DeepSeek's module, from the target's checkpoint or from a folder of its own."""
    from .models.deepseek_mtp import DeepseekMtpHead, module_index

    target = host.target_model
    _needs_deepseek(target.config)
    source = _own_or_target(speculative, host.target_resolved)
    names: list[str] = []
    if source.kind != "dummy":
        names = open_checkpoint(source).names
    index = module_index(names, target.config.num_hidden_layers)
    model = DeepseekMtpHead(
        source.text_config,
        target.format,
        target,
        host.max_model_len,
        index,
        layer_id,
        speculative.mtp_feedback == "post_norm",
    )
    # Behind the target's layers stand the target's own: only this module is read.
    _fill(model, source, host.device, only=model.prefix if index else "")
    return model


def _needs_deepseek(target_config: Any) -> None:
    if target_config.model_type != "deepseek_v3":
        raise ModelLoadError(
            "speculative method mtp needs a DeepSeek V3 target, but this one is "
            f"{target_config.model_type}."
        )


def _find_assistant(speculative: SpeculativeConfig, target: ResolvedModel | None) -> ResolvedModel:
    source = _own_or_target(speculative, target)
    if source.hf_config.model_type != "gemma4_assistant":
        raise ModelLoadError(
            f"speculative method gemma4_mtp needs a gemma4_assistant checkpoint, but {source.path} "
            f"is of type {source.hf_config.model_type}."
        )
    return source


def _load_assistant(speculative: SpeculativeConfig, host: HeadHost, layer_id: int) -> nn.Module:
    """Gemma 4's assistant, from a folder of its own."""
    from .models.gemma4_assistant import Gemma4Assistant

    source = _find_assistant(speculative, host.target_resolved)
    generation = source.path / "generation_config.json"
    settings = _read_json(generation) if generation.exists() else {}
    model = Gemma4Assistant(
        source.hf_config,
        host.target_model.format,
        host.target_model,
        host.max_model_len,
        layer_id,
        tuple(settings.get("suppress_tokens") or ()),
    )
    _fill(model, source, host.device)
    return model


def _own_or_target(
    speculative: SpeculativeConfig, target: ResolvedModel | None, check_architecture: bool = False
) -> ResolvedModel:
    """The drafter's folder if one is named, else the target's."""
    if speculative.model is not None:
        source = ModelConfig(model=speculative.model, load_format=speculative.load_format)
        return resolve_model(source, check_architecture)
    if target is None:
        raise ModelLoadError(f"speculative method {speculative.method} needs a model.")
    if speculative.load_format == "dummy":
        return replace(target, kind="dummy")
    return target


def _fill(model: Any, source: ResolvedModel, device: torch.device, only: str = "") -> None:
    """Load the tensors whose names start with `only`, each exactly once; or random ones."""
    dummy = source.kind == "dummy"
    if dummy:
        load_random(model.checkpoint_slots(), device, seed=source.seed + 1)
    else:
        checkpoint = open_checkpoint(source, device)
        checkpoint.names = [name for name in checkpoint.names if name.startswith(only)]
        load_checkpoint(
            model.checkpoint_slots(), checkpoint, model.checkpoint_name, str(source.path)
        )
    model.finish_loading(dummy)


_DRAFTERS = {
    "eagle": _Drafter(partial(_find_eagle, "eagle"), partial(_load_eagle, "eagle")),
    "eagle3": _Drafter(partial(_find_eagle, "eagle3"), partial(_load_eagle, "eagle3")),
    "mtp": _Drafter(_find_mtp, _load_mtp),
    "gemma4_mtp": _Drafter(_find_assistant, _load_assistant),
    "draft_model": _Drafter(_find_whole_model, None),  # a whole model, which `draft_host` loads
}
