"""Chooses the limits of a step that the user left open, so that they fit the GPU and the model.

A large GPU needs large steps: with few tokens in a step, a long prompt waits for many of them. But
the buffers and activations of large steps take memory from the KV cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...configs.schema import Config, StepLimits
from ...kernels.device import Card
from ..drafters.heads import FoundDrafter
from ..graphs.settings import GraphSettings

logger = logging.getLogger(__name__)

SMALL = StepLimits(max_num_seqs=64, max_num_batched_tokens=2048)
# From the largest on; what is tried on a large GPU. `SMALL` needs no proof that it fits.
LARGE = (StepLimits(256, 8192), StepLimits(128, 4096))
_CAPABILITY, _MEMORY_BYTES = (9, 0), 60 << 30  # of a large GPU
_OTHER_BYTES = 2 << 30  # the CUDA context, graphs and workspaces
_MOST_SHARE = 1 / 4  # of the memory that the weights leave may go to a step
_ERROR = 2.0  # a step may need this many times its estimate
# Bytes for each logit of a step: bf16, and the sampler's copies and sums in float32.
_LOGIT_BYTES = 20


@dataclass(frozen=True)
class ModelNeeds:
    """What a model needs of a GPU's memory, in bytes unless it says otherwise."""

    weights: int  # the drafter's included
    least_cache: int  # the KV cache of one request, or the size that the user set
    activations: int  # of one token, in the widest place
    vocab_size: int  # tokens
    max_model_len: int  # tokens

    def step(self, limits: StepLimits, row_tokens: int) -> int:
        """An estimate of the buffers and activations of the largest step.

        `row_tokens`: the most tokens of a request that decodes.
        """
        logits = limits.max_num_seqs * row_tokens * self.vocab_size * _LOGIT_BYTES
        # Its tokens, and the counts, masks and draft distributions over the vocabulary.
        request = 8 * self.max_model_len + 4 * (row_tokens + 1) * self.vocab_size
        tokens = limits.max_num_batched_tokens * self.activations
        return logits + limits.max_num_seqs * request + tokens


def activation_bytes(text: Any, attention_width: int, itemsize: int) -> int:
    """An estimate of the bytes per token of the widest layer, from a model's text config.

    `attention_width`: the elements of all heads of the widest attention layer.
    """
    # Gemma 4's config refuses to say as an attribute what differs between its layers.
    values, hidden = vars(text), int(text.hidden_size)

    def largest(*names: str) -> int:
        found = [values.get(name) for name in names]
        return max([value for value in found if isinstance(value, int)], default=0)

    copies = largest("num_experts_per_tok", "top_k_experts") or 1  # of a token, one per expert
    width = largest("intermediate_size") or 4 * hidden
    width *= 2 if values.get("use_double_wide_mlp") else 1
    expert = copies * ((largest("moe_intermediate_size") or width) + hidden)
    mlp = max(width, expert if copies > 1 else 0)
    return itemsize * (6 * hidden + 4 * attention_width + 4 * mlp)


def drafter_bytes(drafter: FoundDrafter | None) -> int:
    """The size of a drafter's files; 0 without a drafter."""
    if drafter is None:
        return 0
    path = drafter.source.path
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def choose_limits(
    config: Config, card: Card | None, needs: ModelNeeds, used_bytes: int = 0
) -> tuple[StepLimits, str]:
    """The limits of a step, those that are configured included, and the reason for the others.

    `card`: the GPU; None on a CPU. `used_bytes`: memory of the GPU that is used already.
    """
    scheduler, small = config.scheduler, completed(config, SMALL, needs.max_model_len)
    if None not in (scheduler.max_num_seqs, scheduler.max_num_batched_tokens):
        return small, "as configured"
    if card is None:
        return small, "the default on a CPU"
    name = f"{card.name} with {_gib(card.memory_bytes)}"
    if not is_large(card):
        least = f"sm_{_CAPABILITY[0]}{_CAPABILITY[1]} and {_gib(_MEMORY_BYTES)}"
        return small, f"the default on {name}, as larger steps are for GPUs from {least} on"
    usable = int(card.memory_bytes * config.cache.gpu_memory_utilization)
    left = usable - used_bytes - needs.weights - _OTHER_BYTES
    beside = f"on {name}, whose share leaves {_gib(max(0, left))} beside the model's weights"
    for limits in _fitting(config, needs, left):
        return limits, f"the largest that fit {beside}"
    return small, f"the least {beside}"


def is_large(card: Card) -> bool:
    """True if large steps pay on this GPU."""
    return card.capability >= _CAPABILITY and card.memory_bytes >= _MEMORY_BYTES


def completed(config: Config, wanted: StepLimits, max_model_len: int) -> StepLimits:
    """The configured limits; one that is not configured is the wanted one, or what goes with the
    other."""
    scheduler, width = config.scheduler, config.speculative.max_row_tokens
    seqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if seqs is None:
        seqs = wanted.max_num_seqs
        seqs = seqs if tokens is None else max(1, min(seqs, tokens // width))
    if tokens is None:
        tokens = max(wanted.max_num_batched_tokens, seqs * width)
        if not scheduler.enable_chunked_prefill:  # every prompt is computed in one step
            tokens = max(tokens, max_model_len)
    return StepLimits(seqs, tokens)


def _fitting(config: Config, needs: ModelNeeds, left: int) -> Iterator[StepLimits]:
    for wanted in LARGE:
        limits = completed(config, wanted, needs.max_model_len)
        step = needs.step(limits, config.speculative.max_row_tokens)
        if step <= _MOST_SHARE * left and needs.least_cache <= left - _ERROR * step:
            yield limits


def _gib(size: int) -> str:
    return f"{size / 2**30:.0f} GiB"


def log_limits(limits: StepLimits, reason: str, graphs: GraphSettings | None) -> None:
    """Log the limits of a step, the flags that set them, and which steps get a CUDA graph."""
    captured = "without CUDA graphs"
    if graphs is not None:
        captured = f"CUDA graphs for up to {graphs.sizes[-1]} tokens (--cudagraph-capture-sizes)"
    logger.info(
        "a step has at most %d requests (--max-num-seqs) and %d tokens (--max-num-batched-tokens):"
        " %s; %s",
        limits.max_num_seqs, limits.max_num_batched_tokens, reason, captured,
    )  # fmt: skip
