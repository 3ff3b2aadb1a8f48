"""Drafts by prompt lookup: no model, no KV, no graph; the work is in `kernels.ngram_scan`."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from ..configs.options import ConfigError
from ..configs.schema import SpeculativeConfig
from ..kernels.ngram_scan import Haystack, ngram_scan
from .base import BaseSpeculator, DraftHost, DraftInputs, SpeculatorNeeds


class Predictions(Protocol):
    """Texts that clients expect, per slot (OpenAI's `prediction`)."""

    prediction_ids: Tensor | None  # [R, P] int32
    prediction_len: Tensor  # [R] int64, 0 = none


class NgramSpeculator(BaseSpeculator):
    """Proposes what followed the last `prompt_lookup_min` .. `prompt_lookup_max` tokens before."""

    def __init__(self, config: SpeculativeConfig, host: DraftHost) -> None:
        if not 1 <= config.prompt_lookup_min <= config.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, but they are "
                f"{config.prompt_lookup_min} and {config.prompt_lookup_max}"
            )
        # On a GPU a step's rows are padded to K + 1 a request: fewer drafts would save nothing.
        self.needs = SpeculatorNeeds(
            num_speculative_tokens=config.max_drafts,
            per_request_drafts=host.device.type == "cpu",
            watched=False,
        )
        self._min_n, self._max_n = config.prompt_lookup_min, config.prompt_lookup_max
        own_limit = config.max_model_len or host.max_model_len
        self._max_len = min(own_limit, host.max_model_len)

    def propose(self, inputs: DraftInputs) -> Tensor:
        """Drafts for rows that emitted a token; [N, K] int64, -1 = none."""
        requests = inputs.requests
        slots = inputs.idx_mapping[: inputs.num_reqs].long()  # [N] batch row -> slot
        total_len, max_drafts = requests.total_len[slots], requests.max_drafts[slots]
        # Draft k would stand at total_len + k, which the model must have a position for.
        allowed = torch.minimum(max_drafts, self._max_len - total_len)
        drafts_at_all = (inputs.num_sampled[: inputs.num_reqs] > 0) & (allowed > 0)
        if slots.is_cpu and not drafts_at_all.any():  # nobody speculates
            return torch.full((inputs.num_reqs, self.needs.num_speculative_tokens), -1)
        lengths = torch.where(drafts_at_all, total_len, 0)
        # The table also carries predictions; a bare `RequestRows` need not.
        predictions = cast(Predictions | None, getattr(requests, "sampling", None))
        haystack = Haystack(
            requests.all_token_ids,
            requests.prompt_len,
            None if predictions is None else predictions.prediction_ids,
            None if predictions is None else predictions.prediction_len,
        )
        num_drafts = self.needs.num_speculative_tokens
        drafts = ngram_scan(haystack, slots, lengths, self._min_n, self._max_n, num_drafts)
        steps = torch.arange(num_drafts, device=slots.device)
        return torch.where(steps < allowed[:, None], drafts, -1)
