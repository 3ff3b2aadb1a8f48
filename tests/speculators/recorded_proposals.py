"""Records every proposal of a drafter with a model as an engine makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from slipstream.speculators.autoregressive import AutoRegressiveSpeculator
from slipstream.speculators.base import DraftInputs

Proposals = list[tuple[list[int], list[int]]]  # (known tokens, drafts)


@contextmanager
def recorded_proposals() -> Iterator[Proposals]:
    """Every proposal that follows a sampled token, in order."""
    seen: Proposals = []
    propose: Callable[..., Tensor] = AutoRegressiveSpeculator.propose

    def recording(self: AutoRegressiveSpeculator, inputs: DraftInputs) -> Tensor:
        drafts = propose(self, inputs)
        for row in range(inputs.num_reqs):
            slot = int(inputs.idx_mapping[row])
            if int(inputs.num_sampled[row]):
                known = int(inputs.requests.total_len[slot])
                tokens = inputs.requests.all_token_ids[slot, :known].tolist()
                seen.append((tokens, drafts[row].tolist()))
        return drafts

    AutoRegressiveSpeculator.propose = recording  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        AutoRegressiveSpeculator.propose = propose  # type: ignore[method-assign]
