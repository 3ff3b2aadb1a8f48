"""Attention back ends on the CPU: their choice, their claims, and their calls of fake packages."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.runner.attention import choice
from slipstream.runner.attention.base import (
    AttentionBackend,
    AttentionLayer,
    BuilderSizes,
    CommonAttentionMetadata,
    Rotary,
)
from slipstream.runner.attention.choice import UnusableBackend, choose_backend
from slipstream.runner.attention.flash_mla import FlashMLABackend, FlashMLABuilder
from slipstream.runner.attention.flashinfer import FlashInferBackend, FlashInferBuilder
from slipstream.runner.attention.reference import ReferenceBuilder
from slipstream.runner.attention.triton import TritonBackend, TritonBuilder, TritonMetadata

CPU = torch.device("cpu")
GQA = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
MLA = AttentionLayer(
    0, num_heads=4, num_kv_heads=1, head_dim=576, scale=0.07, head_dim_v=512, is_mla=True
)


def batch_of(
    query_lens: list[int],
    seq_lens: list[int],
    page: int = 16,
    padded_to: int = 0,
    tokens_padded: int = 0,
) -> CommonAttentionMetadata:
    """A padded batch over shuffled pages; padding as `CommonAttentionMetadata` describes it."""
    live, num_reqs = len(query_lens), max(padded_to, len(query_lens))
    starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
    starts[1 : live + 1] = torch.tensor(query_lens).cumsum(0)
    starts[live + 1 :] = starts[live]
    lens = torch.zeros(num_reqs, dtype=torch.int32)
    lens[:live] = torch.tensor(seq_lens)
    per_req = -(-max(seq_lens) // page)
    table = torch.zeros(num_reqs, per_req, dtype=torch.int32)
    table[:live] = (torch.randperm(live * per_req) + 1).view(live, per_req).int()
    tokens = int(starts[live])
    rows = torch.arange(live).repeat_interleave(torch.tensor(query_lens))
    positions = (lens[:live] - torch.tensor(query_lens))[rows] + torch.arange(tokens) - starts[rows]
    slots = torch.full((max(tokens, tokens_padded),), -1)
    slots[:tokens] = table[rows, positions // page].long() * page + positions % page
    return CommonAttentionMetadata(
        num_reqs, slots.shape[0], max(query_lens), 1 << 12, starts, starts.clone(), lens,
        lens.clone(), table, slots,
    )  # fmt: skip


def tensors_of(
    layer: AttentionLayer, common: CommonAttentionMetadata, page: int = 16
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    tokens, blocks = common.num_actual_tokens, int(common.block_table.max()) + 1
    query = torch.randn(tokens, layer.num_heads, layer.head_dim)
    key = torch.randn(tokens, layer.num_kv_heads, layer.head_dim)
    if layer.is_mla:
        return query, key, None, torch.randn(blocks, page, 1, layer.head_dim)
    return query, key, torch.randn_like(key), torch.randn(2, blocks, page, 2, layer.head_dim)


def expected_of(
    layer: AttentionLayer, common: CommonAttentionMetadata, tensors: Any
) -> tuple[Tensor, Tensor]:
    """The reference back end's output, and the cache after it."""
    query, key, value, cache = tensors
    builder = ReferenceBuilder(cache.shape[-3], layer.sliding_window, torch.float32)
    cache = cache.clone()
    return builder.build(common).attend(layer, query, key, value, cache), cache


def full(num_reqs: int, length: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(CUDAGraphMode.FULL, num_reqs * length, num_reqs, length)


# --- choice --------------------------------------------------------------------------------------


def test_auto_on_the_cpu_says_what_and_why_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_backend("auto", [GQA], CPU).name == "reference"
    assert len(caplog.records) == 1
    assert "attention back end: reference, plain torch" in caplog.text


@pytest.mark.parametrize(
    ("layer", "flash_mla", "name", "words"),
    [
        (GQA, None, "triton", "triton, which supports graphs"),
        (MLA, None, "flash_mla", "flash_mla, with kernels for latent attention"),
        (MLA, "it is broken", "triton", "(not flash_mla: it is broken)"),
    ],
)
def test_auto_on_a_gpu_picks_by_model_and_packages(
    layer: AttentionLayer,
    flash_mla: str | None,
    name: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(choice, "is_card", lambda device: True)
    monkeypatch.setattr(FlashMLABackend, "check", lambda self, layers, device: flash_mla)
    monkeypatch.setattr(TritonBackend, "check", lambda self, layers, device: None)
    assert choose_backend("auto", [layer], torch.device("cuda")).name == name
    assert len(caplog.records) == 1 and words in caplog.text


@pytest.mark.parametrize("name", ["flashinfer", "flash_mla"])
def test_a_missing_package_is_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"flashinfer": "flashinfer-python", "flash_mla": "sgl-flash-mla"}[name]
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    layer = MLA if name == "flash_mla" else GQA
    with pytest.raises(UnusableBackend, match=f"the package {package} cannot be imported"):
        choose_backend(name, [layer], torch.device("cuda"))


def test_the_stub_package_of_the_same_import_name_is_recognised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", ModuleType("flash_mla"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = FlashMLABackend.check([MLA], torch.device("cuda"))
    assert reason is not None and "is not sgl-flash-mla" in reason


@pytest.mark.parametrize(
    ("backend", "layer", "words"),
    [
        (FlashMLABackend, GQA, "only supports latent attention with rows of 576"),
        (FlashMLABackend, MLA, "needs a CUDA device"),
        (FlashInferBackend, MLA, "use flash_mla or triton"),
        (FlashInferBackend, GQA, "needs a CUDA device"),
        (TritonBackend, AttentionLayer(0, 4, 2, 8, scale=0.2), "head sizes of 16 to 512, not 8"),
        (
            TritonBackend,
            AttentionLayer(0, 4, 2, 576, scale=0.2),
            "head sizes of 16 to 512, not 576",
        ),
    ],
)
def test_layers_that_a_back_end_cannot_run(
    backend: type[AttentionBackend], layer: AttentionLayer, words: str
) -> None:
    reason = backend.check([layer], CPU)
    assert reason is not None and words in reason


def test_a_back_end_that_cannot_be_imported_breaks_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(choice._BACKENDS, "triton", ("no_such_module", "None"))
    monkeypatch.setattr(choice, "is_card", lambda device: device.type == "cuda")
    with pytest.raises(UnusableBackend, match="no_such_module"):
        choose_backend("triton", [GQA], CPU)
    assert choose_backend("auto", [GQA], torch.device("cuda")).name == "reference"


# --- Triton --------------------------------------------------------------------------------------


def test_triton_bakes_the_descriptors_bound_and_not_the_dummys() -> None:
    common = batch_of([1, 1], [3, 4])
    mixed = BatchExecutionDescriptor(CUDAGraphMode.FULL, 32, 4)
    piecewise = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 32)
    cases = [(None, 1), (full(2, 6), 6), (mixed, 32), (piecewise, 1)]
    for desc, bound in cases:
        assert TritonBuilder().build(common, desc)._rows.max_query_len == bound


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_triton_metadata_equals_the_reference(
    interpreted: bool, rotary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpreted:
        monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    common = batch_of([3, 1], [20, 33], padded_to=3, tokens_padded=6)
    query, key, value, cache = tensors_of(GQA, common)
    table = torch.randn(64, 64)
    turn = Rotary(torch.randint(0, 64, (6,)), table)
    turned = turn.rotate(query, key) if rotary else (query, key)
    expected, after = expected_of(GQA, common, (*turned, value, cache))
    builder = TritonBackend().create_builder([GQA], BuilderSizes(4, 3, 6, 64, torch.float32, CPU))
    metadata = builder.build(common, full(3, 3))
    if rotary:
        if interpreted:  # one kernel, and not these two
            for name in ("rotary_store_kv", "paged_attention"):
                monkeypatch.setattr(f"slipstream.kernels.attention.rotary_attention.{name}", None)
        got = metadata.rotate_and_attend(GQA, query, key, value, cache, turn)
    else:
        got = metadata.attend(GQA, query, key, value, cache)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, after, rtol=1e-6, atol=1e-6)


# --- FlashMLA, with a fake package ---------------------------------------------------------------


class FakeSchedule:
    def __init__(self) -> None:
        self.lens: list[int] | None = None


class FakeFlashMLA:
    """Plans at a schedule's first call and computes by that plan, like the real kernel."""

    def __init__(self) -> None:
        self.schedules: list[FakeSchedule] = []
        self.calls: list[dict[str, Any]] = []

    def create(self) -> FakeSchedule:
        self.schedules.append(FakeSchedule())
        return self.schedules[-1]

    def decode(
        self, q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, dim_v: int,
        schedule: FakeSchedule, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert bool((lens >= q.shape[1]).all()), "the kernel is not defined for shorter lengths"
        if schedule.lens is None:
            schedule.lens = lens.tolist()
        assert schedule.lens == lens.tolist(), "stale plan"
        self.calls.append(options)
        starts = torch.arange(q.shape[0] + 1).int() * q.shape[1]
        rows = PagedRows(table, starts, lens, q.shape[1], starts)  # no slots: only reads
        rule = AttentionRule(scale=options["softmax_scale"], is_mla=True, head_dim_v=dim_v)
        out = paged_attention_reference(q.flatten(0, 1), cache, rows, rule)
        return out.view(*q.shape[:3], dim_v), lens


@pytest.mark.parametrize("length", [1, 4])
def test_flash_mla_uses_one_schedule_a_step_and_never_two_steps(length: int) -> None:
    fake = FakeFlashMLA()
    builder = FlashMLABuilder(fake.create, fake.decode)
    for lens in ([70, 5], [130, 64]):
        common = batch_of([length] * 2, lens, 64, padded_to=3, tokens_padded=3 * length)
        tensors = tensors_of(MLA, common, 64)
        metadata = builder.build(common, full(3, length))
        expected, after = expected_of(MLA, common, tensors)
        for _ in range(2):  # two layers
            got = metadata.attend(MLA, *tensors)
        real = 2 * length
        torch.testing.assert_close(got[:real], expected[:real], rtol=1e-5, atol=1e-5)
        assert got.isfinite().all()
        assert torch.equal(tensors[3], after)
    assert len(fake.schedules) == 2
    expected_options = {"softmax_scale": MLA.scale, "causal": True, "use_legacy": True}
    assert fake.calls == [expected_options] * 4


def test_flash_mla_leaves_other_batches_to_triton() -> None:
    fake = FakeFlashMLA()
    builder = FlashMLABuilder(fake.create, fake.decode)
    for query_lens in ([3, 1], [40, 40]):
        common = batch_of(query_lens, [70, 66], 64)
        tensors = tensors_of(MLA, common, 64)
        metadata = builder.build(common)
        assert isinstance(metadata, TritonMetadata)
        expected, _ = expected_of(MLA, common, tensors)
        torch.testing.assert_close(metadata.attend(MLA, *tensors), expected, rtol=1e-5, atol=1e-5)
    assert not fake.calls
    assert FlashMLABackend.block_size(16) == 64 and TritonBackend.block_size(16) == 16


# --- FlashInfer, with fake wrappers --------------------------------------------------------------


class FakeWrapper:
    """Attends by its plan: it reads pages from the plan's buffers, not from the block table."""

    layout = [7, 7]

    def __init__(self, workspace: Tensor, kind: str, **options: Any) -> None:
        self.options, self.kind = options, kind

    def reset_workspace_buffer(self, workspace: Tensor, plan: Tensor) -> None:
        pass

    def run(self, query: Tensor, caches: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        starts, indptr, indices, last = self.planned
        pages = indptr[1:] - indptr[:-1]
        page = caches[0].shape[1]
        table = torch.zeros(pages.shape[0], int(pages.max()), dtype=torch.int32)
        for row, count in enumerate(pages.tolist()):
            table[row, :count] = indices[int(indptr[row]) : int(indptr[row]) + count]
        lens = ((pages - 1) * page + last).int()
        window = self.settings["window_left"]
        rows = PagedRows(table, starts, lens, 1, starts)  # no slots: only reads
        scale, window = self.settings["sm_scale"], None if window < 0 else window + 1
        rule = AttentionRule(scale=scale, sliding_window=window)
        return out.copy_(paged_attention_reference(query, torch.stack(caches), rows, rule))

    def note(self, starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor) -> None:
        assert bool((last >= 1).all()) and bool((indptr[1:] > indptr[:-1]).all())
        self.planned = (starts, indptr, indices, last)
        self._plan_info = list(self.layout)


class FakeDecode(FakeWrapper):
    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **kw: Any) -> None:
        self.settings = kw
        self.note(torch.arange(indptr.shape[0]).int(), indptr, indices, last)


class FakePrefill(FakeWrapper):
    def plan(self, starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int,
             **kw: Any) -> None:  # fmt: skip
        assert kw["causal"]
        self.settings = kw
        self.note(starts, indptr, indices, last)


FAKE_FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=FakeDecode, BatchPrefillWithPagedKVCacheWrapper=FakePrefill
)


def flashinfer_builder(layer: AttentionLayer = GQA) -> FlashInferBuilder:
    workspace = torch.zeros(8, dtype=torch.uint8)
    return FlashInferBuilder(FAKE_FLASHINFER, layer, 16, 4, 256, torch.float32, workspace)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("length", [1, 4])
def test_flashinfer_plans_every_replay_with_exact_lengths(length: int, window: int | None) -> None:
    layer = AttentionLayer(0, 4, 2, 64, scale=0.2, sliding_window=window)
    builder = flashinfer_builder(layer)
    for lens in ([60, 17], [200, 33]):
        common = batch_of([length] * 2, lens, padded_to=3, tokens_padded=3 * length)
        tensors = tensors_of(layer, common)
        expected, _ = expected_of(layer, common, tensors)
        metadata = builder.build(common, full(3, length))
        got = metadata.attend(layer, *tensors)
        real = 2 * length
        torch.testing.assert_close(got[:real], expected[:real], rtol=1e-5, atol=1e-5)
    (wrapper,) = builder._wrappers.values()
    assert type(wrapper) is (FakeDecode if length == 1 else FakePrefill)
    assert wrapper.options["use_cuda_graph"]


def test_flashinfer_runs_mixed_batches_without_a_graph() -> None:
    builder, common = flashinfer_builder(), batch_of([9, 1, 3], [20, 40, 3])
    tensors = tensors_of(GQA, common)
    expected, _ = expected_of(GQA, common, tensors)
    got = builder.build(common).attend(GQA, *tensors)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_trap_19_a_flashinfer_plan_that_differs_from_the_graphs_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    builder, common = flashinfer_builder(), batch_of([1, 1], [20, 40])
    assert builder.build_for_capture(common, full(2, 1)).can_replay
    assert builder.build(common, full(2, 1)).can_replay
    monkeypatch.setattr(FakeWrapper, "layout", [7, 8])
    caplog.clear()
    for _ in range(3):
        assert not builder.build(common, full(2, 1)).can_replay
    assert builder.build(common).can_replay  # eager anyway
    assert builder.num_eager_fallbacks == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
