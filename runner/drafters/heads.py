"""Loads drafters' models: finds the checkpoint, reads its config, builds and fills the model.

`outline` does so without memory, from the headers of the files, so that a mismatch is found before
the target's weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ...configs.schema import ModelConfig, SpeculativeConfig
from ..errors import ModelLoadError
from ..loading.dummy import load_random
from ..loading.hub import find_model
from ..loading.inspection import Progress
from ..loading.weights import (
    ResolvedModel,
    _read_json,
    load_checkpoint,
    load_weights,
    make_hf_config,
    open_checkpoint,
    resolve_model,
    stated_quantisation,
)
from ..models.layers import WeightFormat
from ..models.registry import build_model
from .division import choose_size, draft_format

if TYPE_CHECKING:
    from ..draft_models.draft_config import DraftHeadConfig


@dataclass
class HeadHost:
    """What is needed to load a drafter's model; by default one of meta tensors, without memory."""

    max_model_len: int
    target_model: Any
    target_resolved: ResolvedModel | None  # its files, if it was loaded from files
    device: torch.device = torch.device("meta")
    loading: Progress | None = None  # called with the bytes of the drafter that have been read


@dataclass(frozen=True)
class FoundDrafter:
    """A drafter's files and its config."""

    source: ResolvedModel
    head: DraftHeadConfig | None = None  # of EAGLE heads


class _Drafter(NamedTuple):
    """How to find the checkpoint of one kind of drafter, and how to build and fill its model."""

    # (settings, the target's text config, the target's files)
    find: Callable[[SpeculativeConfig, Any, ResolvedModel | None], FoundDrafter]
    load: Callable[[SpeculativeConfig, FoundDrafter, HeadHost, int], nn.Module]


def find_configured(speculative: SpeculativeConfig, target: ResolvedModel) -> FoundDrafter | None:
    """Find the configured drafter's files; None if it has no model or is a `module:Class`.

    Raises ModelLoadError if there are none or its config does not match the target's.
    """
    if speculative.method not in _DRAFTERS:
        return None
    return find_checkpoint(speculative.method, speculative, target.text_config, target)


def find_checkpoint(
    kind: str, speculative: SpeculativeConfig, target_config: Any, target: ResolvedModel | None
) -> FoundDrafter:
    """Find the files of a drafter of `kind`; raises ModelLoadError as `find_configured` does."""
    if kind not in _DRAFTERS:
        raise ModelLoadError(f"unknown kind of draft model {kind!r}.")
    return _DRAFTERS[kind].find(speculative, target_config, target)


def outline(
    kind: str, speculative: SpeculativeConfig, host: HeadHost, found: FoundDrafter
) -> nn.Module:
    """Build the drafter's model of meta tensors, from the headers of its files.

    It allocates no memory, and raises the errors of `load_head` about names and shapes. Unless
    the configuration says that ranks divide the drafter, it is whole.
    """
    nowhere = HeadHost(host.max_model_len, host.target_model, host.target_resolved)
    size = speculative.draft_tensor_parallel_size or 1
    own = replace(speculative, draft_tensor_parallel_size=size)
    return _DRAFTERS[kind].load(own, found, nowhere, 0)


def load_head(
    kind: str,
    speculative: SpeculativeConfig,
    host: HeadHost,
    layer_id: int,
    found: FoundDrafter | None = None,
) -> nn.Module:
    """Build and fill the model of `kind`; its first attention layer gets the id `layer_id`.

    `found`: its files, if they have been found already.
    """
    if found is None:
        target = host.target_model
        found = find_checkpoint(kind, speculative, target.config, host.target_resolved)
    fmt = host.target_model.format
    size = choose_size(speculative, fmt, lambda own: outline(kind, own, host, found))
    own = replace(speculative, draft_tensor_parallel_size=size)
    return _DRAFTERS[kind].load(own, found, host, layer_id)


def _format(speculative: SpeculativeConfig, host: HeadHost, source: ResolvedModel) -> WeightFormat:
    """See `draft_format`; on the meta device without what needs memory."""
    assert speculative.draft_tensor_parallel_size is not None, "load_head chooses it"
    size = speculative.draft_tensor_parallel_size
    fmt = draft_format(host.target_model.format, size, source)
    if fmt.device.type == host.device.type:
        return fmt
    return replace(fmt, device=host.device, pack_fp16=False, linear=None, native=False)


def _find_whole_model(
    speculative: SpeculativeConfig, target_config: Any, target: ResolvedModel | None
) -> FoundDrafter:
    found = _own_or_target(speculative, None, check_architecture=True)
    vocab_size = found.source.text_config.vocab_size
    check_vocabulary("draft model's", vocab_size, target_config.vocab_size)
    return found


def _load_whole_model(
    speculative: SpeculativeConfig, found: FoundDrafter, host: HeadHost, layer_id: int
) -> nn.Module:
    # only the target's rows must not depend on the batch
    fmt = replace(_format(speculative, host, found.source), batch_invariant=False)
    model = build_model(found.source.hf_config, fmt, host.max_model_len, layer_id)
    load_weights(model, found.source, host.loading)
    return model


def _find_eagle(
    kind: str, speculative: SpeculativeConfig, target_config: Any, target: ResolvedModel | None
) -> FoundDrafter:
    from ..draft_models.draft_config import has_bias, read_draft_config

    if target_config.model_type == "deepseek_v4":
        raise ModelLoadError(
            f"speculative method {kind} needs a target with one residual stream, but this one has "
            f"{target_config.hc_mult} (DeepSeek V4)."
        )
    if speculative.model is None:
        raise ModelLoadError(
            f'speculative method {kind} needs "model": the folder or id of the drafter.'
        )
    path = find_model(ModelConfig(model=speculative.model, load_format=speculative.load_format))
    raw = _read_json(path / "config.json")
    head = read_draft_config(
        raw,
        kind == "eagle3",
        target_config.hidden_size,
        target_config.num_hidden_layers,
        speculative.aux_hidden_state_boundaries,
    )
    config = make_hf_config(head.layer, str(path), check_architecture=False)
    check_vocabulary("drafter's", config.vocab_size, target_config.vocab_size)
    kind_of_weights = "dummy" if speculative.load_format == "dummy" else "safetensors"
    said = stated_quantisation(raw, str(path))
    source = ResolvedModel(path, kind_of_weights, config, quantisation=said)
    if kind_of_weights != "dummy":
        names = open_checkpoint(source).names
        head = replace(head, fc_bias=has_bias(names, "fc"))
        config.qkv_bias = has_bias(names, "q_proj", "k_proj", "v_proj")
        config.output_bias = has_bias(names, "o_proj")
        config.mlp_bias = has_bias(names, "gate_proj", "up_proj", "down_proj")
    return FoundDrafter(source, head)


def check_vocabulary(owner: str, size: int, target_size: int) -> None:
    """Raise ModelLoadError if the two models have vocabularies of different sizes."""
    if size != target_size:
        raise ModelLoadError(
            f"the {owner} vocabulary has {size} tokens, "
            f"the target's {target_size}: they do not share a tokenizer."
        )


def _load_eagle(
    kind: str, speculative: SpeculativeConfig, found: FoundDrafter, host: HeadHost, layer_id: int
) -> nn.Module:
    assert found.head is not None
    # The drafter's rotary table covers all positions of the target, even beyond its own training.
    args = (
        *(found.head, found.source.hf_config, _format(speculative, host, found.source)),
        *(host.target_model, host.max_model_len, layer_id),
    )
    model: Any
    if kind == "eagle3":
        from ..draft_models.eagle3 import Eagle3Head

        model = Eagle3Head(*args)
    else:
        from ..draft_models.eagle import EagleHead

        model = EagleHead(*args)
    _fill(model, found.source, host)
    return model  # type: ignore[no-any-return]


def _find_mtp(
    speculative: SpeculativeConfig, target_config: Any, target: ResolvedModel | None
) -> FoundDrafter:
    from ..draft_models import deepseek_v4_mtp, qwen_mtp

    kind = target_config.model_type
    plain = ("deepseek_v3", "deepseek_v32", "glm4_moe")
    if kind not in (*plain, deepseek_v4_mtp.TYPE, *qwen_mtp.TYPES):
        raise ModelLoadError(
            "speculative method mtp needs a DeepSeek V3, V3.2 or V4, GLM-4.5, Qwen3-Next or "
            f"Qwen3.5 target, but this one is {kind}."
        )
    found = _own_or_target(speculative, target)
    source = found.source
    if source.kind != "dummy" and kind == deepseek_v4_mtp.TYPE:
        deepseek_v4_mtp.check_module(open_checkpoint(source).names, str(source.path))
    elif source.kind != "dummy" and kind in qwen_mtp.TYPES:
        names = open_checkpoint(source).names
        qwen_mtp.check_module(source.text_config, names, str(source.path))
    return found


def _load_mtp(
    speculative: SpeculativeConfig, found: FoundDrafter, host: HeadHost, layer_id: int
) -> nn.Module:
    """Load the module from the target's checkpoint or a folder of its own."""
    from ..draft_models.deepseek_v4_mtp import TYPE, DeepseekV4MtpHead
    from ..draft_models.qwen_mtp import PREFIX, TYPES, QwenMtpHead

    source, target = found.source, host.target_model
    config, length = source.text_config, host.max_model_len
    model: Any
    if config.model_type == TYPE:
        model = DeepseekV4MtpHead(
            config, _format(speculative, host, source), target, length, layer_id
        )
    elif config.model_type in TYPES:
        post_norm = speculative.mtp_feedback == "post_norm"
        model = QwenMtpHead(
            config, _format(speculative, host, source), target, length, layer_id, post_norm
        )
    else:
        return _load_deepseek_mtp(speculative, found, host, layer_id)
    _fill(model, source, host, only=PREFIX)
    return model  # type: ignore[no-any-return]


def _load_deepseek_mtp(
    speculative: SpeculativeConfig, found: FoundDrafter, host: HeadHost, layer_id: int
) -> nn.Module:
    from ..draft_models import deepseek_mtp as mtp

    target, source = host.target_model, found.source
    names: list[str] = []
    if source.kind != "dummy":
        names = open_checkpoint(source).names
    index = mtp.module_index(names, target.config.num_hidden_layers)
    heads = {"glm4_moe": mtp.GlmMtpHead, "deepseek_v32": mtp.DeepseekV32MtpHead}
    model = heads.get(source.text_config.model_type, mtp.DeepseekMtpHead)(
        source.text_config,
        _format(speculative, host, source),
        target,
        host.max_model_len,
        index,
        layer_id,
        speculative.mtp_feedback == "post_norm",
    )
    # The target's checkpoint also holds the target's layers, so only this module is read.
    _fill(model, source, host, only=model.prefix if index else "")
    return model


def _find_assistant(
    speculative: SpeculativeConfig, target_config: Any, target: ResolvedModel | None
) -> FoundDrafter:
    found = _own_or_target(speculative, target)
    source = found.source
    if source.hf_config.model_type != "gemma4_assistant":
        raise ModelLoadError(
            f"speculative method gemma4_mtp needs a gemma4_assistant checkpoint, but {source.path} "
            f"is of type {source.hf_config.model_type}."
        )
    return found


def _load_assistant(
    speculative: SpeculativeConfig, found: FoundDrafter, host: HeadHost, layer_id: int
) -> nn.Module:
    """Load Gemma 4's assistant from a folder of its own."""
    from ..draft_models.gemma4_assistant import Gemma4Assistant

    source = found.source
    generation = source.path / "generation_config.json"
    settings = _read_json(generation) if generation.exists() else {}
    model = Gemma4Assistant(
        source.hf_config,
        _format(speculative, host, source),
        host.target_model,
        host.max_model_len,
        layer_id,
        tuple(settings.get("suppress_tokens") or ()),
    )
    _fill(model, source, host)
    return model


def _own_or_target(
    speculative: SpeculativeConfig, target: ResolvedModel | None, check_architecture: bool = False
) -> FoundDrafter:
    """The files of the named drafter; without a name, those of the target."""
    if speculative.model is not None:
        source = ModelConfig(model=speculative.model, load_format=speculative.load_format)
        return FoundDrafter(resolve_model(source, check_architecture))
    if target is None:
        raise ModelLoadError(f'speculative method {speculative.method} needs "model".')
    if speculative.load_format == "dummy":
        return FoundDrafter(replace(target, kind="dummy"))
    return FoundDrafter(target)


def _fill(model: Any, source: ResolvedModel, host: HeadHost, only: str = "") -> None:
    """Fill each slot exactly once: with random numbers, or from the tensors with the prefix
    `only`."""
    dummy = source.kind == "dummy"
    if dummy:
        load_random(model.checkpoint_slots(), host.device, source.seed + 1, host.loading)
    else:
        checkpoint = open_checkpoint(source, host.device)
        checkpoint.names = [name for name in checkpoint.names if name.startswith(only)]
        slots, source_name = model.checkpoint_slots(), str(source.path)
        load_checkpoint(slots, checkpoint, model.checkpoint_name, source_name, host.loading)
    model.finish_loading(dummy)


_DRAFTERS = {
    "eagle": _Drafter(partial(_find_eagle, "eagle"), partial(_load_eagle, "eagle")),
    "eagle3": _Drafter(partial(_find_eagle, "eagle3"), partial(_load_eagle, "eagle3")),
    "mtp": _Drafter(_find_mtp, _load_mtp),
    "gemma4_mtp": _Drafter(_find_assistant, _load_assistant),
    "draft_model": _Drafter(_find_whole_model, _load_whole_model),
}
