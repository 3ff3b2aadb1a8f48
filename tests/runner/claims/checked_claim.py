"""Tries the claim of a back end for one layer, as a start does for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slipstream.configs.graphs import AttentionCGSupport
from slipstream.runner.attention.base import AttentionBackend, AttentionLayer
from slipstream.runner.claims.case import TOLERANCE, ClaimSetup, ClaimTrial
from slipstream.runner.claims.claims import ClaimCase, LoweredClaim, verify_claim
from slipstream.runner.graphs.capture import GraphPool


def check_claim(
    backend: AttentionBackend,
    layer: AttentionLayer,
    uniform_token_counts: Sequence[int],
    pool: GraphPool,
    setup: ClaimSetup,
    dtype: torch.dtype,
    device: torch.device,
    on_lowered: Callable[[LoweredClaim], None] | None = None,
) -> AttentionCGSupport:
    """The part of the back end's claim that this layer passes on this device; see
    `verify_claim`."""
    trial = ClaimTrial(backend, layer, setup, dtype, device, pool)
    cases = [ClaimCase(length) for length in (None, *uniform_token_counts)]
    return verify_claim(
        backend.name, trial.builder.supports, cases, trial.measure, TOLERANCE[dtype], on_lowered
    )
