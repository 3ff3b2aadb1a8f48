"""Copies a step's results to the host while the GPU continues, and converts them to plain lists.

It knows nothing about how tokens were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..scheduling.plan import RowResult
from .host_copy import CopyStream, HostCopy

# (token id, its logprob, its rank, most likely ids, their logprobs)
Logprob = tuple[int, float, int, list[int], list[float]]


@dataclass(frozen=True)
class TokenLogprobTensors:
    """Log probabilities of P tokens and of the most likely alternatives to each."""

    token_ids: Tensor  # [P] int64
    logprobs: Tensor  # [P] float32
    ranks: Tensor  # [P] int64, 1 = most likely
    top_ids: Tensor  # [P, top] int64
    top_logprobs: Tensor  # [P, top] float32

    def columns(self) -> list[Tensor]:
        return [self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs]


@dataclass(frozen=True)
class PromptChunk:
    """Prompt log probabilities of one batch row in this step."""

    row: int  # batch row
    top: int  # number of alternatives wanted
    tensors: TokenLogprobTensors


@dataclass(frozen=True)
class StepTensors:
    """A step's results on the device. A drafter must not overwrite them."""

    sampled_token_ids: Tensor  # [N, K + 1] int64, -1 beyond num_sampled
    num_sampled: Tensor  # [N] int32
    num_draft_tokens: Tensor  # [N] int32, drafts that are not -1
    has_nan: Tensor  # [N] bool
    logprobs: TokenLogprobTensors | None  # rows = [N * (K + 1)], row-major (batch row, offset)
    prompt_logprobs: Sequence[PromptChunk] = ()

    def all(self) -> list[Tensor]:
        """Every tensor, in a fixed order."""
        tensors = [self.sampled_token_ids, self.num_sampled, self.num_draft_tokens, self.has_nan]
        if self.logprobs is not None:
            tensors += self.logprobs.columns()
        for chunk in self.prompt_logprobs:
            tensors += chunk.tensors.columns()
        return tensors

    def unpack(self, host: list[Tensor]) -> list[Tensor]:
        return host


@dataclass(frozen=True)
class PackedTensors:
    """The fields of `StepTensors` in one tensor, as `token_graphs` writes them: a single copy."""

    packed: Tensor  # [N, K + 4] int64: token ids, num_sampled, num_draft_tokens, has_nan
    logprobs: None = None
    prompt_logprobs: Sequence[PromptChunk] = ()

    def all(self) -> list[Tensor]:
        """The tensor; on the CPU a clone, since the next step overwrites it and no copy is made."""
        return [self.packed.clone() if self.packed.is_cpu else self.packed]

    def unpack(self, host: list[Tensor]) -> list[Tensor]:
        """Split the host's copy into the first four tensors of `StepTensors`."""
        packed = host[0]
        return [packed[:, :-3], packed[:, -3], packed[:, -2], packed[:, -1].bool()]


@dataclass(frozen=True)
class RowLayout:
    """What the host must know to read a step's tensors: one entry per batch row."""

    num_logprobs: list[int | None]  # [N] alternatives wanted per emitted token; None = no logprobs


Results = StepTensors | PackedTensors


class StepHandle:
    """A handle on one step's results, which may still be being computed."""

    def __init__(self) -> None:
        self._output: Future[tuple[Results, HostCopy, RowLayout] | None] = Future()
        self._rows: list[RowResult] | None = None  # set by the first `get`
        # Adds what else the step reports to its results; set before `publish`.
        self.report: Callable[[list[RowResult]], None] | None = None
        self.faults: dict[int, str] = {}  # batch row -> why its request ends; set before `publish`

    def publish(self, tensors: Results, layout: RowLayout, stream: CopyStream | None) -> HostCopy:
        """Start the copy and let `get` return. Call it before the tensors are overwritten."""
        copy = HostCopy(tensors.all(), stream)
        self._output.set_result((tensors, copy, layout))
        return copy

    def publish_empty(self) -> None:
        """Let `get` return an empty list: the step had no rows."""
        self._output.set_result(None)

    def fail(self, error: BaseException) -> bool:
        """Make `get` raise `error`. Returns False if the results are already published."""
        if self._output.done():
            return False
        self._output.set_exception(error)
        return True

    def done(self) -> bool:
        """True if `get` waits at most for a copy, not for the runner."""
        return self._output.done()

    def is_ready(self) -> bool:
        """True if `get` would not wait for anything, not even for a copy."""
        if not self.done() or self.error() is not None:
            return self.done()
        output = self._output.result()
        event = None if output is None else output[1].event
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def error(self) -> BaseException | None:
        """The error that the step raised, or None. Call it only once `done`."""
        return self._output.exception()

    def wait(self, timeout: float) -> bool:
        """Wait until `done`; False if that takes longer than `timeout` seconds."""
        try:
            self._output.exception(timeout)
        except TimeoutError:
            return False
        return True

    def get(self) -> list[RowResult]:
        """Wait for the results, one per row of the plan in its order.

        Raises what the step raised.
        """
        output = self._output.result()
        if output is None:
            return []
        if self._rows is None:
            tensors, copy, layout = output
            self._rows = _assemble(tensors, tensors.unpack(copy.wait()), layout)
            copy.release()
            if self.report is not None:
                self.report(self._rows)
            for row, fault in self.faults.items():
                self._rows[row].error = fault
        return self._rows


def _assemble(tensors: Results, host: list[Tensor], layout: RowLayout) -> list[RowResult]:
    sampled, num_sampled, num_drafts, has_nan = (tensor.tolist() for tensor in host[:4])
    results = [
        RowResult(ids[:count], drafts)
        for ids, count, drafts in zip(sampled, num_sampled, num_drafts, strict=True)
    ]
    if any(has_nan):
        for result, nan in zip(results, has_nan, strict=True):
            result.has_nan = nan
    at = 4
    if tensors.logprobs is not None:
        columns = [tensor.tolist() for tensor in host[at : at + 5]]
        at += 5
        width = len(sampled[0])
        for row, (result, top) in enumerate(zip(results, layout.num_logprobs, strict=True)):
            if top is not None:
                first = row * width
                last = first + len(result.token_ids)
                result.logprobs = _tuples(columns, first, last, top)
    for chunk in tensors.prompt_logprobs:
        columns = [tensor.tolist() for tensor in host[at : at + 5]]
        at += 5
        results[chunk.row].prompt_logprobs = _tuples(columns, 0, len(columns[0]), chunk.top)
    return results


def _tuples(columns: list[list[Any]], first: int, last: int, top: int) -> list[Logprob]:
    ids, logprobs, ranks, top_ids, top_logprobs = columns
    return [
        (ids[i], logprobs[i], ranks[i], top_ids[i][:top], top_logprobs[i][:top])
        for i in range(first, last)
    ]
