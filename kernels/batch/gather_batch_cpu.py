"""NumPy versions of `gather_batch`'s `prepare_inputs` and `post_update` for the CPU, row by row.

A torch operation costs much more than the few numbers it works on here: as tensor code, these two
functions cost as much as two layers of a small model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from .step_sizes import StepSizes


def prepare_inputs_cpu(
    requests: Any,  # RequestTensors
    batch: Any,  # BatchTensors
    sizes: StepSizes,
) -> None:
    """Does what `prepare_inputs_reference` does."""
    num_reqs, num_tokens, _, _, num_tokens_padded = sizes
    all_ids, draft_tokens = requests.all_token_ids.numpy(), requests.draft_tokens.numpy()
    next_prefill = requests.next_prefill_tokens.numpy()
    newest = requests.last_sampled_tokens.numpy()
    ids, positions = batch.input_ids.numpy(), batch.positions.numpy()
    seq_lens, num_drafts = batch.seq_lens.numpy(), batch.num_draft_tokens.numpy()
    indices, slots_of = batch.logits_indices.numpy(), batch.expanded_idx_mapping.numpy()
    local_pos, judged = batch.expanded_local_pos.numpy(), batch.draft_ids.numpy()
    logits_positions = batch.logits_positions.numpy()
    width = all_ids.shape[1]
    slots = batch.idx_mapping[:num_reqs].tolist()  # [N] batch row -> slot
    bounds = batch.query_start_loc[: num_reqs + 1].tolist()
    logits_bounds = batch.cu_num_logits[: num_reqs + 1].tolist()
    computed_of = requests.num_computed_tokens.numpy()
    prefill_lens = requests.prefill_len.numpy()
    for row, slot in enumerate(slots):
        start, end = bounds[row], bounds[row + 1]
        computed, prefill_len = int(computed_of[slot]), int(prefill_lens[slot])
        seq_len = computed + end - start
        seq_lens[row] = seq_len
        positions[start:end] = np.arange(computed, seq_len)
        known = max(min(seq_len, width) - computed, 0)  # tokens within the table
        ids[start : start + known] = all_ids[slot, computed : computed + known]
        ids[start + known : end] = all_ids[slot, width - 1]
        if seq_len < prefill_len:
            next_prefill[slot] = all_ids[slot, min(seq_len, width - 1)]

        # rows that produce logits: the last n_draft + 1
        first, last = logits_bounds[row], logits_bounds[row + 1]
        drafts = draft_tokens[slot, : last - first - 1]
        begin = end - (last - first)  # token row of the first logits row
        indices[first:last] = np.arange(begin, end)
        slots_of[first:last] = slot
        local_pos[first:last] = np.arange(last - first)
        judged[first : last - 1] = drafts
        judged[last - 1] = -1
        logits_positions[first:last] = positions[begin:end]
        num_drafts[row] = np.count_nonzero(drafts >= 0)
        if seq_len > prefill_len:
            ids[begin] = newest[slot]
            ids[begin + 1 : end] = np.maximum(drafts, 0)
    seq_lens[num_reqs:] = 0
    num_drafts[num_reqs:] = 0
    ids[num_tokens:num_tokens_padded] = 0
    positions[num_tokens:num_tokens_padded] = 0


def post_update_cpu(
    requests: Any,  # RequestTensors
    batch: Any,  # BatchTensors
    sampled: Any,  # SampledTokens
    output_bin_counts: Tensor | None,
) -> None:
    """Does what `post_update_reference` does."""
    num_reqs = sampled.num_sampled.shape[0]
    all_ids, total_len = requests.all_token_ids.numpy(), requests.total_len.numpy()
    computed, newest = requests.num_computed_tokens.numpy(), requests.last_sampled_tokens.numpy()
    counts = None if output_bin_counts is None else output_bin_counts.numpy()
    bounds, width = batch.query_start_loc[: num_reqs + 1].tolist(), all_ids.shape[1]
    rows = zip(
        batch.idx_mapping[:num_reqs].tolist(),
        sampled.sampled_token_ids.tolist(),
        sampled.num_sampled.tolist(),
        sampled.num_rejected.tolist(),
        strict=True,
    )
    for row, (slot, token_ids, count, rejected) in enumerate(rows):
        if slot < 0:
            continue
        computed[slot] += bounds[row + 1] - bounds[row] - rejected
        if not count:
            continue
        tokens, at = token_ids[:count], int(total_len[slot])
        stored = tokens[: width - at]
        all_ids[slot, at : at + len(stored)] = stored
        total_len[slot] = at + len(stored)
        newest[slot] = tokens[-1]
        if counts is not None:
            np.add.at(counts[slot], tokens, 1)
