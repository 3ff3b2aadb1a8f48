"""A decode step of a few layers for `measure_chain.py`: its model, KV cache and kernel choices.

`without` runs the step with one part left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.kernels.attention.triton import attention_plan, paged_attention
from slipstream.kernels.linear.linear_choice import H100_WINNERS, Choice, Shape, bucket_of
from slipstream.kernels.linear.linear_tuned import LinearChooser
from slipstream.runner.attention import triton as backend
from slipstream.runner.attention.base import (
    AttentionState,
    BuilderSizes,
    CommonAttentionMetadata,
)
from slipstream.runner.attention.triton import TritonBackend
from slipstream.runner.batch.kv_cache import KVCache, make_groups
from slipstream.runner.loading.dummy import load_random
from slipstream.runner.models import layers
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.layers import Linear
from slipstream.runner.models.registry import build_model

from chain_variants import MODELS  # isort: skip

BF16, PAGE, MAX_LEN = torch.bfloat16, 16, 4096
FUNCTIONS = {  # part -> where its functions are looked up
    "attention": [(backend, "rotary_attention")],
    "norms": [(layers, "rms_norm"), (layers, "fused_add_rms_norm")],
}


@contextmanager
def without(part: str) -> Iterator[None]:
    """Inside, the kernels of this part run only once; later calls reuse their results."""
    kept: dict[Any, Any] = {}

    def lazy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = args[1] if isinstance(args[0], Linear) else args[0]
        if isinstance(args[0], Linear) and args[0].shape.role != part:
            return function(*args, **kwargs)
        key = (function, tuple(first.shape))
        if key not in kept:
            kept[key] = function(*args, **kwargs)
        return kept[key]

    places = FUNCTIONS.get(part) or [(Linear, n) for n in ("parts", "gated", "add", "pick")]
    with ExitStack() as stack:
        for owner, name in places:
            function = getattr(owner, name)
            stack.enter_context(
                patch.object(owner, name, lambda *a, _f=function, **k: lazy(_f, *a, **k))
            )
        yield


def make_model(name: str, device: torch.device, dtype: torch.dtype = BF16, **changes: Any) -> Any:
    """Make one of `MODELS` with random weights; `changes` override fields of its config."""
    sizes = {**MODELS[name], "max_position_embeddings": MAX_LEN, **changes}
    model = build_model(LlamaConfig(**sizes), WeightFormat(device, dtype))
    load_random(model.checkpoint_slots(), device, seed=1)
    return model


def use(model: Any, chooser: LinearChooser | None) -> None:
    """Let `chooser` choose the kernel of every layer of the model; None = torch."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.chooser = chooser
        if hasattr(module, "is_plain"):
            module.is_plain = chooser is None


def shapes_of(model: Any) -> dict[str, Shape]:
    """The shapes of a model's linear layers, by role."""
    return {m.shape.role: m.shape for m in model.modules() if isinstance(m, Linear)}


def chooser(model: Any, rows: int, changes: Mapping[str, Choice]) -> LinearChooser:
    """The built-in choices, with `changes` by role."""
    bucket, shapes = bucket_of(rows), shapes_of(model)
    assert bucket is not None
    changed = {(shapes[role], bucket): choice for role, choice in changes.items()}
    return LinearChooser({**H100_WINNERS, **changed})


@contextmanager
def planned(changes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, these changes are applied to the plan of every attention launch."""
    plan_launch = attention_plan.plan_launch

    def plan(*sizes: Any) -> attention_plan.Launch:
        return replace(plan_launch(*sizes), **changes)

    with ExitStack() as stack:
        for module in (attention_plan, paged_attention):
            stack.enter_context(patch.object(module, "plan_launch", plan))
        yield


class Step:
    """A decode step of `reqs` requests with `context` tokens each."""

    def __init__(self, model: Any, reqs: int, context: int, device: torch.device) -> None:
        self.model = model
        groups = make_groups(model.attention_layers())
        pages = -(-context // PAGE)
        cache = KVCache(groups, 1 + reqs * pages, PAGE, BF16, device)
        for tensor in cache.kv_caches.values():
            tensor.normal_()
        metadata, self.positions = step_metadata(reqs, 1, context, device)
        builder = TritonBackend().create_builder(
            groups[0].layers, BuilderSizes(PAGE, reqs, reqs, MAX_LEN, BF16, device)
        )
        desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, reqs, reqs, 1)
        self.state: AttentionState = cache.attention_state([builder.build(metadata, desc)])
        make = torch.Generator().manual_seed(reqs)
        vocab = model.config.vocab_size
        self.ids = torch.randint(0, vocab, (reqs,), generator=make, dtype=torch.int32).to(device)

    def hidden(self) -> Tensor:
        out: Tensor = self.model(self.ids, self.positions, self.state)[0]
        return out

    def tokens(self) -> tuple[Tensor, Tensor]:
        picked: tuple[Tensor, Tensor] = self.model.lm_head.pick(self.hidden())
        return picked


def step_metadata(
    reqs: int, tokens: int, context: int, device: torch.device
) -> tuple[CommonAttentionMetadata, Tensor]:
    """Make requests with shuffled pages in a table of MAX_LEN tokens: (metadata, positions)."""
    pages = -(-context // PAGE)
    make = torch.Generator().manual_seed(reqs)
    table = torch.zeros(reqs, max(MAX_LEN, context) // PAGE, dtype=torch.int32)
    order = torch.randperm(reqs * pages, generator=make) + 1
    table[:, :pages] = order.view(reqs, pages)
    at = torch.arange(context - tokens, context).repeat(reqs)
    of = torch.arange(reqs).repeat_interleave(tokens)
    slots = table[of, at // PAGE].long() * PAGE + at % PAGE
    starts = torch.arange(0, reqs * tokens + 1, tokens, dtype=torch.int32)
    lens = torch.full((reqs,), context, dtype=torch.int32)
    of_rows = (starts.to(device), starts, lens.to(device), lens, table.to(device), slots.to(device))
    common = CommonAttentionMetadata(reqs, reqs * tokens, tokens, context, *of_rows)
    return common, at.to(device)
