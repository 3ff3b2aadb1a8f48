"""Collects what engine and server need to know of a model runner once its parts are made."""

from __future__ import annotations

from collections.abc import Sequence

from ...speculators.base import SpeculatorNeeds
from ..attention.base import AttentionLayer
from ..batch.kv_cache import KVCache
from ..claims.claims import LoweredClaim
from ..scheduling.kv_blocks import BlockGroup
from ..scheduling.state_snapshots import StateGroup
from ..step.parts import RunnerFacts
from ..step.traffic import expert_bytes
from .load_target import LoadedTarget


def facts_of(
    loaded: LoadedTarget,
    cache: KVCache,
    attention_backend: str,
    needs: SpeculatorNeeds,
    startup_seconds: dict[str, float],
    lowered: Sequence[LoweredClaim],
    draft_layers: Sequence[AttentionLayer] = (),
    state_group: StateGroup | None = None,
) -> RunnerFacts:
    """The facts of a runner whose parts are complete."""
    ids = {layer.layer_id for layer in draft_layers} if needs.kv_needs_next_token else set()
    return RunnerFacts(
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        kv_groups=tuple(
            BlockGroup(
                cache.block_counts[group.index],
                cache.block_sizes[group.index],
                group.sliding_window,
                any(layer.layer_id in ids for layer in group.layers),
                group.window_step,
            )
            for group in cache.groups
        ),
        eos_token_ids=tuple(loaded.resolved.eos_token_ids),
        device=loaded.format.device.type,
        dtype=str(loaded.format.dtype).removeprefix("torch."),
        attention_backend=attention_backend,
        needs=needs,
        startup_seconds=startup_seconds,
        limits=loaded.limits,
        state_group=state_group,
        has_experts=expert_bytes(loaded.model)[0] > 0,
        lowered_claims=tuple(claim.backend for claim in lowered),
    )
