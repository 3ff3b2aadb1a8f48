"""Allocates the recurrent states of a model: of every slot, and saved ones."""

from __future__ import annotations

import logging

import torch

from ...configs.schema import CacheConfig
from ...speculators.base import SpeculatorNeeds
from ..batch.recurrent_states import RecurrentStates
from ..models.base import TextModel
from ..scheduling.state_snapshots import StateGroup

logger = logging.getLogger(__name__)

# Of the memory for the KV cache. A saved state is as large as the KV of thousands of tokens, but
# most prefixes that are asked for again end where a few were saved.
_SAVED_SHARE = 0.25


def create_states(
    model: TextModel, max_num_reqs: int, needs: SpeculatorNeeds, dtype: torch.dtype
) -> RecurrentStates | None:
    """The states of all slots; None if the model has no recurrent layers."""
    layers = model.recurrent_layers()
    if not layers:
        return None
    drafts = needs.num_speculative_tokens
    log = drafts + 1 if drafts else 0
    return RecurrentStates(layers, max_num_reqs, log, dtype, model.format.device)


def border_tokens(config: CacheConfig, block_size: int) -> int:
    """Tokens between the lengths at which states are saved: as configured, rounded up to whole KV
    blocks."""
    return -(-config.state_block_size // block_size) * block_size


def save_states(
    states: RecurrentStates,
    config: CacheConfig,
    block_size: int,
    available: int,  # bytes for the KV cache and the saved states
    spare: int,  # those that one request of the full length leaves
    max_tokens: int,  # that all requests together can have
) -> int:
    """Allocate the saved states, and return their bytes."""
    if not config.enable_prefix_caching:
        return 0
    size = states.snapshot_bytes
    affordable = min(int(available * _SAVED_SHARE), spare) // size - 1  # beside the null block
    count = max(0, min(affordable, max_tokens // border_tokens(config, block_size)))
    if not count:
        logger.warning("no memory is left to save recurrent states: prefixes are not reused")
        return 0
    states.allocate_snapshots(count + 1)
    return (count + 1) * size


def group_of(
    states: RecurrentStates | None, config: CacheConfig, block_size: int
) -> StateGroup | None:
    """What the scheduler must know of the states."""
    if states is None:
        return None
    return StateGroup(states.num_blocks, border_tokens(config, block_size), states.log)
