"""Samples a step's tokens: processes every logits row, then verifies drafts or draws.

Nothing here waits for the device. It does not know how a draft is accepted (see
`speculators.verification`) or how an option changes a row (see `logits_processing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

from ...configs.schema import SpeculativeConfig
from ...kernels.linear.head_sample import Draws, gather_draws
from ...kernels.sampling.finish_samples import finish_samples
from ...kernels.sampling.sample import TARGET
from ...kernels.sampling.verify import VerifyRows
from ...speculators.verification import create_verifier
from ..batch.host_copy import StagingPool
from ..batch.request_table import RequestTable
from ..batch.sampling_state import PROCESSED, Feature
from ..batch.step_output import TokenLogprobTensors
from .logits_processing import SamplingRows, process_logits
from .logprobs import emitted_logprobs

# Chooses a token per row (draws None = all greedy): (tokens [L] int64, largest logits [L] float32).
Pick = Callable[[Draws | None], tuple[Tensor, Tensor]]
MAX_CHUNK_BYTES = 256 << 20  # float32 logits processed at once, of which a few copies exist


@dataclass(frozen=True)
class SamplerOutput:
    """The tokens that a step emits."""

    sampled_token_ids: Tensor  # [N, K + 1] int64, -1 beyond num_sampled
    num_sampled: Tensor  # [N] int32, 0 for an unfinished prefill
    num_rejected: Tensor  # [N] int32, number of logits rows that emitted nothing
    has_nan: Tensor  # [N] bool, an emitting row held NaN or allowed no token
    logprobs: TokenLogprobTensors | None  # rows [N * (K + 1)]; None if no request wants them


class SamplingPath(Enum):
    """How the tokens of a batch are sampled. Eager code and graphs share it."""

    DRAW = "draw"  # argmax, or a draw by a key; does not need the logits in memory
    REJECT = "reject"  # rejection sampling of drafts, with no option but the temperature
    GENERAL = "general"  # supports every option


class Sampler:
    """Samples and verifies; holds no state of requests."""

    def __init__(
        self,
        speculative: SpeculativeConfig,
        device: torch.device,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        self.verify = create_verifier(speculative, device)
        # True if drafts are compared with the target's own token, not judged by its distribution.
        self._judges_by_token = (
            speculative.rejection_sampling == "coupled"
            or speculative.synthetic_acceptance_rates is not None
        )
        self._max_chunk_bytes = max_chunk_bytes
        self._pool = StagingPool(device)

    def sample(
        self,
        logits: Tensor,  # [L, >= V], not changed
        rows: SamplingRows,
        requests: RequestTable,
        grammar_bitmask: Tensor | None = None,  # [L, ceil(V / 32)] int32, 0 = forbidden
    ) -> SamplerOutput:
        """Sample or verify the tokens of every request of the step."""
        state = requests.sampling
        logits = logits[:, : state.vocab_size]
        max_rows = self._max_chunk_bytes // (4 * state.vocab_size)
        bounds = split_requests(rows.cu_num_logits_cpu, max_rows)
        if len(bounds) == 2:
            parts = [self._sample_chunk(logits, rows, requests, grammar_bitmask)]
        else:
            parts = []
            for first, last in pairwise(bounds):
                of = slice(rows.cu_num_logits_cpu[first], rows.cu_num_logits_cpu[last])
                bitmask = None if grammar_bitmask is None else grammar_bitmask[of]
                part = rows.requests(first, last)
                parts.append(self._sample_chunk(logits[of], part, requests, bitmask))
        sampled, num_sampled, num_rejected, has_nan = (
            column[0] if len(column) == 1 else torch.cat(column)
            for column in zip(*parts, strict=True)
        )
        logprobs = None
        if state.features(rows.slots) & Feature.LOGPROBS:
            wanted = [state.num_logprobs[slot] for slot in rows.slots]
            logprobs = emitted_logprobs(logits, sampled, rows.cu_num_logits_cpu, wanted, self._pool)
        return SamplerOutput(sampled, num_sampled, num_rejected, has_nan, logprobs)

    def path(self, features: Feature, has_drafts: bool, has_grammar: bool = False) -> SamplingPath:
        """The cheapest path that supports requests with these features."""
        if has_grammar or features & (PROCESSED | Feature.LOGPROBS):
            return SamplingPath.GENERAL
        if self._judges_by_token or not has_drafts or not features & Feature.UNSEEDED:
            return SamplingPath.DRAW
        return SamplingPath.REJECT

    def draw(
        self,
        pick: Pick,
        rows: SamplingRows,
        requests: RequestTable,
        features: Feature | None = None,  # features to allow for; None = those used now
        logits: Tensor | None = None,  # [L, V], for REJECT
    ) -> SamplerOutput:
        """Like `sample`, but for the paths DRAW and REJECT only.

        On DRAW, `pick` may choose tokens without writing logits. A graph passes `features` that
        include all that its requests may use later.
        """
        state = requests.sampling
        features = state.features(rows.slots) if features is None else features
        slots = rows.expanded_idx_mapping
        draws = gather_draws(slots, state.temperature, state.seed, rows.positions, TARGET)
        drawn, largest = pick(draws if features & Feature.RANDOM else None)
        temperature = None if logits is None else draws.temperature
        logits = largest[:, None][:, :0] if logits is None else logits
        keys = (draws.seeds, draws.greedy, drawn, temperature)
        of = self._verify_rows(logits, rows, requests, features, *keys)
        sampled, num_accepted = self.verify(of)
        counts = finish_samples(
            sampled,
            num_accepted,
            largest,
            None,
            rows,
            requests.prefill_len,
        )
        return SamplerOutput(sampled, *counts, None)

    def _verify_rows(
        self,
        logits: Tensor,
        rows: SamplingRows,
        requests: RequestTable,
        features: Feature,
        seeds: Tensor,
        greedy: Tensor,
        drawn: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> VerifyRows:
        mixed = features & Feature.SEEDED and features & Feature.UNSEEDED
        return VerifyRows(
            logits=logits,
            draft_ids=rows.draft_ids,
            draft_logits=requests.draft_logits,
            slots=rows.expanded_idx_mapping,
            local_pos=rows.expanded_local_pos,
            cu_num_logits=rows.cu_num_logits,
            seeds=seeds,
            positions=rows.positions,
            greedy=greedy,
            all_greedy=not features & Feature.RANDOM,
            any_greedy=bool(features & Feature.GREEDY),
            width=rows.max_num_drafts + 1,
            seeded=requests.sampling.has_own_seed if mixed else None,
            all_seeded=not features & Feature.UNSEEDED,
            drawn=drawn,
            temperature=temperature,
        )

    def _sample_chunk(
        self,
        raw: Tensor,
        rows: SamplingRows,
        requests: RequestTable,
        grammar_bitmask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = requests.sampling
        features = state.features(rows.slots)
        logits = process_logits(raw, rows, requests, grammar_bitmask, features)
        slots = rows.expanded_idx_mapping
        seeds, greedy = state.seed[slots], state.temperature[slots] == 0
        verify_rows = self._verify_rows(logits, rows, requests, features, seeds, greedy)
        sampled, num_accepted = self.verify(verify_rows)
        # The temperature alone cannot make all logits of a row -inf, so no check is needed then.
        restricted = grammar_bitmask is not None or bool(features & PROCESSED)
        num_sampled, num_rejected, has_nan = finish_samples(
            sampled,
            num_accepted,
            raw.amax(-1),
            logits.amax(-1) if restricted else None,
            rows,
            requests.prefill_len,
        )
        return sampled, num_sampled, num_rejected, has_nan


def split_requests(cu_num_logits: Sequence[int], max_rows: int) -> list[int]:
    """Split a step between requests: the batch rows at which chunks begin, and N at the end.

    A chunk has at most `max_rows` logits rows, unless a single request has more.
    """
    last = len(cu_num_logits) - 1
    bounds = [0]
    if cu_num_logits[-1] > max_rows:
        for row in range(1, last):
            if cu_num_logits[row + 1] - cu_num_logits[bounds[-1]] > max_rows:
                bounds.append(row)
    return [*bounds, last]
