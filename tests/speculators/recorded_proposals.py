"""Records every proposal that an engine's drafter makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from slipstream.runner.drafters.draft_graphs import DraftGraphs
from slipstream.speculators.base import DraftInputs

Proposals = list[tuple[list[int], list[int]]]  # (known tokens, drafts)


@contextmanager
def recorded_proposals() -> Iterator[Proposals]:
    """Every proposal that follows a sampled token, in order."""
    seen: Proposals = []
    propose: Callable[..., None] = DraftGraphs.propose

    def recording(self: DraftGraphs, inputs: DraftInputs) -> None:
        propose(self, inputs)
        drafts = made_drafts(self, inputs)
        for row in range(inputs.num_reqs):
            slot = int(inputs.idx_mapping[row])
            if int(inputs.num_sampled[row]):
                known = int(inputs.requests.total_len[slot])
                tokens = inputs.requests.all_token_ids[slot, :known].tolist()
                seen.append((tokens, drafts[row].tolist()))

    DraftGraphs.propose = recording  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        DraftGraphs.propose = propose  # type: ignore[method-assign]


def made_drafts(graphs: DraftGraphs, inputs: DraftInputs) -> Tensor:
    """[N, K] of the proposal that was just made, -1 where a request may not keep a draft."""
    speculator = graphs.speculator
    count = speculator.num_drafts if inputs.num_drafts is None else inputs.num_drafts
    return speculator.draft_tokens[: inputs.num_reqs, :count]
