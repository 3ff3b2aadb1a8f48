"""How evenly tokens choose the experts that engines share: counts of the layers, read at times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..messages import ExpertLoad

_SECONDS = 5.0  # between two reports, while steps run


class ExpertLoads:
    """Reads the counts that layers keep on the device, without waiting for it.

    `poll` is called by the thread that runs steps, `take` by another.
    """

    def __init__(
        self,
        layers: list[Tensor],  # [1 + E] int64 each: pairs of experts elsewhere, then of each here
        num_experts: int,  # of a layer, on all ranks
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers, self._num_experts = layers, num_experts
        self._seconds, self._clock = seconds, clock
        self._last = torch.zeros(len(layers), layers[0].shape[0], dtype=torch.int64)
        on_gpu = layers[0].is_cuda
        self._host = torch.empty(self._last.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._copied: torch.cuda.Event | None = None
        self._is_copying = False
        self._due_at = clock() + seconds
        self._found: ExpertLoad | None = None

    def poll(self) -> None:
        """Start reading the counts if that is due, or report what has been read."""
        if self._is_copying:
            if self._copied is None or self._copied.query():  # type: ignore[no-untyped-call]
                self._is_copying = False
                self._report()
        elif self._clock() >= self._due_at:
            self._due_at = self._clock() + self._seconds
            counts = torch.stack(self._layers)
            self._host.copy_(counts, non_blocking=True)
            if counts.is_cuda:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()
            self._is_copying = True

    def _report(self) -> None:
        grown = self._host - self._last  # [layers, 1 + E]
        self._last.copy_(self._host)
        here, totals = grown[:, 1:], grown.sum(1)
        busy = totals > 0
        if not bool(busy.any()):
            return
        means = totals[busy].double() / self._num_experts
        imbalance = float((here[busy].amax(1) / means).mean())
        self._found = ExpertLoad(int(here.sum()), imbalance)

    def take(self) -> ExpertLoad | None:
        """The newest report, once."""
        found, self._found = self._found, None
        return found


def find_loads(model: object) -> ExpertLoads | None:
    """The loads of a model; None if engines do not share its experts, or it has no memory."""
    parts: list[Any] = list(model.modules()) if isinstance(model, nn.Module) else []
    sharing = [part for part in parts if isinstance(getattr(part, "loads", None), Tensor)]
    if not sharing or sharing[0].loads.is_meta:
        return None
    return ExpertLoads([part.loads for part in sharing], sharing[0].total)
