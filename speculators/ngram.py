"""A drafter by prompt lookup, without a model; the search is in `kernels.drafts.ngram_scan`."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from ..configs.options import ConfigError
from ..configs.schema import SpeculativeConfig
from ..kernels.drafts.ngram_scan import Haystack, Predictions, ngram_scan
from .base import BaseSpeculator, DraftHost, DraftInputs, SpeculatorNeeds


class Texts(Protocol):
    """For each slot, the token ids that the client predicts (OpenAI's `prediction`)."""

    entries: Tensor  # [1, T] int32, all texts
    start: Tensor  # [R] int64, slot -> index of its first token
    length: Tensor  # [R] int64, slot -> number of tokens

    @property
    def is_empty(self) -> bool: ...

    @property
    def max_length(self) -> int: ...


class NgramSpeculator(BaseSpeculator):
    """Finds an earlier occurrence of the last n tokens, from `prompt_lookup_min` to
    `prompt_lookup_max`, and proposes the tokens that followed it."""

    def __init__(self, config: SpeculativeConfig, host: DraftHost) -> None:
        if not 1 <= config.prompt_lookup_min <= config.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, but they are "
                f"{config.prompt_lookup_min} and {config.prompt_lookup_max}"
            )
        # On a GPU each request's rows are padded to K + 1, so fewer drafts would save nothing.
        self.needs = SpeculatorNeeds(
            num_speculative_tokens=config.max_drafts,
            per_request_drafts=host.device.type == "cpu",
            watched=False,
        )
        self._min_n, self._max_n = config.prompt_lookup_min, config.prompt_lookup_max
        own_limit = config.max_model_len or host.max_model_len
        self._max_len = min(own_limit, host.max_model_len)

    def propose(self, inputs: DraftInputs) -> Tensor:
        """Drafts for rows that emitted a token, [N, K] int64, -1 where there is none."""
        requests = inputs.requests
        slots = inputs.idx_mapping[: inputs.num_reqs].long()  # [N] batch row -> slot
        total_len, max_drafts = requests.total_len[slots], requests.max_drafts[slots]
        # Draft k would have position total_len + k, which the model must support.
        allowed = torch.minimum(max_drafts, self._max_len - total_len)
        drafts_at_all = (inputs.num_sampled[: inputs.num_reqs] > 0) & (allowed > 0)
        if slots.is_cpu and not drafts_at_all.any():  # no request speculates
            return torch.full((inputs.num_reqs, self.needs.num_speculative_tokens), -1)
        lengths = torch.where(drafts_at_all, total_len, 0)
        # The table also carries predictions; a bare `RequestRows` need not.
        texts = cast(
            Texts | None, getattr(getattr(requests, "sampling", None), "predictions", None)
        )
        predictions = None
        if texts is not None and not texts.is_empty:
            longest = texts.max_length
            predictions = Predictions(texts.entries[0], texts.start, texts.length, longest)
        haystack = Haystack(requests.all_token_ids, requests.prompt_len, predictions)
        num_drafts = self.needs.num_speculative_tokens
        drafts = ngram_scan(haystack, slots, lengths, self._min_n, self._max_n, num_drafts)
        steps = torch.arange(num_drafts, device=slots.device)
        return torch.where(steps < allowed[:, None], drafts, -1)
