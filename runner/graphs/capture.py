"""What a graph is: begin, end, replay, and the memory pool that all graphs of one device share.

`CudaGraphs` does it with torch.cuda, `graph_recorder.RecordedGraphs` does it on the CPU. Knows
nothing about models or batches.
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
        """Give the graph's memory back; it cannot be replayed any more."""


class GraphBackend(Protocol):
    """How this device records graphs."""

    def create_pool(self) -> Any:
        """A new memory pool handle."""

    def capturing(self) -> AbstractContextManager[None]:
        """Where warm-ups and captures run: the capture stream, joined before and after."""

    def begin(self, pool: Any) -> Graph:
        """Start recording; what is launched from here on is recorded and not executed."""

    def end(self, graph: Graph) -> None:
        """Stop recording; the graph can be replayed."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory without owning it, so that a later capture of the pool may reuse it."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def memory_used(self) -> int:
        """Bytes of device memory in use by everyone."""

    def release_unused(self) -> None:
        """Return cached, unused memory to the device."""


class GraphPool:
    """The memory pool of one device, shared by every manager: the target's and the drafter's.

    Sharing is safe because graphs of one pool never run at once and outputs that outlive a replay
    are copied, inside the graph, to buffers from outside the pool.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend
        self._handle: Any = None
        self._num_graphs = 0  # that live in it

    @property
    def handle(self) -> Any:
        """The pool that captures use now."""
        if self._handle is None:
            self._handle = self.backend.create_pool()
        return self._handle

    def add_graphs(self, count: int) -> None:
        """Graphs were captured into the pool, or (negative) dropped.

        The allocator gives a pool up with its last graph and refuses captures into it from then on,
        so the next capture gets a new one.
        """
        self._num_graphs += count
        if count < 0 and self._num_graphs == 0:
            self._handle = None

    @contextmanager
    def throw_away(self) -> Iterator[None]:
        """Redirect the captures of *all* managers to a temporary pool; drop their graphs inside."""
        kept = self._handle, self._num_graphs
        self._handle, self._num_graphs = None, 0
        try:
            yield
        finally:
            self._handle, self._num_graphs = kept
            self.backend.release_unused()


@contextmanager
def paused_garbage_collector(collect: bool = True) -> Iterator[None]:
    """No collection inside: freeing a device object in the middle of a capture would break it.

    Collecting walks all that start-up has made: of nested uses only the outermost does, if at all.
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
    """From now on no collection walks what was imported: a start has five and more, and modules
    are nearly all that they would look at. Once in a process."""
    if not gc.get_freeze_count():
        gc.freeze()


class _Borrowed:
    """Foreign memory as torch reads it through the CUDA array interface (bytes, not owned)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class CudaGraphs:
    """Graphs of a CUDA device."""

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
        # thread_local: other threads (channel, weight loading) may use CUDA meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph

    def end(self, graph: Graph) -> None:
        assert isinstance(graph, torch.cuda.CUDAGraph)
        graph.capture_end()

    def borrow(self, tensor: Tensor) -> Tensor:
        # The array interface knows no bfloat16: borrow bytes and view them.
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
