"""Decides which drafts stand and draws the token after them; the output's law is the target's.

It sees processed logits only: grammar, penalties, temperature and the rest are in them, per row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..configs.schema import SpeculativeConfig
from ..kernels.sample import ACCEPT, RECOVERY, TARGET, gumbel_sample, uniform
from ..kernels.verify import accept_drafts, count_accepted, emit_tokens, residual_logits

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerifyRows:
    """L logits rows of N requests; the rows of a request follow one another."""

    logits: Tensor  # [L, V] float32, processed; softmax = the target's distribution p
    draft_ids: Tensor  # [L] int64, draft judged by the row; -1 = none
    draft_logits: Tensor | None  # [R, K, Vd] float32 by slot, softmax = q; None: q is one-hot
    slots: Tensor  # [L] int32, logits row -> slot
    local_pos: Tensor  # [L] int32, 0 .. n_draft
    cu_num_logits: Tensor  # [N + 1] int32, batch row -> first logits row
    seeds: Tensor  # [L] int64
    positions: Tensor  # [L] int64, sequence position of the row
    greedy: Tensor  # [L] bool, temperature 0
    all_greedy: bool  # host: no row needs random numbers
    width: int  # K + 1


class Verifier(Protocol):
    """A rule of verification."""

    def __call__(self, rows: VerifyRows) -> tuple[Tensor, Tensor]:
        """(emitted tokens [N, K + 1] int64, -1 beyond; accepted drafts [N] int64)."""


def verify_standard(rows: VerifyRows) -> tuple[Tensor, Tensor]:
    """Rejection sampling: accept with probability min(1, p / q), else draw from max(p - q, 0).

    Leviathan et al. 2023, Chen et al. 2023. A greedy request accepts the argmax and emits it.
    """
    if rows.all_greedy or _has_no_drafts(rows):
        return verify_coupled(rows)
    log_u = uniform(rows.seeds, rows.positions, ACCEPT).log()
    q = (rows.draft_ids, rows.draft_logits, rows.slots, rows.local_pos)
    accepted = accept_drafts(rows.logits, *q, log_u)
    is_argmax = rows.logits.argmax(-1) == rows.draft_ids
    accepted = torch.where(rows.greedy, is_argmax, accepted)
    return _finish(rows, accepted)


def verify_coupled(rows: VerifyRows) -> tuple[Tensor, Tensor]:
    """Draw the target's own token at every row and accept a draft iff it is that token.

    The text is that of the same seed without speculation. Acceptance is lower than in
    `verify_standard`, unless the request is greedy: then both are the same.
    """
    if rows.all_greedy:
        drawn = rows.logits.argmax(-1)
    else:
        drawn = gumbel_sample(rows.logits, rows.seeds, rows.positions, TARGET, rows.greedy)
    if _has_no_drafts(rows):
        num_accepted = torch.zeros_like(drawn)
    else:
        num_accepted = count_accepted(drawn == rows.draft_ids, rows.cu_num_logits, rows.local_pos)
    tokens = drawn[rows.cu_num_logits[:-1] + num_accepted]
    emitted = emit_tokens(rows.draft_ids, tokens, num_accepted, rows.cu_num_logits, rows.width)
    return emitted, num_accepted


def verify_synthetic(rows: VerifyRows, conditional_rates: Tensor) -> tuple[Tensor, Tensor]:
    """Accept draft j with a fixed probability, whatever the target says. NOT lossless.

    conditional_rates: [K] probability of accepting draft j if all before it were accepted.
    """
    if _has_no_drafts(rows):
        return verify_coupled(rows)
    u = uniform(rows.seeds, rows.positions, ACCEPT)
    column = rows.local_pos.clamp(max=conditional_rates.shape[0] - 1)
    accepted = (u < conditional_rates[column]) & (rows.draft_ids >= 0)
    return _finish(rows, accepted, from_residual=False)


def create_verifier(config: SpeculativeConfig, device: torch.device) -> Verifier:
    """The rule that the configuration asks for."""
    if config.synthetic_acceptance_rates is not None:
        rates = torch.tensor(conditional_rates(config.synthetic_acceptance_rates), device=device)
        _log.warning(
            "synthetic acceptance is ON (%s): drafts are accepted by chance, the output is NOT "
            "the model's; for benchmarks only",
            config.synthetic_acceptance_rates,
        )
        return lambda rows: verify_synthetic(rows, rates)
    return verify_coupled if config.rejection_sampling == "coupled" else verify_standard


def conditional_rates(unconditional: Sequence[float]) -> list[float]:
    """P(accept j | all before accepted), from P(accept all of 0 .. j), which cannot increase."""
    rates, before = [], 1.0
    for rate in unconditional:
        if not 0.0 <= rate <= before:
            raise ValueError(
                "synthetic_acceptance_rates must lie in [0, 1] and not increase, "
                f"but are {list(unconditional)}"
            )
        rates.append(rate / before if before else 0.0)
        before = rate
    return rates


def _finish(
    rows: VerifyRows, accepted: Tensor, from_residual: bool = True
) -> tuple[Tensor, Tensor]:
    """Draw the token at each request's first rejected row, or at its last row (the bonus)."""
    num_accepted = count_accepted(accepted, rows.cu_num_logits, rows.local_pos)
    last = rows.cu_num_logits[:-1].long() + num_accepted  # [N] batch row -> logits row
    greedy = rows.greedy[last]
    drafts = rows.draft_ids[last]
    if from_residual:
        # The noise of a recovered token must not be that which a later bonus would use.
        salt = torch.where(drafts >= 0, RECOVERY, TARGET)
        q = (rows.draft_ids, rows.draft_logits, rows.slots, rows.local_pos)
        left = residual_logits(rows.logits, last, *q)
        left = torch.where(greedy[:, None], rows.logits[last], left)
    else:
        salt, left = torch.full_like(drafts, TARGET), rows.logits[last]
    tokens = gumbel_sample(left, rows.seeds[last], rows.positions[last], salt, greedy)
    emitted = emit_tokens(rows.draft_ids, tokens, num_accepted, rows.cu_num_logits, rows.width)
    return emitted, num_accepted


def _has_no_drafts(rows: VerifyRows) -> bool:
    """The layout has one row per request; known on the host."""
    return rows.logits.shape[0] == rows.cu_num_logits.shape[0] - 1
