"""FlashInfer (package `flashinfer-python`): decode and prefill wrappers, planned on the host.

`plan()` needs exact lengths on the host, but under asynchronous scheduling the host knows only
upper bounds. A plan for a bound may contain tiles after the last key, for which the kernels compute
a negative size. So `build` copies the lengths from the GPU and waits for them once per step; this
back end gives up the overlap of scheduling and running. A graph bakes the layout of a plan, which
is compared after every `plan()`; if it differs, the step runs eagerly.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from ...kernels.attention.store_kv import store_kv
from .base import (
    AttentionBackend,
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    BuilderSizes,
    CommonAttentionMetadata,
)

logger = logging.getLogger(__name__)
_HEAD_DIMS = (64, 128, 256)
_FLOAT_WORKSPACE = 256 << 20  # bytes for partial results of split KV, shared by all wrappers
_INT_WORKSPACE = 2 << 20  # bytes for the plan of each wrapper


class FlashInferMetadata(AttentionMetadata):
    """A planned wrapper, and the slots that this step writes."""

    def __init__(self, wrapper: Any, slot_mapping: Tensor, can_replay: bool) -> None:
        self._wrapper = wrapper
        self._slot_mapping = slot_mapping  # [M*] int64
        self.can_replay = can_replay

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
    ) -> Tensor:
        if key is not None:
            store_kv(key, value, kv_cache, self._slot_mapping, layer.fp8)
        query = query.contiguous()
        # The plan holds the softmax scale that the layers share; a graph bakes those of the cache.
        scales = {}
        if layer.fp8 is not None:
            scales = {"k_scale": layer.fp8.k_scale, "v_scale": layer.fp8.v_scale}
        out: Tensor = self._wrapper.run(
            query, (kv_cache[0], kv_cache[1]), out=torch.empty_like(query), **scales
        )
        return out


class FlashInferBuilder(AttentionBuilder):
    """Has one wrapper per captured (requests, query length), and one for all eager steps."""

    supports = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        module: Any,
        layer: AttentionLayer,
        block_size: int,
        max_num_reqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        workspace: Tensor,  # [bytes] uint8
    ) -> None:
        device = workspace.device
        self._module = module
        self._layer = layer
        self._block_size = block_size
        self._dtype = dtype
        self._workspace = workspace
        pages = max_num_reqs * (-(-max_model_len // block_size))

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        # Graphs bake these addresses. Each wrapper uses the first elements of the buffers.
        self._query_indptr = ints(max_num_reqs + 1)
        self._page_indptr = ints(max_num_reqs + 1)
        self._page_indices = ints(pages)
        self._last_page_len = ints(max_num_reqs)
        self._wrappers: dict[tuple[int, int], Any] = {}  # by (num_reqs, query_len); (0, 0) = eager
        self._baked: dict[tuple[int, int], list[int]] = {}  # the plan layout that each graph bakes
        self._compiled = False
        self.num_eager_fallbacks = 0

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> FlashInferMetadata:
        key = _graph_key(desc)
        wrapper = self._plan(common, key)
        can_replay = key not in self._baked or _layout(wrapper) == self._baked[key]
        if not can_replay:
            if self.num_eager_fallbacks == 0:
                logger.warning("a FlashInfer plan differs from its graph's; such steps run eagerly")
            self.num_eager_fallbacks += 1
        return FlashInferMetadata(wrapper, common.slot_mapping, can_replay)

    def build_for_capture(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor
    ) -> FlashInferMetadata:
        key = _graph_key(desc)
        wrapper = self._plan(common, key)
        if key != (0, 0):
            self._baked[key] = _layout(wrapper)
        return FlashInferMetadata(wrapper, common.slot_mapping, True)

    def _plan(self, common: CommonAttentionMetadata, key: tuple[int, int]) -> Any:
        """Plan the wrapper for this step's exact lengths. Waits for the GPU."""
        num_reqs, query_len = key
        if query_len:
            # The graph runs N* x L rows; padded requests read L rows of the null block.
            starts = torch.arange(num_reqs + 1, dtype=torch.int32) * query_len
        else:
            starts = common.query_start_loc_cpu
        num_rows = starts.shape[0] - 1
        seq_lens = common.seq_lens[:num_rows].cpu()  # the wait
        # A padded request has length 0, which `plan` does not accept.
        lens = torch.maximum(seq_lens, (starts[1:] - starts[:-1]).clamp(min=1))
        pages = (lens + self._block_size - 1) // self._block_size  # [N*]
        indptr = torch.zeros(num_rows + 1, dtype=torch.int32)
        indptr[1:] = pages.cumsum(0)
        last_page_len = lens - (pages - 1) * self._block_size
        indices = _page_indices(common.block_table, indptr, pages)
        if not self._compiled:
            logger.info(
                "FlashInfer compiles its kernels for head size %d on first use (about 30 s)",
                self._layer.head_dim,
            )
            self._compiled = True
        wrapper = self._wrapper(key)
        layer = self._layer
        options = {
            "pos_encoding_mode": "NONE",
            "window_left": -1 if layer.sliding_window is None else layer.sliding_window - 1,
            "logits_soft_cap": layer.softcap,
            "sm_scale": layer.scale,
            "q_data_type": self._dtype,
            "kv_data_type": layer.cache_dtype or self._dtype,
        }
        shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim, self._block_size)
        if query_len == 1:
            wrapper.plan(indptr, indices, last_page_len, *shape, **options)
        else:
            wrapper.plan(starts, indptr, indices, last_page_len, *shape, causal=True, **options)
        return wrapper

    def _wrapper(self, key: tuple[int, int]) -> Any:
        if key in self._wrappers:
            return self._wrappers[key]
        num_reqs, query_len = key
        buffers = {
            "paged_kv_indptr": self._page_indptr[: num_reqs + 1],
            "paged_kv_indices": self._page_indices,
            "paged_kv_last_page_len": self._last_page_len[:num_reqs],
        }
        if query_len == 1:
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                **{f"{name}_buffer": buffer for name, buffer in buffers.items()},
            )
        elif query_len:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=self._query_indptr[: num_reqs + 1],
                backend="fa2",  # shares its compiled module with tensor-core decode
                **{f"{name}_buf": buffer for name, buffer in buffers.items()},
            )
        else:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa2"
            )
        plan = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self._workspace.device)
        wrapper.reset_workspace_buffer(self._workspace, plan)
        self._wrappers[key] = wrapper
        return wrapper


def _graph_key(desc: BatchExecutionDescriptor | None) -> tuple[int, int]:
    if desc is None or desc.mode is not CUDAGraphMode.FULL:
        return (0, 0)
    assert desc.num_reqs is not None and desc.uniform_token_count is not None
    return (desc.num_reqs, desc.uniform_token_count)


def _layout(wrapper: Any) -> list[int]:
    """The part of a plan that a launch passes as host numbers, and that a graph therefore bakes."""
    return [int(value) for value in wrapper._plan_info]


def _page_indices(block_table: Tensor, indptr: Tensor, pages: Tensor) -> Tensor:
    """The block ids of all requests, concatenated, [pages.sum()] int32 on the device.

    block_table: [>= N*, max_blocks] on the device; indptr: [N* + 1], pages: [N*] on the host.
    """
    rows = torch.repeat_interleave(torch.arange(pages.shape[0]), pages.long())
    columns = torch.arange(int(indptr[-1])) - indptr[:-1].long()[rows]
    flat = (rows * block_table.shape[1] + columns).to(block_table.device, non_blocking=True)
    return block_table.reshape(-1).index_select(0, flat)


class FlashInferBackend(AttentionBackend):
    """Runs FlashInfer's attention on a CUDA device, with or without sliding windows and soft caps.

    It supports head sizes of 64, 128 and 256, but neither MLA nor attention sinks. The layers of a
    KV group must have the same heads, scale and soft cap.
    """

    name = "flashinfer"

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, Tensor] = {}

    @classmethod
    def check(cls, layers: Sequence[AttentionLayer], device: torch.device) -> str | None:
        for layer in layers:
            if layer.is_mla:
                return "it does not support latent attention; use flash_mla or triton"
            if layer.sinks is not None:
                return "it does not support attention sinks; use triton"
            if layer.head_dim not in _HEAD_DIMS:
                sizes = ", ".join(map(str, _HEAD_DIMS))
                return f"it supports head sizes {sizes}, not {layer.head_dim}"
        kinds: dict[object, set[object]] = {}  # kinds of layers, by the plan that they share
        for layer in layers:
            group = (layer.num_kv_heads, layer.head_dim, layer.sliding_window)
            kinds.setdefault(group, set()).add((layer.num_heads, layer.scale, layer.softcap))
        if any(len(kind) > 1 for kind in kinds.values()):
            return "the layers of a KV group differ in heads, scale or soft cap; use triton"
        if device.type != "cuda":
            return "it needs a CUDA device"
        try:
            importlib.import_module("flashinfer")
        except ImportError as error:
            return f"the package flashinfer-python cannot be imported ({error})"
        return None

    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> FlashInferBuilder:
        if sizes.device not in self._workspaces:
            self._workspaces[sizes.device] = torch.zeros(
                _FLOAT_WORKSPACE, dtype=torch.uint8, device=sizes.device
            )
        module = importlib.import_module("flashinfer")
        return FlashInferBuilder(
            module,
            layers[0],
            sizes.block_size,
            sizes.max_num_reqs,
            sizes.max_model_len,
            sizes.dtype,
            self._workspaces[sizes.device],
        )
