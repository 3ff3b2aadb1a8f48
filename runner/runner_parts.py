"""What a model runner is made of, and what others need to know of it: plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..speculators.base import BaseSpeculator, SpeculatorNeeds
from .attention.base import AttentionLayer
from .attention.claims import LoweredClaim
from .choice_graphs import ChoiceGraphs
from .cuda_graphs import MemoryByPurpose
from .data_parallel import DataParallelSync
from .device_queue import DeviceQueue
from .input_batch import InputBuffers
from .kv_blocks import BlockGroup
from .kv_cache import KVCache
from .load_target import LoadedTarget
from .request_table import RequestTable
from .row_sampling import RowSampling
from .target import Target

NO_SPECULATION = SpeculatorNeeds(num_speculative_tokens=0)


@dataclass(frozen=True)
class RunnerFacts:
    """What the engine and the server need to know of a runner."""

    max_model_len: int
    vocab_size: int
    kv_groups: tuple[BlockGroup, ...]
    eos_token_ids: tuple[int, ...]
    device: str  # "cpu" or "cuda"
    dtype: str
    attention_backend: str
    needs: SpeculatorNeeds  # of the drafter; NO_SPECULATION without one
    startup_seconds: dict[str, float] = field(default_factory=dict)  # by phase; grows until ready
    # (requests, drafts each) -> seconds of a step, as far as they were measured
    step_seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    lowered_claims: tuple[str, ...] = ()  # the back end of each claim that did not hold


def facts_of(
    loaded: LoadedTarget,
    cache: KVCache,
    attention_backend: str,
    needs: SpeculatorNeeds,
    startup_seconds: dict[str, float],
    lowered: Sequence[LoweredClaim],
    draft_layers: Sequence[AttentionLayer] = (),
) -> RunnerFacts:
    """The facts of a runner that is all but ready."""
    ids = {layer.layer_id for layer in draft_layers} if needs.kv_needs_next_token else set()
    return RunnerFacts(
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        kv_groups=tuple(
            BlockGroup(
                cache.num_blocks,
                cache.block_size,
                group.sliding_window,
                any(layer.layer_id in ids for layer in group.layers),
            )
            for group in cache.groups
        ),
        eos_token_ids=tuple(loaded.resolved.eos_token_ids),
        device=loaded.format.device.type,
        dtype=str(loaded.format.dtype).removeprefix("torch."),
        attention_backend=attention_backend,
        needs=needs,
        startup_seconds=startup_seconds,
        lowered_claims=tuple(claim.backend for claim in lowered),
    )


@dataclass(frozen=True)
class RunnerParts:
    """What `ModelRunner` is made of."""

    facts: RunnerFacts
    target: Target
    table: RequestTable
    buffers: InputBuffers
    sampling: RowSampling
    speculator: BaseSpeculator | None
    queue: DeviceQueue
    memory: MemoryByPurpose = field(default_factory=MemoryByPurpose)
    sync: DataParallelSync | None = None  # None: there are no other ranks
    choices: ChoiceGraphs | None = None  # None: no graph chooses tokens
