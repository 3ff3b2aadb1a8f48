"""The parts of a model runner, and the facts about it that others need."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ...configs.schema import StepLimits
from ...speculators.base import BaseSpeculator, SpeculatorNeeds
from ..batch.input_batch import InputBuffers
from ..batch.request_table import RequestTable
from ..drafters.draft_graphs import DraftGraphs
from ..sampling.row_sampling import RowSampling
from ..scheduling.kv_blocks import BlockGroup
from ..scheduling.state_snapshots import StateGroup
from .data_parallel import DataParallelSync
from .device_queue import DeviceQueue
from .target import Target
from .token_graphs import TokenGraphs

NO_SPECULATION = SpeculatorNeeds(num_speculative_tokens=0)


@dataclass(frozen=True)
class RunnerFacts:
    """Facts about a runner for the engine and the server."""

    max_model_len: int
    vocab_size: int
    kv_groups: tuple[BlockGroup, ...]
    eos_token_ids: tuple[int, ...]
    device: str  # "cpu" or "cuda"
    dtype: str
    attention_backend: str
    needs: SpeculatorNeeds  # of the drafter; NO_SPECULATION without one
    limits: StepLimits
    state_group: StateGroup | None = None  # None: the model has no recurrent layers
    has_experts: bool = False  # a step reads the weights that its tokens choose
    startup_seconds: dict[str, float] = field(default_factory=dict)  # by phase; grows until ready
    # (requests, drafts of each) -> measured seconds of a step
    step_seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    lowered_claims: tuple[str, ...] = ()  # the back end of each claim that a test lowered


@dataclass(frozen=True)
class RunnerParts:
    facts: RunnerFacts
    target: Target
    table: RequestTable
    buffers: InputBuffers
    sampling: RowSampling
    speculator: BaseSpeculator | None
    queue: DeviceQueue
    memory: Counter[str] = field(default_factory=Counter)  # bytes on the device by purpose
    sync: DataParallelSync | None = None  # None: no other ranks
    token_graphs: TokenGraphs | None = None  # None: no graphs select tokens
    draft_graphs: DraftGraphs | None = None  # runs the speculator's passes, if it has any
