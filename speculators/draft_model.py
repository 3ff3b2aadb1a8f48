"""A drafter that is a smaller model with the target's tokenizer; it reads no hidden states.

Its pass over the target's rows reads the target's ids *unshifted* and only writes KV; then K
decodes draft, the first one from the newest token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..configs.schema import SpeculativeConfig
from .autoregressive import AutoRegressiveSpeculator
from .base import DraftHost, DraftInputs, SpeculatorNeeds
from .draft_head import DraftHead, DraftModel, PickTokens


class _LanguageModel(DraftHead, nn.Module):
    """Makes a served model a `DraftModel` that neither reads nor feeds back hidden states."""

    input_width = feedback_width = 1

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.language_model: Any = model

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        attention: Any,
        feedback: Tensor,
        only: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [M, H]; `hidden`, `feedback` and `only` are ignored."""
        out: Tensor = self.language_model(input_ids, positions, attention)[0]
        return out

    def write_kv(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: Any
    ) -> None:
        self.language_model(input_ids, positions, attention)

    @property
    def pick_tokens(self) -> PickTokens | None:
        pick: PickTokens | None = getattr(self.language_model, "pick_tokens", None)
        return pick

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V]."""
        out: Tensor = self.language_model.compute_logits(hidden)
        return out


class StandaloneDraftSpeculator(AutoRegressiveSpeculator):
    """Drafts with a whole language model."""

    first_pass_drafts = False

    def __init__(self, config: SpeculativeConfig, host: DraftHost) -> None:
        super().__init__(config, host)
        device = host.device
        self.newest_ids = torch.zeros(host.max_num_reqs, dtype=torch.int32, device=device)  # [R]

    def load_draft_model(self) -> DraftModel:
        return _LanguageModel(self.host.load_draft_model("draft_model", self.config))

    def describe_needs(self) -> SpeculatorNeeds:
        """No hidden states. KV at position p depends on tokens up to p only, so a prefix hit keeps
        its last block."""
        return replace(
            super().describe_needs(),
            hidden_states=False,
            num_lookahead_tokens=self.num_drafts + 1,
            kv_needs_next_token=False,
        )

    def select_target_hidden(self, inputs: DraftInputs) -> Tensor:
        """An empty tensor: hidden states are not read."""
        nothing: Tensor = self.target_hidden[:0]
        return nothing

    def stage(self, inputs: DraftInputs) -> None:
        """Also keeps each request's newest token, and does not shift the ids."""
        super().stage(inputs)
        rows, tokens = inputs.num_reqs, inputs.descriptor.num_tokens
        # The shifted id of the last valid row is the newest token: the first decode's input.
        self.newest_ids[:rows] = self.input_ids[self.last_token_indices[:rows]]
        self.newest_ids[rows:] = 0
        self.input_ids[:tokens] = inputs.input_ids[:tokens]

    def first_pass(
        self, num_tokens: int, num_reqs: int, attention: Any, target_hidden: Tensor | None = None
    ) -> None:
        """Write the KV of the target's rows; draws nothing."""
        ids, positions = self.input_ids[:num_tokens], self.positions[:num_tokens]
        self.model.write_kv(ids, positions, self.target_hidden[:num_tokens], attention)
        self.decode_ids[:num_reqs] = self.newest_ids[:num_reqs]
