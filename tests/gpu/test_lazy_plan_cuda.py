"""Stale attention plans of FlashMLA (vllm#42444) and of FlashInfer, on a GPU.

With a stale plan the output must be wrong, and with a fresh plan it must be right.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.runner.attention.base import AttentionLayer
from slipstream.runner.claims.case import ClaimSetup, ClaimTrial
from slipstream.runner.graphs.capture import CudaGraphs, GraphPool
from slipstream.runner.graphs.manager import relative_error

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))

from graph_nodes import kernel_nodes  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LENS = [8192, 70, 3000, 517]


def package(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the package {name} is not installed")
    return importlib.import_module(name)


class MLACase:
    """A dense MLA decode of requests with different lengths, from a shuffled KV cache.

    Graphs read `lens` and write `out` at fixed addresses, so that lengths can change in between.
    """

    def __init__(self, flash_mla: Any, num_heads: int, query_len: int) -> None:
        torch.manual_seed(num_heads + query_len)
        self.module, count = flash_mla, len(LENS)
        pages = -(-max(LENS) // 64)
        self.query = torch.randn(
            count, query_len, num_heads, 576, device="cuda", dtype=torch.bfloat16
        )
        self.cache = torch.randn(1 + count * pages, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
        self.table = (torch.randperm(count * pages, device="cuda") + 1).int().view(count, pages)
        self.lens = torch.full((count,), max(1, query_len), dtype=torch.int32, device="cuda")
        self.out = torch.zeros(
            count, query_len, num_heads, 512, device="cuda", dtype=torch.bfloat16
        )

    def run(self, schedule: Any) -> None:
        out, _ = self.module.flash_mla_with_kvcache(
            self.query, self.cache, self.table, self.lens, 512, schedule,
            softmax_scale=0.07, causal=True, use_legacy=True,
        )  # fmt: skip
        self.out.copy_(out)

    def capture(self, schedule: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            self.run(schedule)
        return graph

    def error(self) -> float:
        """The relative error of `out` against attention in fp32."""
        count, length = self.query.shape[:2]
        starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
        rows = PagedRows(self.table, starts, self.lens, length, starts)  # the slots are not used
        rule = AttentionRule(scale=0.07, is_mla=True, head_dim_v=512)
        query = self.query.float().flatten(0, 1)
        expected = paged_attention_reference(query, self.cache.float(), rows, rule)
        return relative_error(self.out.flatten(0, 1), expected)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("num_heads", [16, 64, 128])
def test_flash_mla_needs_a_fresh_schedule_at_capture(num_heads: int, query_len: int) -> None:
    flash_mla = package("flash_mla")
    with torch.inference_mode():
        case = MLACase(flash_mla, num_heads, query_len)
        shared, fresh = (flash_mla.get_mla_metadata()[0] for _ in range(2))
        case.run(shared)  # computes the plan, for short lengths
        bad, good = case.capture(shared), case.capture(fresh)
        case.lens.copy_(torch.tensor(LENS))
        bad.replay()
        bad_error = case.error()
        case.out.fill_(float("nan"))
        good.replay()
        good_error = case.error()
        # other lengths: this graph computes the plan at each replay
        case.lens.copy_(torch.tensor(LENS[::-1]))
        good.replay()
        again = case.error()
    assert bad_error > 0.1, bad_error
    assert max(good_error, again) < 5e-3, (good_error, again)
    assert kernel_nodes(good) > kernel_nodes(bad)  # it also has the planning kernel


PAGE_BYTES = 65 * 576  # of 64 rows of 584 bytes, padded as the kernel wants


def packed_pages(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [pages, 64, 512] in FlashMLA's format of DeepSeek V4, and the numbers that it holds.

    Of each row, 448 values are e4m3 with a power of two as scale for each 64, and 64 stay bf16;
    the scales of a page's rows follow its rows.
    """
    pages = len(rows)
    low, rest = rows[..., :448].float().view(pages, 64, 7, 64), rows[..., 448:]
    exponents = (low.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil()  # [pages, 64, 7]
    codes = (low / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    page = torch.zeros(pages, PAGE_BYTES, dtype=torch.uint8, device=rows.device)
    data = page[:, : 64 * 576].view(pages, 64, 576)
    data[..., :448] = codes.view(torch.uint8).flatten(2)
    data[..., 448:] = rest.contiguous().view(torch.uint8)
    scales = page[:, 64 * 576 : 64 * 584].view(pages, 64, 8)
    scales[..., :7] = (exponents + 127).to(torch.uint8)
    numbers = codes.float() * exponents.exp2()[..., None]
    cache = page.as_strided((pages, 64, 1, 584), (PAGE_BYTES, 584, 584, 1))
    return cache, torch.cat((numbers.flatten(2), rest.float()), dim=-1)


class SparseCase:
    """A decode of DeepSeek V4: raw rows in one cache, compressed ones in another, with sinks.

    Graphs read the two tensors of counts and write `out` at fixed addresses.
    """

    def __init__(self, flash_mla: Any, num_heads: int) -> None:
        torch.manual_seed(num_heads)
        self.module = flash_mla
        make = torch.randn
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.query = make(4, 1, num_heads, 512, **options)
        self.sinks = make(num_heads, device="cuda")
        self.caches, self.rows, self.indices, self.counts = [], [], [], []
        for width in (128, 4096):
            cache, rows = packed_pages(make(160, 64, 512, **options))
            self.caches.append(cache)
            self.rows.append(rows.flatten(0, 1))
            order = torch.rand(4, 160 * 64, device="cuda").argsort(1)
            self.indices.append(order[:, None, :width].int().contiguous())
            self.counts.append(torch.full((4,), 64, dtype=torch.int32, device="cuda"))
        self.out = torch.zeros(4, 1, num_heads, 512, **options)

    def run(self, schedule: Any) -> None:
        out, _ = self.module.flash_mla_with_kvcache(
            self.query, self.caches[0], None, None, 512, schedule, softmax_scale=512**-0.5,
            is_fp8_kvcache=True, indices=self.indices[0], topk_length=self.counts[0],
            attn_sink=self.sinks, extra_k_cache=self.caches[1],
            extra_indices_in_kvcache=self.indices[1], extra_topk_length=self.counts[1],
            use_legacy=True, kv_format="V4",
        )  # fmt: skip
        self.out.copy_(out)

    def capture(self, schedule: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            self.run(schedule)
        return graph

    def error(self) -> float:
        """The relative error of `out` against attention in fp32 over the same numbers."""
        expected = torch.empty_like(self.out, dtype=torch.float32)
        for request in range(4):
            listed = [
                rows[indices[request, 0, : int(counts[request])].long()]
                for rows, indices, counts in zip(self.rows, self.indices, self.counts, strict=True)
            ]
            keys = torch.cat(listed)
            scores = self.query[request, 0].float() @ keys.T * 512**-0.5
            shares = torch.cat((scores, self.sinks[:, None]), 1).softmax(1)[:, :-1]
            expected[request, 0] = shares @ keys
        return relative_error(self.out, expected)


@pytest.mark.parametrize("num_heads", [64, 128])
def test_sparse_flash_mla_needs_a_fresh_schedule_at_capture(num_heads: int) -> None:
    flash_mla = package("flash_mla")
    with torch.inference_mode():
        case = SparseCase(flash_mla, num_heads)
        shared, fresh = (flash_mla.get_mla_metadata()[0] for _ in range(2))
        case.run(shared)  # computes the plan, for short lists
        assert case.error() < 2e-2
        bad, good = case.capture(shared), case.capture(fresh)
        case.counts[0].copy_(torch.tensor([128, 100, 64, 128]))
        case.counts[1].copy_(torch.tensor([4096, 64, 2000, 512]))
        bad.replay()
        bad_error = case.error()
        case.out.fill_(float("nan"))
        good.replay()
        good_error = case.error()
        case.counts[1].copy_(torch.tensor([512, 4096, 64, 3000]))
        good.replay()  # this graph computes the plan at each replay
        again = case.error()
    assert bad_error > 0.1, bad_error
    assert max(good_error, again) < 2e-2, (good_error, again)
    assert kernel_nodes(good) > kernel_nodes(bad)  # it also has the planning kernel


@pytest.mark.parametrize("query_len", [1, 4])
def test_flashinfer_needs_a_plan_before_each_replay(query_len: int) -> None:
    package("flashinfer")
    from slipstream.runner.attention.flashinfer import FlashInferBackend

    device = torch.device("cuda", 0)
    layer = AttentionLayer(0, num_heads=8, num_kv_heads=2, head_dim=128, scale=0.09)
    num_tokens = 4 * query_len
    desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens, 4, query_len)
    with torch.inference_mode():
        trial = ClaimTrial(
            FlashInferBackend(),
            layer,
            ClaimSetup(max_len=8192),
            torch.bfloat16,
            device,
            GraphPool(CudaGraphs(device)),
        )
        query_lens = [query_len] * 4
        common = trial.fill(desc, query_lens, [64] * 4)
        trial.forward(num_tokens, trial.state(trial.builder.build_for_capture(common, desc)))
        state = trial.state(trial.builder.build_for_capture(common, desc))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            trial.forward(num_tokens, state)
        workspace = trial.builder._workspace.data_ptr()  # type: ignore[attr-defined]
        for step, lens in enumerate(([8192, 70, 3000, 517], [100, 8000, 64, 4096])):
            common = trial.fill(desc, query_lens, lens)
            if step == 0:
                graph.replay()  # with the plan of the capture
                stale = trial.output[:num_tokens].clone()
            assert trial.builder.build(common, desc).can_replay
            trial.output.fill_(float("nan"))
            graph.replay()
            rows = PagedRows(
                common.block_table,
                common.query_start_loc,
                common.seq_lens,
                query_len,
                common.slot_mapping,
            )
            query = trial.query[:num_tokens].float()
            expected = paged_attention_reference(query, trial.cache.float(), rows, layer)
            assert relative_error(trial.output[:num_tokens], expected) < 8e-3
            if step == 0:
                assert relative_error(stale, expected) > 0.1
        assert workspace == trial.builder._workspace.data_ptr()  # type: ignore[attr-defined]
