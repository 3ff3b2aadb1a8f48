"""What a run of `slipstream verify` checks, and how much of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...configs.schema import SpeculativeConfig
from ...runner.messages import GrammarSpec

_ONE_HOT = ("ngram",)  # methods without a distribution of drafts


@dataclass(frozen=True)
class Plan:
    """The size of a run."""

    num_prompts: int = 16  # greedy replies
    max_tokens: int = 64  # of a greedy reply
    num_samples: int = 512  # sampled replies of either side, for each set of options
    sample_tokens: int = 16  # of a sampled reply
    round_samples: int = 16  # of them between two looks at the clock
    minutes: float = 5.0  # of sampling, after which no further replies are begun
    checks_drafts: bool = True
    options: Sequence[str] = ()  # names of sampling options to check; empty = all


@dataclass(frozen=True)
class Subject:
    """The model and the drafter under test, as the checks see them."""

    prompts: Sequence[Sequence[int]]
    stop_token_ids: Sequence[int]
    vocab_size: int
    dtype: str
    method: str  # of the drafter
    one_hot: bool  # whether drafts are the drafter's likeliest tokens
    plain_prompts: Sequence[Sequence[int]] = ()  # the prompts' texts without the chat template
    grammar: GrammarSpec | None = None
    batch_invariant: bool = False  # nothing may differ, not even by rounding
    valid: Callable[[Sequence[int]], bool] = lambda ids: True  # does a reply obey the grammar?


def drafts_are_one_hot(speculative: SpeculativeConfig) -> bool:
    """Whether each draft is the drafter's likeliest token, not drawn from its distribution.

    `auto` draws, unless the distributions need too much memory; then nothing is lost but power.
    """
    return speculative.method in _ONE_HOT or speculative.draft_sampling == "greedy"
