"""`--batch-invariant`: what it changes in the configuration, and which models it refuses.

With it, a row's arithmetic does not depend on the rows beside it. So tokens and log probabilities
do not depend on other requests, on drafts, chunks, cached prefixes and preemption.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from ...configs.schema import Config
from ...kernels.device import is_card
from ...kernels.linear.fixed import check_tiles, unfit_layer
from ..errors import RunnerError
from ..models.base import TextModel
from ..models.formats.weight_format import WeightFormat
from ..models.layers import Linear

logger = logging.getLogger(__name__)

# Architectures of which every operation has a form without other rows' influence, and is tested.
_ARCHITECTURES = (
    *("LlamaModel", "Mistral3Model", "PhiModel", "Gemma3Model"),
    *("QwenMoeModel", "GlmMoeModel", "DeepseekModel"),
)


class NotBatchInvariant(RunnerError):
    """This model, or its format, has no batch-invariant form."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"--batch-invariant cannot be used: {reason}")


def settled(config: Config) -> Config:
    """The configuration with what `--batch-invariant` decides.

    A draft is accepted if it is the token that the target draws itself by seed and position, so
    that drafts change no token; then greedy drafts are accepted most often.
    """
    if not config.graph.batch_invariant:
        return config
    drafts = config.speculative
    sampling = "greedy" if drafts.draft_sampling == "auto" else drafts.draft_sampling
    drafts = replace(drafts, rejection_sampling="coupled", draft_sampling=sampling)
    return replace(config, speculative=drafts)


def refuse(sketch: TextModel, fmt: WeightFormat) -> None:
    """Raise NotBatchInvariant if this model cannot keep the promise. Needs no weights."""
    on_gpu, name = is_card(fmt.device), type(sketch).__name__
    if name not in _ARCHITECTURES:
        raise NotBatchInvariant(
            f"the architecture of this model ({name}) has operations that depend on other rows; "
            "leave out the flag, or use a model of another architecture."
        )
    if not on_gpu:
        if fmt.dtype != torch.float32:
            raise NotBatchInvariant("on CPUs it needs --dtype auto or float32.")
        return
    if fmt.linear is None:
        raise NotBatchInvariant(
            "on GPUs it needs --dtype bfloat16 or float16, and the package triton."
        )
    layers = [layer for layer in sketch.modules() if isinstance(layer, Linear)]
    unfit = unfit_layer([layer.shape for layer in layers])
    if unfit is not None:
        raise NotBatchInvariant(
            f"no kernel adds up a layer of {unfit.inputs} inputs and {unfit.outputs} outputs in an "
            "order that is the same for every number of rows; leave out the flag."
        )


def check_rounding(model: Any) -> None:
    """Raise NotBatchInvariant if tiles that must round alike do not on the GPU of this model.

    It launches kernels that may have been compiled ahead by now, so it comes after loading.
    """
    fmt: WeightFormat | None = getattr(model, "format", None)
    if fmt is None or not fmt.batch_invariant:
        return
    with torch.inference_mode():
        differs = check_tiles(fmt.device, fmt.dtype)
    if differs is not None:
        raise NotBatchInvariant(f"on this GPU, {differs}.")


def log_changes(fmt: WeightFormat, resolved: Any) -> None:
    """Log that the mode is on and what it changes."""
    if is_card(fmt.device):
        rows = "Triton kernels of fixed tiles compute all products, and attention has fixed splits"
        if resolved.quantisation is not None or resolved.kind == "gguf":
            rows += f"; quantised weights are widened to {str(fmt.dtype).removeprefix('torch.')}"
    elif fmt.native:
        rows = "native kernels compute every row alone"
    else:
        rows = "torch computes the model one row at a time, so that prompts take as long as replies"
    logger.info(
        "batch invariance is on: %s; drafts are accepted if the target draws the same token", rows
    )
