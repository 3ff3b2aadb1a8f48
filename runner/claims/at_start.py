"""Tests the attention back end's claims at start-up, before graph modes are chosen from them.

The cost is bounded: there is one trial of a few requests per kind of layer, only batches that will
be captured are tried, and the drafter's layers reuse results of equal target layers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import torch

from ...configs.graphs import AttentionCGSupport, CUDAGraphMode
from ..attention.base import AttentionBackend, AttentionBuilder, AttentionLayer
from ..graphs.capture import GraphPool, paused_garbage_collector
from ..graphs.manager import relative_error
from .case import TOLERANCE, ClaimSetup, ClaimTrial, Compare
from .claims import ClaimCase, LoweredClaim, verify_claim

logger = logging.getLogger(__name__)
_Kind = tuple[object, ...]
# A KV group: target's builder, all layers, drafter's builder, drafter's layers.
_Group = tuple[
    AttentionBuilder, Sequence[AttentionLayer], AttentionBuilder | None, Sequence[AttentionLayer]
]
_MAX_LEN, _MAX_REQS = 4096, 4


def claim_setup(max_num_reqs: int, max_model_len: int, block_size: int) -> ClaimSetup:
    """The size of trials: this server's largest batch, but at most 4 requests of 4096 tokens."""
    return ClaimSetup(
        max_len=min(max_model_len, _MAX_LEN),
        num_reqs=min(max_num_reqs, _MAX_REQS),
        block_size=block_size,
    )


def claim_cases(mode: CUDAGraphMode, lengths: Sequence[int]) -> list[ClaimCase]:
    """The kinds of batches that `mode` would capture in FULL graphs.

    Of the uniform query `lengths` only the shortest and the longest are tried.
    """
    mixed = [ClaimCase(None)] if mode.mixed_mode() is CUDAGraphMode.FULL else []
    uniform = mode.decode_mode() is CUDAGraphMode.FULL and mode.separate_routine()
    return mixed + [ClaimCase(length) for length in {min(lengths), max(lengths)} if uniform]


class ClaimsAtStart:
    """Compares graphs of each attention builder with eager runs, and lowers its `supports`.

    A builder's claim says for which batches its attention may run in a CUDA graph. Where a graph
    computes something else on this device, the claim is lowered.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        pool: GraphPool,
        setup: ClaimSetup,
        dtype: torch.dtype,
        device: torch.device,
        cases: Sequence[ClaimCase],  # the batches that target and draft prefill will capture
        compare: Compare = relative_error,
    ) -> None:
        self.lowered: list[LoweredClaim] = []  # reported as a metric
        self._cases = cases
        self._backend = backend
        self._pool = pool
        self._setup = setup
        self._dtype = dtype
        self._device = device
        self._compare = compare
        self._errors: dict[tuple[_Kind, ClaimCase], float] = {}

    def verify(self, groups: Iterable[_Group]) -> None:
        """Test the claims of every builder, and lower `supports` to what all its layers passed.

        Target verify and draft prefill share a builder and its claim; draft decode has its own.
        """
        start = time.monotonic()
        for builder, layers, draft_builder, draft_layers in groups:
            self._verify(builder, layers, self._cases)
            if draft_builder is not None:
                self._verify(draft_builder, draft_layers, [ClaimCase(1)])
        logger.info(
            "attention claims: %d trials of %s, worst error %.1e, %.1f s",
            len(self._errors), self._backend.name,
            max(self._errors.values(), default=0.0), time.monotonic() - start,
        )  # fmt: skip

    def _verify(
        self,
        builder: AttentionBuilder,
        layers: Sequence[AttentionLayer],
        cases: Sequence[ClaimCase],
    ) -> None:
        kinds = {_kind(layer): layer for layer in layers if layer.attends}
        for kind, layer in kinds.items():
            if builder.supports is not AttentionCGSupport.NEVER:
                builder.supports = self._verify_layer(builder.supports, kind, layer, cases)

    def _verify_layer(
        self,
        claimed: AttentionCGSupport,
        kind: _Kind,
        layer: AttentionLayer,
        cases: Sequence[ClaimCase],
    ) -> AttentionCGSupport:
        trial: ClaimTrial | None = None

        def measure(case: ClaimCase) -> float:
            nonlocal trial
            if (kind, case) not in self._errors:
                if trial is None:
                    trial = ClaimTrial(
                        self._backend, layer, self._setup, self._dtype, self._device, self._pool,
                        self._compare,
                    )  # fmt: skip
                self._errors[kind, case] = _measure(trial, case)
            return self._errors[kind, case]

        # Trials must not change the random state or keep graph memory.
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._pool.throw_away(), paused_garbage_collector():
            verified = verify_claim(
                self._backend.name, claimed, cases, measure, TOLERANCE[self._dtype],
                self.lowered.append,
            )  # fmt: skip
            trial = None
            return verified


def _measure(trial: ClaimTrial, case: ClaimCase) -> float:
    """Relative error of a case; infinite if its batch cannot be captured at all."""
    try:
        return trial.measure(case)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        logger.warning("capturing %s attention for %s failed: %s", trial.backend, case, error)
        return float("inf")


def _kind(layer: AttentionLayer) -> _Kind:
    """The properties of a layer that kernels and plans depend on."""
    sinks = layer.sinks is not None
    return (
        layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v, layer.is_mla,
        layer.sliding_window, layer.softcap, layer.scale, sinks, layer.fp8 is not None,
    )  # fmt: skip
