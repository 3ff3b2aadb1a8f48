"""Applies every sampling option to every logits row, in a fixed order.

Parameters are gathered by slot for each logits row, so a row that judges a draft is processed
exactly as it would be without speculation. Host flags decide only which work can be skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling.process_logits import (
    add_at_tokens,
    apply_min_p,
    apply_penalties,
    apply_temperature,
    apply_token_bitmask,
    apply_top_k_top_p,
    completed_words,
    forbid_tokens,
    previous_drafts,
)
from ..batch.request_table import RequestTable
from ..batch.sampling_state import PROCESSED, Feature, SamplingState

# List entries of bad words compared at once; each uses about 40 bytes.
MAX_WORD_ENTRIES = 1 << 20


@dataclass(frozen=True)
class SamplingRows:
    """The logits rows of a step: N requests, L rows. The rows of a request are contiguous."""

    slots: list[int]  # [N] host, batch row -> slot
    idx_mapping: Tensor  # [N] int32, batch row -> slot
    cu_num_logits: Tensor  # [N + 1] int32, batch row -> first logits row
    cu_num_logits_cpu: list[int]  # [N + 1]
    expanded_idx_mapping: Tensor  # [L] int32, logits row -> slot
    expanded_local_pos: Tensor  # [L] int32, 0 .. n_draft
    positions: Tensor  # [L] int64, sequence position of the row; its token gets the next one
    draft_ids: Tensor  # [L] int64, the draft that the row judges; -1 = none
    seq_lens: Tensor  # [N] int32, including this step's tokens
    max_num_drafts: int  # K

    def requests(self, first: int, last: int) -> SamplingRows:
        """The batch rows first .. last - 1, as if they were a whole step."""
        start, end = self.cu_num_logits_cpu[first], self.cu_num_logits_cpu[last]
        return SamplingRows(
            self.slots[first:last],
            self.idx_mapping[first:last],
            self.cu_num_logits[first : last + 1] - start,
            [row - start for row in self.cu_num_logits_cpu[first : last + 1]],
            self.expanded_idx_mapping[start:end],
            self.expanded_local_pos[start:end],
            self.positions[start:end],
            self.draft_ids[start:end],
            self.seq_lens[first:last],
            self.max_num_drafts,
        )


def process_logits(
    raw: Tensor,  # [L, V], not changed
    rows: SamplingRows,
    requests: RequestTable,
    grammar_bitmask: Tensor | None,  # [L, ceil(V / 32)] int32, 0 = forbidden
    features: Feature,  # the union of what the requests use
) -> Tensor:
    """Return float32 logits [L, V] whose softmax is the distribution that each row samples from.

    If no option applies, these are `raw` itself.
    """
    logits = raw.float()
    if grammar_bitmask is not None:
        logits = logits.clone() if logits is raw else logits
        apply_token_bitmask(logits, grammar_bitmask)
    state = requests.sampling
    subset = _rows_to_process(rows, state, raw.device) if features & PROCESSED else None
    processed = None
    if features & PROCESSED:
        processed = logits.clone() if subset is None else logits[subset]
        context = _gather(rows, requests, features, subset)
        _apply_options(processed, context, requests, features, grammar_bitmask is not None)
        if subset is None:
            return processed
    if features & Feature.RANDOM:
        temperature = state.temperature[rows.expanded_idx_mapping]
        logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if processed is not None and subset is not None:
        logits = logits.index_copy(0, subset, processed)
    return logits


@dataclass(frozen=True)
class _Context:
    """The inputs of the options for the P rows that they process."""

    used: list[int]  # on the host, the slots of these rows
    slots: Tensor  # [P] int64, processed row -> slot
    positions: Tensor  # [P] int64, sequence position of the row
    local_pos: Tensor  # [P] int32, number of this step's drafts before the row
    output_len: Tensor  # [P] int64, number of output tokens before the row, drafts included
    drafts: Tensor  # [P, K] the drafts before the row, nearest first, -1 = none


def _forbid_stops(
    logits: Tensor,  # [P, V] float32, in place
    stop_ids: Tensor,  # [P, S] int, -1 = none
    too_short: Tensor,  # [P] bool
    has_grammar: bool,
) -> None:
    """Forbid stop tokens in rows that are `too_short`.

    Rows in which a grammar allows only stop tokens keep them, because their text is complete.
    """
    if has_grammar:
        ids = stop_ids.clamp(min=0).long()
        before = logits.gather(1, ids)
    forbid_tokens(logits, stop_ids, too_short[:, None])
    if has_grammar:
        over = (logits.amax(-1) == float("-inf"))[:, None] & (stop_ids >= 0)
        kept = torch.where(over, before, float("-inf"))
        logits.scatter_reduce_(1, ids, kept, "amax")


def _rows_to_process(
    rows: SamplingRows, state: SamplingState, device: torch.device
) -> Tensor | None:
    """The logits rows whose request uses an option of `PROCESSED`; None = process all rows.

    Selects rows only on the CPU: elsewhere selecting costs more than it saves.
    """
    if device.type != "cpu":
        return None
    chosen: list[int] = []
    for index, slot in enumerate(rows.slots):
        if state.uses(slot, PROCESSED):
            chosen.extend(range(rows.cu_num_logits_cpu[index], rows.cu_num_logits_cpu[index + 1]))
    return None if len(chosen) == rows.cu_num_logits_cpu[-1] else torch.tensor(chosen)


def _gather(
    rows: SamplingRows, requests: RequestTable, features: Feature, subset: Tensor | None
) -> _Context:
    slots = rows.expanded_idx_mapping.long()  # [L] logits row -> slot
    drafts = previous_drafts(rows.draft_ids, rows.expanded_local_pos, rows.max_num_drafts)
    positions, local_pos = rows.positions, rows.expanded_local_pos
    output_len = positions + 1 - requests.prompt_len[slots]
    if subset is None:
        return _Context(rows.slots, slots, positions, local_pos, output_len, drafts)
    used = [slot for slot in rows.slots if requests.sampling.uses(slot, PROCESSED)]
    columns = (slots, positions, local_pos, output_len, drafts)
    return _Context(used, *(column[subset] for column in columns))


def _forbid_bad_words(logits: Tensor, of: _Context, requests: RequestTable) -> None:
    """Forbid the last token of each bad word if the request has just emitted its other tokens.

    logits: [P, V] float32, changed in place. Processes the rows in pieces of bounded memory.
    """
    words = requests.sampling.bad_words
    width = words.longest(of.used)
    count = max(1, MAX_WORD_ENTRIES // width)
    for start in range(0, logits.shape[0], count):
        piece = slice(start, start + count)
        (tokens, after, first), _ = words.padded(of.slots[piece], width)  # [p, width] each
        before = _tokens_before(of, piece, after.long(), requests.all_token_ids)
        forbid_tokens(logits[piece], tokens, completed_words(tokens, after, first, before))


def _tokens_before(
    of: _Context,
    piece: slice,  # selects p of the P rows
    back: Tensor,  # [p, T] int64, distances to look back; 1 = the token at the row's own position
    all_token_ids: Tensor,  # [R, max_model_len] int32
) -> Tensor:
    """The output tokens at these distances before each row's next token, [p, T]; -2 = none.

    Drafts of this step count as output.
    """
    drafts = of.drafts[piece]
    at = (of.positions[piece, None] + 1 - back).clamp(min=0)
    known = all_token_ids[of.slots[piece, None], at.clamp(max=all_token_ids.shape[1] - 1)].long()
    if drafts.shape[1]:
        drafted = drafts.gather(1, (back - 1).clamp(min=0, max=drafts.shape[1] - 1))
        known = torch.where(back <= of.local_pos[piece, None], drafted, known)
    return torch.where(back <= of.output_len[piece, None], known, -2)


def _apply_options(
    logits: Tensor,  # [P, V] float32, in place
    of: _Context,
    requests: RequestTable,
    features: Feature,
    has_grammar: bool,
) -> None:
    """Apply every option but the grammar. Their order is part of the interface."""
    slots, state = of.slots, requests.sampling
    if features & Feature.BIAS:
        (ids, values), _ = state.biases.padded(slots, state.biases.longest(of.used))
        add_at_tokens(logits, ids, values.view(torch.float32))
    if features & Feature.ALLOWED and state.allowed_bits is not None:
        apply_token_bitmask(logits, state.allowed_bits[slots])
    if features & Feature.MIN_TOKENS:
        too_short = of.output_len < state.min_tokens[slots]
        (ids,), _ = state.stop_ids.padded(slots, state.stop_ids.longest(of.used))
        _forbid_stops(logits, ids, too_short, has_grammar)
    if features & Feature.PENALTIES:
        assert state.output_bin_counts is not None and state.prompt_bin_mask is not None
        repeats = features & Feature.REPETITION
        apply_penalties(
            logits,
            state.output_bin_counts[slots],
            of.drafts,
            state.presence[slots],
            state.frequency[slots],
            state.repetition[slots] if repeats else None,
            state.prompt_bin_mask[slots] if repeats else None,
        )
    if features & Feature.BAD_WORDS:
        _forbid_bad_words(logits, of, requests)
    if features & Feature.RANDOM:
        apply_temperature(logits, state.temperature[slots])
    if features & Feature.MIN_P:
        apply_min_p(logits, state.min_p[slots])
    if features & (Feature.TOP_K | Feature.TOP_P):
        any_top_p = bool(features & Feature.TOP_P)
        top_k, top_p = state.top_k[slots], state.top_p[slots]
        apply_top_k_top_p(logits, top_k, top_p, state.max_top_k(of.used), any_top_p)
