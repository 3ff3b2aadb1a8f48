"""Graphs on the CPU: torch operations are recorded without being executed, and replayed later.

They replace CUDA graphs in tests of capture, padding and stale state. Python code runs once, at
capture; torch operations run at each replay. Values computed during a capture are poison, and
reading a value on the host raises an error, as it does in a CUDA capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .capture import Graph

_aten = torch.ops.aten
# They only allocate; a CUDA graph has no node for them either.
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.empty_like.default,
}
_HOST_READS = {
    _aten._local_scalar_dense.default,
    _aten.item.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
}


class HostReadDuringCapture(RuntimeError):
    """Code under capture reads a value on the host."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} reads device data while a graph is being captured")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, nodes: list[tuple[str, Callable[[], None]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes = nodes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HOST_READS:
            raise HostReadDuringCapture(str(func))
        if func in _ALLOCATIONS:
            return _poison(func(*args, **kwargs))
        if func is _aten.lift_fresh.default:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self.nodes.append((str(func), lambda: func(*args, **kwargs)))
            return _written_arguments(func, args, kwargs)
        # Without side effects: run it now for shapes and types, return poison, compute at replay.
        result = func(*args, **kwargs)
        outputs = list(_tensors(result))
        # Views compute nothing. Whether `to` or `reshape` is a view depends on its arguments.
        if _storages(outputs) <= _storages(_tensors((args, kwargs))):
            return result

        def compute() -> None:
            fresh = func(*args, **kwargs)
            if isinstance(fresh, Tensor):
                outputs[0].copy_(fresh)
                return
            for output, value in zip(outputs, _tensors(fresh), strict=True):
                output.copy_(value)

        self.nodes.append((str(func), compute))
        return _poison(result)


def _tensors(values: object) -> Iterator[Tensor]:
    """All tensors in an operation's arguments or results. (torch's own tree walk is much
    slower.)"""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _poison(result: Any) -> Any:
    for tensor in _tensors(result):
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.zero_()  # an integer may be used as an index, so it must be in range
    return result


def _written_arguments(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an in-place or out= operation: the arguments that it writes."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(kwargs.get(argument.name, args[index] if index < len(args) else None))
    returns = len(func._schema.returns)
    if returns == 0:
        return None
    return written[0] if returns == 1 else tuple(written[:returns])


class RecordedGraph:
    """Recorded operations in order; `node_names` lists them."""

    def __init__(self) -> None:
        self._nodes: list[tuple[str, Callable[[], None]]] = []
        self._recorder = _Recorder(self._nodes)
        self._inference = torch.is_inference_mode_enabled()

    @property
    def node_names(self) -> list[str]:
        """Names of the recorded operations."""
        return [name for name, _ in self._nodes]

    def replay(self) -> None:
        with torch.inference_mode(self._inference), torch.no_grad():
            for _, node in self._nodes:
                node()

    def reset(self) -> None:
        self._nodes.clear()


class RecordedGraphs:
    """A `GraphBackend` for the CPU; `graphs` keeps every graph that it recorded."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.pools_of_graphs: list[int] = []
        self._num_pools = 0

    def create_pool(self) -> int:
        self._num_pools += 1
        return self._num_pools

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def begin(self, pool: Any) -> RecordedGraph:
        graph = RecordedGraph()
        self.graphs.append(graph)
        self.pools_of_graphs.append(pool)
        graph._recorder.__enter__()  # type: ignore[no-untyped-call]
        return graph

    def end(self, graph: Graph) -> None:
        assert isinstance(graph, RecordedGraph)
        graph._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor  # recorded operations keep their tensors alive anyway

    def synchronize(self) -> None:
        """Nothing to do: the CPU runs operations at once."""

    def memory_used(self) -> int:
        return 0

    def release_unused(self) -> None:
        """Nothing to do: the CPU caches no memory."""
