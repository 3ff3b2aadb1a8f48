"""What a model runner is made of, and what others need to know of it: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...speculators.base import BaseSpeculator, SpeculatorNeeds
from ..batch.input_batch import InputBuffers
from ..batch.request_table import RequestTable
from ..drafters.draft_graphs import DraftGraphs
from ..graphs.manager import MemoryByPurpose
from ..sampling.row_sampling import RowSampling
from ..scheduling.kv_blocks import BlockGroup
from .data_parallel import DataParallelSync
from .device_queue import DeviceQueue
from .target import Target
from .token_graphs import ChoiceGraphs

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
    draft_graphs: DraftGraphs | None = None  # runs the speculator's passes, if it has any
