"""Graphs of one device: recording, replay, and the memory pool that they share.

`CudaGraphs` records with torch.cuda; tests record on the CPU. Nothing here knows models or
batches.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """A recorded sequence of launches."""

    def replay(self) -> None:
        """Run the recorded launches on the current stream."""

    def reset(self) -> None:
        """Free the graph's memory; it cannot be replayed afterwards."""


class GraphBackend(Protocol):
    """Records graphs on one kind of device."""

    def create_pool(self) -> Any:
        """A new memory pool handle."""

    def capturing(self) -> AbstractContextManager[None]:
        """A context for warm-ups and captures, on the capture stream; waits before and after."""

    def begin(self, pool: Any) -> Graph:
        """Start recording: from now on launches are recorded, not executed."""

    def end(self, graph: Graph) -> None:
        """Stop recording; the graph can be replayed afterwards."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """A view that does not own the memory, so that a later capture in the pool may reuse it."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def memory_used(self) -> int:
        """Bytes of device memory in use, by all processes."""

    def release_unused(self) -> None:
        """Return cached, unused memory to the device."""


class GraphPool:
    """The memory pool of one device, shared by all graph managers: the target's and the drafter's.

    Sharing is safe because graphs of one pool never run at the same time, and each graph copies the
    outputs that outlive its replay to buffers outside the pool.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend
        self._handle: Any = None
        self._num_graphs = 0  # graphs in the pool

    @property
    def handle(self) -> Any:
        """The pool handle for the next capture."""
        if self._handle is None:
            self._handle = self.backend.create_pool()
        return self._handle

    def add_graphs(self, count: int) -> None:
        """Count graphs that were captured into the pool, or (negative) dropped.

        The allocator frees a pool with its last graph and then refuses captures into it, so the
        next capture gets a new pool.
        """
        self._num_graphs += count
        if count < 0 and self._num_graphs == 0:
            self._handle = None

    @contextmanager
    def throw_away(self) -> Iterator[None]:
        """A context in which *all* managers capture into a temporary pool.

        Their graphs must be dropped inside.
        """
        kept = self._handle, self._num_graphs
        self._handle, self._num_graphs = None, 0
        try:
            yield
        finally:
            self._handle, self._num_graphs = kept
            self.backend.release_unused()


@contextmanager
def paused_garbage_collector(collect: bool = True) -> Iterator[None]:
    """A context without garbage collection, as freeing a device object would break a capture.

    With `collect` it collects before, which is slow at start-up; nested uses do not repeat it.
    """
    if not gc.isenabled():
        yield
        return
    if collect:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spare_modules() -> None:
    """Exempt all existing objects from garbage collection; only the first call has an effect.

    A start-up collects five times or more, and imported modules would be most of what each
    collection visits.
    """
    if not gc.get_freeze_count():
        gc.freeze()


class _Borrowed:
    """Memory that torch reads through the CUDA array interface, as bytes, without owning it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class CudaGraphs:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def create_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.synchronize(self.device)

    def begin(self, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (channel, weight loading) may use CUDA at the same time.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph

    def end(self, graph: Graph) -> None:
        assert isinstance(graph, torch.cuda.CUDAGraph)
        graph.capture_end()

    def borrow(self, tensor: Tensor) -> Tensor:
        # The array interface does not support bfloat16: borrow bytes and view them.
        if tensor.numel() == 0:
            return tensor
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        raw = _Borrowed(tensor.data_ptr(), extent * tensor.element_size())
        flat = torch.as_tensor(raw, device=self.device).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory_used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def release_unused(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
