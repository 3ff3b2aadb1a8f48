"""A tiny random llama, its greedy continuation without any cache, and runners around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.configs.schema import SpeculativeConfig, StepLimits
from slipstream.runner.attention.base import (
    AttentionMetadata,
    AttentionState,
    BuilderSizes,
)
from slipstream.runner.attention.choice import choose_backend
from slipstream.runner.batch.input_batch import InputBuffers
from slipstream.runner.batch.kv_cache import KVCache, make_groups
from slipstream.runner.batch.request_table import RequestTable
from slipstream.runner.graphs.capture import CudaGraphs, GraphPool
from slipstream.runner.graphs.dispatch import descriptors, eager_descriptor
from slipstream.runner.graphs.manager import CudaGraphManager
from slipstream.runner.graphs.settings import GraphSettings
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model
from slipstream.runner.sampling.row_sampling import RowSampling
from slipstream.runner.sampling.sampler import Sampler
from slipstream.runner.scheduling.kv_blocks import BlockGroup
from slipstream.runner.step.device_queue import DeviceQueue
from slipstream.runner.step.model_runner import ModelRunner
from slipstream.runner.step.parts import NO_SPECULATION, RunnerFacts, RunnerParts
from slipstream.runner.step.target import Target
from slipstream.runner.step.token_graphs import create_token_graphs
from slipstream.speculators.base import BaseSpeculator, DraftInputs, SpeculatorNeeds

VOCAB, MAX_LEN, BLOCK, CPU = 67, 64, 4, torch.device("cpu")


def tiny_llama(seed: int = 0, device: torch.device = CPU) -> Any:
    """Two layers in float32, with weights so large that the argmax is never a near-tie."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,  # heads of 16, the smallest tile of a tensor core
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=False,
    )
    model = build_model(config, WeightFormat(device, torch.float32))
    generator = torch.Generator().manual_seed(seed)
    for slot in model.checkpoint_slots().values():
        weights = torch.ones(slot.shape)
        if slot.init != "ones":
            weights.normal_(0, 0.4, generator=generator)
        slot.load(weights.to(device))
    return model


class _WholeSequence(AttentionMetadata):
    """Plain causal attention over the given rows, without pages or a cache."""

    def attend(self, layer, query, key, value, kv_cache):  # type: ignore[no-untyped-def]
        heads = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        out = F.scaled_dot_product_attention(
            *heads, is_causal=True, scale=layer.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class Oracle:
    """Recomputes the whole sequence for every token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        layers = {layer.layer_id: layer for layer in model.attention_layers()}
        groups = dict.fromkeys(layers, 0)
        nothing = dict.fromkeys(layers, torch.empty(0))
        self._state = AttentionState([_WholeSequence()], layers, groups, nothing)
        self._known: dict[tuple[int, ...], int] = {}

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), V]"""
        device = self._model.embed_tokens.weight.device
        ids = torch.tensor(list(tokens), dtype=torch.int32, device=device)
        with torch.inference_mode():
            hidden, _ = self._model(ids, torch.arange(len(tokens), device=device), self._state)
            return self._model.compute_logits(hidden)

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """The greedy continuation."""
        out: list[int] = []
        for _ in range(count):
            key = (*tokens, *out)
            if key not in self._known:
                self._known[key] = int(self.logits(key)[-1].argmax())
            out.append(self._known[key])
        return out


class ScriptedSpeculator(BaseSpeculator):
    """Drafts the result of `script(slot, known tokens)`, cut or padded with -1 to K."""

    def __init__(self, num_drafts: int, script: Callable[[int, list[int]], list[int]]) -> None:
        self.needs = SpeculatorNeeds(num_speculative_tokens=num_drafts)
        self._script = script

    def propose(self, inputs: DraftInputs) -> Tensor:
        count, table = self.needs.num_speculative_tokens, inputs.requests
        rows = []
        for slot in inputs.idx_mapping[: inputs.num_reqs].tolist():
            known = table.all_token_ids[slot, : int(table.total_len[slot])].tolist()
            rows.append((self._script(slot, known) + [-1] * count)[:count])
        drafts = torch.tensor(rows, dtype=torch.int64, device=table.draft_tokens.device)
        return drafts.reshape(inputs.num_reqs, count)


class PaddedEager:
    """Replaces a graph manager: batches run eagerly, but padded as for a graph."""

    wanted = ()

    def __init__(self, max_num_reqs: int, multiple: int, max_num_tokens: int) -> None:
        self._max_num_reqs = max_num_reqs
        self._multiple = multiple
        self._max_num_tokens = max_num_tokens

    def dispatch(
        self, num_tokens: int, num_reqs: int, uniform: int | None
    ) -> BatchExecutionDescriptor:
        tokens = -(-(num_tokens + 1) // self._multiple) * self._multiple
        return eager_descriptor(min(tokens, self._max_num_tokens), self._max_num_reqs, uniform)


@dataclass
class TinySetup:
    """Sizes of a test runner."""

    max_num_reqs: int = 4
    max_num_tokens: int = 48
    num_blocks: int = 65
    num_drafts: int = 0
    padded: bool = False
    buffers: type[InputBuffers] = InputBuffers
    device: torch.device = CPU
    mode: CUDAGraphMode = CUDAGraphMode.NONE  # on CUDA
    compare: bool = True  # every replay with an eager run
    whole: bool = False  # graphs of uniform batches hold the whole step
    recorded: Any = None  # graphs on the CPU: a `RecordedGraphs`, with `attention` to match
    attention: Any = None  # the back end, if not the device's choice


def make_runner(
    model: Any,
    setup: TinySetup,
    script: Callable[[int, list[int]], list[int]] | None = None,
    speculator: BaseSpeculator | None = None,
) -> ModelRunner:
    """A runner with a drafter that follows `script`, or with `speculator`."""
    device = setup.device
    layers = model.attention_layers()
    groups = make_groups(layers)
    cache = KVCache(groups, setup.num_blocks, BLOCK, torch.float32, device)
    columns = [-(-MAX_LEN // BLOCK) for _ in groups]
    sizes = (setup.max_num_reqs, setup.max_num_tokens, MAX_LEN)
    buffers = setup.buffers(*sizes, setup.num_drafts, [BLOCK] * len(groups), columns, device)
    backend = setup.attention or choose_backend("auto", layers, device)
    builders = [
        backend.create_builder(group.layers, BuilderSizes(BLOCK, *sizes, torch.float32, device))
        for group in groups
    ]
    if script is not None:
        speculator = ScriptedSpeculator(setup.num_drafts, script)
    facts = RunnerFacts(
        MAX_LEN,
        VOCAB,
        tuple(BlockGroup(setup.num_blocks, BLOCK) for _ in groups),
        (),
        device.type,
        "float32",
        backend.name,
        speculator.needs if speculator else NO_SPECULATION,
        StepLimits(setup.max_num_reqs, setup.max_num_tokens),
    )
    graphs = _graphs(setup)
    table = RequestTable(setup.max_num_reqs, MAX_LEN, VOCAB, setup.num_drafts, columns, device)
    taps = speculator.needs.aux_hidden_state_boundaries if speculator else ()
    shared = table if setup.whole else None
    target = Target(model, cache, builders, buffers, graphs, taps, shared)
    sampling = RowSampling(Sampler(SpeculativeConfig(), device), setup.num_drafts, VOCAB)
    token_graphs = None
    if setup.whole:
        settings = GraphSettings(graphs._pool, ())
        token_graphs = create_token_graphs(settings, graphs, target, sampling, table, buffers)
    queue = DeviceQueue(device)
    runner = ModelRunner(
        RunnerParts(
            facts, target, table, buffers, sampling, speculator, queue, token_graphs=token_graphs
        )
    )
    runner._on_cpu = device.type == "cpu" and setup.recorded is None  # the host sees no drafts
    return runner


def _graphs(setup: TinySetup) -> Any:
    if setup.padded:
        return PaddedEager(setup.max_num_reqs, 8, setup.max_num_tokens)
    if setup.mode is CUDAGraphMode.NONE:
        return None
    wanted = descriptors(
        setup.mode,
        sorted({1, setup.num_drafts + 1}),
        (1, 2, 4, 8, 16, 32),
        setup.max_num_reqs,
        setup.max_num_tokens,
    )
    pool = GraphPool(setup.recorded or CudaGraphs(setup.device))
    return CudaGraphManager("target", wanted, pool, debug_compare_eager=setup.compare)
