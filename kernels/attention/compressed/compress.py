"""DeepSeek V4's compressor: one cached entry for each window of tokens.

Entry w is norm(sum_i softmax_i(gate_i + bias_i) * kv_i), channel by channel, rotated at the
position of its window's first token. With overlap the sum has two windows: the rows of window w - 1
give their first half of channels, those of window w their second half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...operation import operation
from .pages import Compressor, Pages, TokenRows
from .tail_rotary import tail_rotary_reference


def compress_reference(rule: Compressor, pending: Pages, tokens: TokenRows, entries: Pages) -> None:
    """Write an entry for each window that this pass completes.

    The pending rows of this pass must have been written. `tokens` and both slot mappings are of the
    same M token rows; a token without a slot writes nothing.
    """
    # This plain version waits for the device.
    ratio = rule.entry_tokens
    completes = ((tokens.positions + 1) % ratio == 0) & (entries.slot_mapping >= 0)
    done = completes.nonzero().squeeze(1)  # [n] token rows
    if done.numel() == 0:
        return
    found = entries_of(rule, pending, tokens.requests[done], tokens.positions[done])
    entries.write(entries.slot_mapping[done] // ratio, found)


compress = operation(compress_reference, "entries.cache", ".triton.compress")


def entries_of(rule: Compressor, pending: Pages, requests: Tensor, last: Tensor) -> Tensor:
    """The entries of the windows that end at positions `last` [n]: [n, D] float32.

    Rows of tokens before position 0 do not count.
    """
    ratio, dim = rule.entry_tokens, rule.dim
    back = torch.arange(ratio - 1, -1, -1, device=last.device)  # oldest first
    own = last.unsqueeze(1) - back  # [n, r] positions
    kv, gate = _window(rule, pending, requests, own.clamp(min=0))
    if rule.overlap:
        before = own - ratio
        exists = (before >= 0)[..., None]
        old_kv, old_gate = _window(rule, pending, requests, before.clamp(min=0))
        old_gate = old_gate[..., :dim].masked_fill(~exists, float("-inf"))
        gate = torch.cat((old_gate, gate[..., dim:]), dim=1)
        kv = torch.cat((old_kv[..., :dim], kv[..., dim:]), dim=1)
    entry = (gate.softmax(dim=1) * kv).sum(1, keepdim=True)  # [n, 1, D]
    first = own[:, 0].clamp(min=0)
    args = (rule.cos_sin_cache, rule.eps, rule.weight)
    return tail_rotary_reference(entry, first, *args).squeeze(1)


def _window(
    rule: Compressor, pending: Pages, requests: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The kv and the biased gates of `positions` [n, r]: [n, r, width] float32 each."""
    rows = pending.rows[pending.slots_of(requests, positions)].float()
    kv = rows[..., rule.kv_column : rule.kv_column + rule.width]
    gate = rows[..., rule.gate_column : rule.gate_column + rule.width]
    return kv, gate + rule.bias
