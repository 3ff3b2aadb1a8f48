"""Decides whether the ranks of a target divide its drafter, or each has the whole drafter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...configs.schema import SpeculativeConfig
from ..loading.weights import ResolvedModel, keeps_formats
from ..models.layers import Linear, WeightFormat
from ..parallel.ranks import CannotDivide

logger = logging.getLogger(__name__)

# What a device reads of weights while a few rows are added up: an H200 in 2.5 us, by packets, and
# a core in about 0.8 ms, through gloo.
_BYTES_OF_A_SUM = {"cuda": 10 << 20, "cpu": 1 << 20}


def choose_size(
    speculative: SpeculativeConfig,
    target: WeightFormat,
    outline: Callable[[SpeculativeConfig], Any],  # the drafter's model of meta tensors
) -> int:
    """On how many ranks the drafter is divided: 1 or the target's number.

    Unless the configuration says it, ranks divide the drafter if that should be faster: if a rank
    is spared more bytes of weights than it could read while the sums take place. GPUs that do not
    exchange packets never divide it. All ranks choose the same.
    """
    ranks, on_cpu = target.ranks, target.device.type == "cpu"
    if ranks is None:
        return 1
    if speculative.draft_tensor_parallel_size is not None:
        return speculative.draft_tensor_parallel_size
    if ranks.packets is None and not on_cpu:
        return _whole("sums over the ranks are slow here")
    try:
        part = outline(replace(speculative, draft_tensor_parallel_size=ranks.size))
    except CannotDivide as error:
        return _whole(str(error).rstrip("."))
    sums = 2 * len(part.attention_layers()) + 1
    spared = (ranks.size - 1) * sum(_num_bytes(m) for m in part.modules() if isinstance(m, Linear))
    if spared < sums * _BYTES_OF_A_SUM["cpu" if on_cpu else "cuda"]:
        return _whole("it is small, so that sums over the ranks would take longer than they spare")
    logger.info("the %d ranks divide the drafter", ranks.size)
    return ranks.size


def _whole(why: str) -> int:
    logger.info("each rank has the whole drafter: %s", why)
    return 1


def _num_bytes(part: Linear) -> int:
    if part.packed is not None:
        return sum(weight.nbytes for weight in part.packed.parts)
    return part.out_features * part.in_features * part.format.dtype.itemsize


def draft_format(target: WeightFormat, size: int, source: ResolvedModel) -> WeightFormat:
    """The weight format of a drafter on `size` ranks: the target's, with which it shares KV groups.

    Whether weights are quantised is up to the drafter's own files. Engines that share experts
    share the drafter's in any case.
    """
    packed = source.kind != "dummy" and keeps_formats(source, target)
    ranks, experts = target.ranks, target.experts
    if size == 1:
        ranks = None
        experts = None if experts is None else experts.without_tensor_parallel()
    return replace(target, packed=packed, ranks=ranks, experts=experts)
