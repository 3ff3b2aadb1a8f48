"""Verifies drafts: decides how many are accepted and which tokens a step emits.

Logits are processed before: grammar, penalties, temperature and other options are applied per row.
The standard rule is `kernels.sampling.verify.rejection_sample`; this module selects the rule, and
has those that need no residual distribution.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..configs.options import ConfigError
from ..configs.schema import SpeculativeConfig
from ..kernels.sampling.sample import TARGET, gumbel_sample
from ..kernels.sampling.verify import VerifyRows, emit_by_chance, emit_matching, rejection_sample

_log = logging.getLogger(__name__)


class Verifier(Protocol):
    def __call__(self, rows: VerifyRows) -> tuple[Tensor, Tensor]:
        """Returns (emitted tokens [N, K + 1] int64, padded with -1; accepted drafts [N] int64)."""


def verify_standard(rows: VerifyRows) -> tuple[Tensor, Tensor]:
    """Lossless rejection sampling; without random rejections it equals `verify_coupled`.

    Requests with an explicit seed are verified as in `verify_coupled`: their text must not depend
    on how many drafts fit into a step, as it would with rejection sampling.
    """
    if rows.all_greedy or rows.all_seeded or not rows.has_drafts:
        return verify_coupled(rows)
    if rows.seeded is not None and rows.drawn is None:
        rows = replace(rows, drawn=_draw(rows))
    return rejection_sample(rows)


def verify_coupled(rows: VerifyRows) -> tuple[Tensor, Tensor]:
    """Draw the target's own token at every row, and accept a draft if it is that token.

    The text equals that of the same seed without speculation. Acceptance is lower than in
    `verify_standard`, except for greedy requests, where both rules are the same.
    """
    return emit_matching(rows, _draw(rows))


class SyntheticVerifier:
    """Accept draft j with a given probability, regardless of the target. NOT lossless."""

    def __init__(self, rates: Sequence[float], max_drafts: int, device: torch.device) -> None:
        """`rates` as in `set_rates`."""
        # [K] probability of accepting draft j if all before it were accepted
        self._rates = torch.zeros(max_drafts, device=device)
        self.set_rates(rates)

    def set_rates(self, unconditional: Sequence[float]) -> None:
        """Set P(accept all of 0 .. j) from the next step on, in graphs too.

        Drafts beyond the list are never accepted.
        """
        listed = conditional_rates(unconditional)[: len(self._rates)]
        missing = len(self._rates) - len(listed)
        with torch.inference_mode():
            self._rates.copy_(torch.tensor(listed + [0.0] * missing))  # in place: graphs read it

    def __call__(self, rows: VerifyRows) -> tuple[Tensor, Tensor]:
        if not rows.has_drafts:
            return verify_coupled(rows)
        return emit_by_chance(rows, _draw(rows), self._rates)


def _draw(rows: VerifyRows) -> Tensor:
    """The target's own token at every row, [L] int64."""
    if rows.drawn is not None:
        return rows.drawn
    if rows.all_greedy:
        return rows.logits.argmax(-1)
    return gumbel_sample(rows.logits, rows.seeds, rows.positions, TARGET, rows.greedy)


def create_verifier(config: SpeculativeConfig, device: torch.device) -> Verifier:
    """The verification rule of the configuration."""
    if config.synthetic_acceptance_rates is not None:
        _log.warning(
            "synthetic acceptance is ON (%s): drafts are accepted by chance, so the output is NOT "
            "the model's; use it for benchmarks only",
            config.synthetic_acceptance_rates,
        )
        return SyntheticVerifier(config.synthetic_acceptance_rates, config.max_drafts, device)
    return verify_coupled if config.rejection_sampling == "coupled" else verify_standard


def conditional_rates(unconditional: Sequence[float]) -> list[float]:
    """Convert P(accept all of 0 .. j) to P(accept j | all before accepted).

    Raises ConfigError if the given probabilities increase or are not in [0, 1].
    """
    rates, before = [], 1.0
    for rate in unconditional:
        if not 0.0 <= rate <= before:
            raise ConfigError(
                "synthetic_acceptance_rates must lie in [0, 1] and not increase, "
                f"but are {list(unconditional)}"
            )
        rates.append(rate / before if before else 0.0)
        before = rate
    return rates
