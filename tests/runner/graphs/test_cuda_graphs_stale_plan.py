"""Faults of lazily planned attention, reproduced on the CPU, which the manager does not have.

vllm#42444 (T1), vllm#44253 (T2), vllm#48261 (T3), vllm#38311 and vllm#41162 (T4), vllm#39773 (T5).
Every bad path is a negative control: the test asserts that it *is* wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from slipstream.runner.attention.base import (
    AttentionLayer,
    AttentionMetadata,
    AttentionState,
    AttentionStatePair,
)
from slipstream.runner.claims.claims import ClaimCase, LoweredClaim, verify_claim
from slipstream.runner.graphs.capture import GraphPool
from slipstream.runner.graphs.manager import CudaGraphManager, RebuiltStates

from .recorder import RecordedGraph, RecordedGraphs

MAX_REQS = 8
DUMMY_LEN, REAL_LENS = 1, [64, 300, 4096, 7]
LAYER = AttentionLayer(0, num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)
PLAN, ATTEND, STORE = "aten.clone.default", "aten.mul.Tensor", "aten.copy_.default"


class LazyMetadata(AttentionMetadata):
    """Plans at its first `attend` and sets a flag on the host, like FlashMLASchedMeta."""

    def __init__(self, seq_lens: Tensor) -> None:
        self.seq_lens = seq_lens  # [N*], a view of a buffer that graphs read
        self.planned = False
        self.plan: Tensor | None = None  # [N*]

    def attend(self, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Any) -> Tensor:
        if not self.planned:
            self.plan = self.seq_lens.clone()  # the planning kernel
            self.planned = True
        assert self.plan is not None
        return query * self.plan.view(-1, 1, 1)  # [N*, 1, 1]: right only if equal to seq_lens


def state_of(metadata: AttentionMetadata) -> AttentionState:
    return AttentionState([metadata], {0: LAYER}, {0: 0}, {0: torch.empty(0)})


class Rig:
    """A one-layer 'model' over persistent buffers; its output should equal the sequence lengths."""

    def __init__(self) -> None:
        self.graphs = RecordedGraphs()
        self.pool = GraphPool(self.graphs)
        self.seq_lens = torch.zeros(MAX_REQS)  # [MAX_REQS]
        self.query = torch.ones(MAX_REQS, 1, 1)
        self.output = torch.zeros(MAX_REQS, 1, 1)

    def build(self, lens: Sequence[int]) -> AttentionState:
        self.seq_lens.zero_()
        self.seq_lens[: len(lens)] = torch.tensor(lens, dtype=torch.float32)
        return state_of(LazyMetadata(self.seq_lens[: len(lens)]))

    def forward(self, num_reqs: int) -> Callable[[AttentionState], Tensor]:
        def run(state: AttentionState) -> Tensor:
            result = state.attend(0, self.query[:num_reqs], None, None)
            return self.output[:num_reqs].copy_(result)

        return run

    def record(self, num_reqs: int, state: AttentionState) -> RecordedGraph:
        graph = self.graphs.begin(self.pool.handle)
        self.forward(num_reqs)(state)
        self.graphs.end(graph)
        return graph

    def rows(self, num_reqs: int) -> list[float]:
        return self.output[:num_reqs].flatten().tolist()

    def create_forward_fn(
        self, desc: BatchExecutionDescriptor, warmup: bool
    ) -> tuple[Callable[[AttentionState], Tensor], AttentionState]:
        assert desc.num_reqs is not None
        return self.forward(desc.num_reqs), self.build([DUMMY_LEN] * desc.num_reqs)

    def manager(self, *counts: int) -> CudaGraphManager:
        return CudaGraphManager("target", [decode(count) for count in counts], self.pool)


def decode(num_reqs: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(CUDAGraphMode.FULL, num_reqs, num_reqs, 1)


# --- T1: vllm#42444, one metadata object for warm-up and capture --------------------------------


def test_trap_01_t1_42444_shared_state_records_no_plan_and_replays_the_warmup() -> None:
    rig = Rig()
    shared = rig.build([DUMMY_LEN] * 4)
    rig.forward(4)(shared)
    graph = rig.record(4, shared)
    rig.build(REAL_LENS)
    graph.replay()
    assert graph.node_names == [ATTEND, STORE]  # the planning kernel is missing
    assert rig.rows(4) == [DUMMY_LEN] * 4  # every row is wrong


def test_trap_01_t1_42444_fresh_capture_state_records_the_plan() -> None:
    rig = Rig()
    manager = rig.manager(4)
    pairs = manager.capture(rig.create_forward_fn)
    assert rig.graphs.graphs[0].node_names == [PLAN, ATTEND, STORE]
    for lens in (REAL_LENS, [1, 2, 3, 4], [4096] * 4):
        rig.build(lens)
        manager.run_fullgraph(decode(4))
        assert rig.rows(4) == lens
    pair = pairs[decode(4)]
    assert pair.warmup.metadata[0] is not pair.captured.metadata[0]


@pytest.mark.parametrize("share", ["state", "metadata"])
def test_trap_01_t1_42444_manager_refuses_a_shared_state(share: str) -> None:
    rig = Rig()
    saved = rig.build([DUMMY_LEN] * 4)

    def sharing(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
        return rig.forward(4), saved if share == "state" else state_of(saved.metadata[0])

    with pytest.raises(AssertionError, match="share"):
        rig.manager(4).capture(sharing)


# --- T2: vllm#44253, the drafter's prefill graph and the target's states ------------------------


def target_and_pair(rig: Rig) -> tuple[CudaGraphManager, AttentionStatePair]:
    target = rig.manager(4)
    return target, target.capture(rig.create_forward_fn)[decode(4)]


def test_trap_02_t2_44253_target_capture_state_is_planned_on_paper_only() -> None:
    rig = Rig()
    _, pair = target_and_pair(rig)
    rig.forward(4)(pair.captured)  # the drafter's warm-up, with the wrong half of the pair
    assert all(value != DUMMY_LEN for value in rig.rows(4))  # garbage: the plan never ran
    graph = rig.record(4, pair.captured)
    rig.build(REAL_LENS)
    graph.replay()
    assert graph.node_names == [ATTEND, STORE]
    assert all(row != length for row, length in zip(rig.rows(4), REAL_LENS, strict=True))


def test_trap_02_t2_44253_picking_from_the_pair_by_warmup_follows_the_target() -> None:
    rig = Rig()
    target, pair = target_and_pair(rig)
    drafter = CudaGraphManager("draft prefill", [decode(4)], rig.pool)
    rig.build([DUMMY_LEN] * 4)

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
        if not warmup:
            assert rig.rows(4) == [DUMMY_LEN] * 4  # the warm-up before was right
        return rig.forward(4), pair.warmup if warmup else pair.captured

    drafter.capture(create)
    for lens in (REAL_LENS, [9, 8, 7, 6]):
        rig.build(lens)
        target.run_fullgraph(decode(4))  # computes the plan of this step, once for both
        rig.output.fill_(-1)
        drafter.run_fullgraph(decode(4))
        assert rig.rows(4) == lens


def test_trap_02_t2_44253_rebuilt_states_put_the_plan_into_the_drafters_graph() -> None:
    rig = Rig()
    target, _ = target_and_pair(rig)
    states = RebuiltStates(target.captured, rig.create_forward_fn)
    drafter = CudaGraphManager("draft prefill", [decode(4)], rig.pool)

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
        pair = states[desc]
        return rig.forward(4), pair.warmup if warmup else pair.captured

    drafter.capture(create)
    assert rig.graphs.graphs[-1].node_names == [PLAN, ATTEND, STORE]
    rig.build(REAL_LENS)
    drafter.run_fullgraph(decode(4))  # right without the target's replay
    assert rig.rows(4) == REAL_LENS
    assert list(states) == [decode(4)] and len(states) == 1
    with pytest.raises(KeyError):
        states[decode(2)]


# --- T3: vllm#48261, saved states are views of buffers that later builds overwrite --------------


def test_trap_02_t3_48261_saved_pair_reads_what_a_later_build_wrote() -> None:
    rig = Rig()
    saved = rig.build([5, 6, 7, 8])
    rig.build([1, 2])  # the capture of a smaller descriptor
    rig.forward(4)(saved)
    assert rig.rows(4) == [1, 2, 0, 0]  # rows of another batch, and dead ones


def test_trap_02_t3_48261_rebuilding_before_each_use_is_right() -> None:
    rig = Rig()
    manager = rig.manager(4, 2)
    manager.capture(rig.create_forward_fn)
    states = RebuiltStates(manager.captured, rig.create_forward_fn)
    for count in (4, 2, 4):
        pair = states[decode(count)]
        rig.forward(count)(pair.warmup)
        assert rig.rows(count) == [DUMMY_LEN] * count


# --- T4: vllm#38311 and vllm#41162, metadata of draft decodes -----------------------------------


class PlannedMetadata(AttentionMetadata):
    """Metadata planned by the builder, as with FlashInfer: the launch reads a buffer."""

    def __init__(self, plan: Tensor) -> None:
        self.plan = plan  # [N*]

    def attend(self, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Any) -> Tensor:
        return query * self.plan.view(-1, 1, 1)


@pytest.mark.parametrize("advance", [True, False], ids=["advance", "constant"])
@pytest.mark.parametrize("rebuild", ["never", "once", "each"])
def test_trap_03_t4_38311_41162_when_draft_metadata_is_rebuilt(rebuild: str, advance: bool) -> None:
    num_reqs, num_steps = 3, 4
    rig, plan = Rig(), torch.zeros(MAX_REQS)
    right: list[bool] = []

    def build() -> AttentionState:
        plan.copy_(rig.seq_lens)
        return state_of(PlannedMetadata(plan[:num_reqs]))

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
        rig.build([DUMMY_LEN] * num_reqs)
        return rig.forward(num_reqs), build()

    manager = rig.manager(num_reqs)
    manager.capture(create)
    rig.build([10, 200, 3000])
    for step in range(num_steps):
        if rebuild == "each" or (rebuild == "once" and step == 0):
            build()
        manager.run_fullgraph(decode(num_reqs))
        right.append(rig.rows(num_reqs) == rig.seq_lens[:num_reqs].tolist())
        if advance:
            rig.seq_lens[:num_reqs] += 1
    expected = {
        ("never", True): [False] * 4,
        ("never", False): [False] * 4,
        ("once", True): [True, False, False, False],
        ("once", False): [True] * 4,
        ("each", True): [True] * 4,
        ("each", False): [True] * 4,
    }
    assert right == expected[rebuild, advance]


# --- T5: vllm#39773, the padded tail of last_token_indices --------------------------------------


@pytest.mark.parametrize("fill_tail", [True, False], ids=["padded", "poisoned"])
def test_trap_05_t5_39773_three_requests_on_a_graph_of_four(fill_tail: bool) -> None:
    num_tokens, desc = 8, BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 4, 2)
    rig = Rig()
    hidden = torch.zeros(num_tokens, 5)  # [M*, H]
    head = torch.randn(5, 11)
    last_token_indices = torch.zeros(4, dtype=torch.int64)  # [N*] batch row -> token row
    drafts = torch.zeros(4, dtype=torch.int64)  # [N*]

    def forward(state: AttentionState) -> Tensor:
        return drafts.copy_((hidden[last_token_indices] @ head).argmax(-1))

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
        return forward, rig.build([DUMMY_LEN] * 4)

    manager = CudaGraphManager("draft prefill", [desc], rig.pool)
    manager.capture(create)
    hidden.copy_(torch.randn(num_tokens, 5))
    last_token_indices.fill_(2**40)  # garbage, as a larger batch may leave it
    last_token_indices[:3] = torch.tensor([1, 3, 5])
    if not fill_tail:
        with pytest.raises(IndexError):
            manager.run_fullgraph(desc)
        return
    last_token_indices[3:] = 0
    manager.run_fullgraph(desc)
    assert torch.equal(drafts[:3], (hidden[[1, 3, 5]] @ head).argmax(-1))


# --- T6: claims ----------------------------------------------------------------------------------

NEVER, SINGLE, UNIFORM, ALWAYS = AttentionCGSupport
CASES = [ClaimCase(length) for length in (None, 1, 2, 5)]


@pytest.mark.parametrize(
    ("claimed", "failing", "verified"),
    [
        (ALWAYS, [], ALWAYS),
        (ALWAYS, [None], UNIFORM),
        (ALWAYS, [5], SINGLE),
        (ALWAYS, [1], NEVER),
        (UNIFORM, [None], UNIFORM),
        (UNIFORM, [2, 5], SINGLE),
        (SINGLE, [2, 5], SINGLE),
        (NEVER, [1], NEVER),
    ],
)
@pytest.mark.parametrize("error", [0.3, float("nan"), float("inf")])
def test_t6_a_failing_case_lowers_the_claim(
    claimed: AttentionCGSupport,
    failing: list[int | None],
    verified: AttentionCGSupport,
    error: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lowered: list[LoweredClaim] = []

    def measure(case: ClaimCase) -> float:
        return error if case.uniform_token_count in failing else 1e-4

    got = verify_claim("fake", claimed, CASES, measure, 1e-2, lowered.append)
    assert got is verified
    changed = verified is not claimed
    assert len(lowered) == len(caplog.records) == int(changed)
    if changed:
        assert f"using {verified.name}" in caplog.text
        assert (lowered[0].claimed, lowered[0].verified) == (claimed, verified)
