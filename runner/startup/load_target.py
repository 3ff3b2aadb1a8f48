"""Loads the target model, after checking that its drafter can be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...configs.model.model_config import context_length
from ...configs.options import ConfigError
from ...configs.schema import Config, StepLimits
from ...kernels.device import card_of
from ..attention.choice import first_usable
from ..attention.fp8_layers import by_layer_id, is_fp8, with_fp8_cache
from ..batch.kv_cache import KVCacheGroup, KVLayout, StepLoad, fitting_block_size, make_groups
from ..drafters.heads import FoundDrafter, HeadHost, find_configured, outline
from ..errors import DrafterError, RunnerError, why_unreadable
from ..loading.hub import find_drafter
from ..loading.model_check import outline_model, refuse_large_cache, used_memory, weight_bytes
from ..loading.weights import (
    ResolvedModel,
    check_outlines,
    keeps_formats,
    load_kv_scales,
    load_weights,
    resolve_model,
)
from ..models.base import TextModel
from ..models.formats.weight_format import WeightFormat, resolve_format, split_format
from ..models.registry import build_model, check_experts
from ..parallel.engine_group import EngineGroup
from ..parallel.ranks import Ranks
from .batch_invariant import log_changes, refuse
from .limits import (
    LARGE,
    SMALL,
    ModelNeeds,
    activation_bytes,
    choose_limits,
    completed,
    drafter_bytes,
)
from .memory import refuse_early

# Exceptions that a malformed config can raise. Not RuntimeError, which is also a device fault.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class LoadedTarget:
    """The model that is served, and the files of its drafter."""

    model: TextModel
    resolved: ResolvedModel
    format: WeightFormat
    max_model_len: int
    vocab_size: int
    drafter: FoundDrafter | None
    kv_scales: dict[int, tuple[float, float]]  # of an fp8 KV cache: layer_id -> (keys, values)
    limits: StepLimits  # of a step
    limits_reason: str  # why those are chosen that are not configured


@contextmanager
def faults_of_drafter() -> Iterator[None]:
    """Turn errors of code that reads the drafter into DrafterError, malformed contents included."""
    try:
        yield
    except (RunnerError, ConfigError, OSError, *_MALFORMED) as error:
        raise DrafterError(why_unreadable(error)) from error


def load_target(
    config: Config,
    device: torch.device,
    progress: Callable[[int, int], None],
    downloading: Callable[[str, int, int], None] = lambda name, done, total: None,
    ranks: Ranks | None = None,
    engines: EngineGroup | None = None,
) -> LoadedTarget:
    """Find both models, check what can be checked without weights, and load the target's weights.

    `progress` is called with (bytes read, total bytes), and `downloading` with the name of a model
    on the hub and (bytes, total bytes). With `ranks`, it loads one rank's part, and with `engines`
    a part of the experts.
    """
    model_config = config.model
    with faults_of_drafter():
        find_drafter(config.speculative, partial(downloading, config.speculative.model or ""))
    resolved = resolve_model(model_config, downloading=partial(downloading, model_config.model))
    text: Any = resolved.text_config
    longest = context_length(vars(text)) or int(text.max_position_embeddings)
    if model_config.max_model_len is not None and model_config.max_model_len > longest:
        raise RunnerError(
            f"--max-model-len {model_config.max_model_len} is beyond the model's {longest} tokens"
        )
    with faults_of_drafter():
        drafter = find_configured(config.speculative, resolved)
    max_model_len = model_config.max_model_len or longest
    invariant = config.graph.batch_invariant
    fmt = resolve_format(
        model_config.dtype,
        device,
        resolved.checkpoint_dtype,
        config.graph.linear_backend,
        invariant,
    )
    keeps = not invariant and keeps_formats(resolved, fmt)
    fmt = split_format(replace(fmt, packed=keeps), ranks)
    fmt = replace(fmt, experts=None if engines is None else engines.experts)
    refuse_large_cache(config.cache.kv_cache_memory_bytes, device)
    limits, reason = completed(config, SMALL, max_model_len), "of a dry start"
    if device.type != "meta":
        sketch = outline_model(resolved, fmt, max_model_len)
        layers = sketch.attention_layers()
        if invariant:
            refuse(sketch, fmt)
            log_changes(fmt, resolved)
        if is_fp8(config.cache.kv_cache_dtype):
            layers = with_fp8_cache(layers, fmt.dtype, {})
        if invariant or is_fp8(config.cache.kv_cache_dtype):
            first_usable(config.graph.attention_backend, layers, device, invariant)
        groups = make_groups(layers)
        weights = weight_bytes(sketch, resolved, fmt) + drafter_bytes(drafter)
        limits, reason = _limits(config, fmt, resolved, weights, groups, max_model_len)
        limits, reason = _shared(limits, reason, fmt, engines)
        load = StepLoad(limits.max_num_seqs, limits.max_num_batched_tokens)
        refuse_early(config.cache, device, groups, fmt.dtype, max_model_len, load)
        check_outlines(sketch, resolved)
    scales = load_kv_scales(
        resolved, int(text.num_hidden_layers), is_fp8(config.cache.kv_cache_dtype)
    )
    model = build_model(resolved.hf_config, fmt, max_model_len)
    if engines is not None or (ranks is not None and ranks.by_expert):
        check_experts(model)
    if drafter is not None:
        host = HeadHost(max_model_len, model, resolved)
        with faults_of_drafter():
            outline(config.speculative.method, config.speculative, host, drafter)
    load_weights(model, resolved, progress)
    return LoadedTarget(
        model,
        resolved,
        fmt,
        max_model_len,
        int(text.vocab_size),
        drafter,
        by_layer_id(model, scales),
        limits,
        reason,
    )


def _limits(
    config: Config,
    fmt: WeightFormat,
    resolved: ResolvedModel,
    weights: int,
    groups: Sequence[KVCacheGroup],
    max_model_len: int,
) -> tuple[StepLimits, str]:
    """The limits of a step beside `weights` bytes, and the reason for those that are not
    configured."""
    text: Any = resolved.text_config
    layers = [layer for group in groups for layer in group.layers]
    width = max([layer.num_heads * layer.head_dim for layer in layers], default=0)
    most = StepLoad(LARGE[0].max_num_seqs, LARGE[0].max_num_batched_tokens)
    size = fitting_block_size(config.cache.block_size, groups)
    layout = KVLayout(groups, size, fmt.dtype, most)
    needs = ModelNeeds(
        weights,
        config.cache.kv_cache_memory_bytes or layout.bytes_of(layout.blocks_for(max_model_len)),
        activation_bytes(text, width, fmt.dtype.itemsize),
        int(text.vocab_size),
        max_model_len,
    )
    return choose_limits(config, card_of(fmt.device), needs, used_memory(fmt.device))


def _shared(
    limits: StepLimits, reason: str, fmt: WeightFormat, engines: EngineGroup | None
) -> tuple[StepLimits, str]:
    """The limits of a step on all ranks, whose devices may have different memory left, but which
    run the same steps."""
    groups = [group for group in (fmt.ranks, engines) if group is not None]
    least = [limits.max_num_seqs, limits.max_num_batched_tokens]
    for group in groups:
        least = group.least(least)
    return StepLimits(*least), f"{reason}, on every rank" if groups else reason
