"""The gated delta rule with its causal convolution, over states kept per request.

Formulas: Gated Delta Networks (arXiv 2412.06464), with the chunked form of section 3.3. For each
value head, with its key head's query and key:

    q, k, v = silu(conv(input)); q, k are normalised, q is scaled by key_dim ** -0.5
    g = -exp(A_log) * softplus(a + dt_bias); beta = sigmoid(b)
    S = exp(g) S; S = S + k (beta (v - k^T S))^T; o = q^T S
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operation import operation
from .gated_norm import gated_norm
from .rows import (
    BLOCK,
    BORDER,
    CHUNK,
    COUNT,
    LAG,
    LENGTH,
    SLOT,
    START,
    DeltaRows,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    OutputGate,
)

_NORM_EPS = 1e-6

# Of tokens: query and key [..., Hv, Dk], value [..., Hv, Dv], log decay and beta [..., Hv].
Terms = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def gated_delta_reference(
    x: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    state: DeltaState,
    rows: DeltaRows,
    gate: OutputGate | None = None,
) -> Tensor:
    """Process a step's tokens and update the states; `prepare_rows` must have run.

    x: [M*, channels]; returns [M*, value heads * value_dim], normed and gated if `gate` is given;
    in padded rows anything finite.
    """
    # It reads the host only where `rows` allows it.
    out = x.new_zeros(x.shape[0] + 1, shape.value_size)  # the last row takes what is padding
    _step(x, weights, shape, state, rows, out)
    for row, first, count in rows.bulk.rows:
        tokens = slice(first, first + count)
        _absorb(x[tokens], weights, shape, state, rows.values[:, row].tolist(), out[tokens])
    return out[:-1] if gate is None else gated_norm(out[:-1], shape, gate)


gated_delta = operation(
    gated_delta_reference,
    "x",
    ".triton.gated_delta",
    lambda x, weights, shape, *others, **options: shape.conv_width == 4,
)


def _step(
    x: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    state: DeltaState,
    rows: DeltaRows,
    out: Tensor,
) -> None:
    """Absorb logged tokens in all rows, then process the rows that are not bulk."""
    values, log, tail_len = rows.values, rows.log, shape.conv_width - 1
    slots, lags, starts = values[SLOT].long(), values[LAG], values[START]
    current, is_fresh = state.state[slots], values[LENGTH] == 0
    if not rows.on_host or bool(is_fresh.any()):
        current = torch.where(is_fresh[:, None, None, None], 0.0, current)
    history = state.history[slots]  # [N, tail + log, channels]
    at = torch.arange(history.shape[1], device=x.device)
    before = values[LENGTH][:, None] - tail_len + at < 0  # of the sequence's first token
    history = torch.where(before[..., None], 0.0, history)
    if rows.max_lag:
        logged = _terms(history[:, : tail_len + rows.max_lag], weights, shape)
        for t in range(rows.max_lag):
            _advance(current, logged, t, lags > t)
            hit = (values[LENGTH] + t + 1 == values[BORDER]) & (lags > t)
            if not rows.on_host or bool(hit.any()):
                blocks = torch.where(hit, values[BLOCK], 0).long()
                state.snapshots.index_copy_(0, blocks, current)
                state.snapshot_tails.index_copy_(0, blocks, history[:, t + 1 : t + 1 + tail_len])
    taps = (lags.long()[:, None] + torch.arange(tail_len, device=x.device))[..., None]
    tail = history.gather(1, taps.expand(-1, -1, shape.channels))
    limit = max(log, 1)
    counts = torch.where(values[COUNT] > limit, 0, values[COUNT])  # bulk rows only catch up
    steps = torch.arange(rows.max_count, device=x.device)
    tokens = rows.query_start_loc[:-1, None] + steps  # [N, max_count] token rows
    fresh = x[tokens.clamp(max=x.shape[0] - 1).long()]
    inputs = torch.cat((tail, fresh), dim=1)
    if log:
        state.state.index_copy_(0, slots, current)
        used = tail_len + min(log, rows.max_count)
        state.history[:, :used].index_copy_(0, slots, inputs[:, :used])
    terms = _terms(inputs, weights, shape)
    targets = torch.where(steps < counts[:, None], tokens, x.shape[0]).long()
    for t in range(rows.max_count):
        result = _advance(current, terms, t, counts > t)
        out.index_copy_(0, targets[:, t], result.flatten(1).to(out.dtype))
    if log:
        return
    state.state.index_copy_(0, slots, current)
    taps = (counts.long()[:, None] + torch.arange(tail_len, device=x.device))[..., None]
    tail = inputs.gather(1, taps.expand(-1, -1, shape.channels))
    state.history.index_copy_(0, slots, tail)
    hit = (starts + counts == values[BORDER]) & (counts > 0)
    if not rows.on_host or bool(hit.any()):
        blocks = torch.where(hit, values[BLOCK], 0).long()
        state.snapshots.index_copy_(0, blocks, current)
        state.snapshot_tails.index_copy_(0, blocks, tail)


def _absorb(
    x: Tensor,  # [T, channels]
    weights: DeltaWeights,
    shape: DeltaShape,
    state: DeltaState,
    row: list[int],  # a column of `DeltaRows.values`
    out: Tensor,  # [T, value size]
) -> None:
    """Process a bulk row, whose logged tokens are absorbed already."""
    slot, tail_len = row[SLOT], shape.conv_width - 1
    inputs = torch.cat((state.history[slot, :tail_len], x))
    result, last = delta_chunks(_terms(inputs, weights, shape), state.state[slot])
    out.copy_(result.flatten(1))
    state.state[slot].copy_(last)
    state.history[slot, :tail_len].copy_(inputs[-tail_len:])
    if row[START] + row[COUNT] == row[BORDER] and row[BLOCK]:
        state.snapshots[row[BLOCK]].copy_(last)
        state.snapshot_tails[row[BLOCK]].copy_(inputs[-tail_len:])


def _terms(inputs: Tensor, weights: DeltaWeights, shape: DeltaShape) -> Terms:
    """What the rule reads of each token: [..., tail + T, channels] inputs -> terms of T tokens."""
    width, num_conv = shape.conv_width, shape.conv_channels
    count = inputs.shape[-2] - width + 1
    taps = [inputs[..., i : i + count, :num_conv].float() for i in range(width)]
    mixed = taps[0] * weights.conv[:, 0]
    for i in range(1, width):
        mixed = torch.addcmul(mixed, taps[i], weights.conv[:, i])
    mixed = F.silu(mixed)
    gates = inputs[..., width - 1 :, num_conv:].float()
    b, a = gates.chunk(2, dim=-1)
    decay = -weights.decay_rate * F.softplus(a + weights.dt_bias)
    sizes = [shape.key_size, shape.key_size, shape.value_size]
    query, key, value = torch.split(mixed, sizes, dim=-1)
    repeats = shape.num_value_heads // shape.num_key_heads

    def heads(part: Tensor) -> Tensor:
        part = part.view(*part.shape[:-1], shape.num_key_heads, shape.key_dim)
        part = part * (part.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()
        return part.repeat_interleave(repeats, dim=-2)

    assert decay.shape[-2] == count
    query = heads(query) * shape.key_dim**-0.5
    value = value.view(*value.shape[:-1], shape.num_value_heads, shape.value_dim)
    return query, heads(key), value, decay, b.sigmoid()


def _advance(state: Tensor, terms: Terms, t: int, active: Tensor) -> Tensor:
    """One token of each row: advance the states [N, Hv, Dk, Dv] in place, and return the outputs
    [N, Hv, Dv].

    States of rows that are not `active` [N] stay as they are.
    """
    query, key, value, decay, beta = (term[:, t] for term in terms)
    keep = active[:, None]
    state.mul_(torch.where(keep, decay, 0.0).exp()[..., None, None])
    error = value - torch.einsum("nhk,nhkv->nhv", key, state)
    change = error * torch.where(keep, beta, 0.0)[..., None]
    state.addcmul_(key[..., None], change[:, :, None])
    return torch.einsum("nhk,nhkv->nhv", query, state)


def delta_tokens(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule token by token, for tests: terms of T tokens and a state [Hv, Dk, Dv] -> (outputs
    [T, Hv, Dv], state)."""
    active = torch.ones(1, dtype=torch.bool, device=state.device)
    rows = tuple(term[None] for term in terms)
    outputs, current = [], state[None].clone()
    for t in range(terms[0].shape[0]):
        outputs.append(_advance(current, rows, t, active)[0])  # type: ignore[arg-type]
    return torch.stack(outputs), current[0]


def delta_chunks(terms: Terms, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The same in chunks: inside one, the changes of all tokens are one triangular system.

    With G the sum of log decays, change_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) change_j
    = beta_i (v_i - exp(G_i) k_i^T S).
    """
    outputs = []
    for start in range(0, terms[0].shape[0], chunk):
        parts = (term[start : start + chunk].transpose(0, 1) for term in terms)
        query, key, value, decay, beta = parts  # [Hv, T, .] and [Hv, T]
        total = decay.cumsum(-1)
        # exp(G_i - G_j) for j <= i; the others would overflow
        between = (total[:, :, None] - total[:, None]).tril().exp().tril()
        beta, reach = beta[..., None], total.exp()[..., None]
        system = (beta * (key @ key.mT) * between).tril(-1)
        wanted = beta * (value - reach * (key @ state))
        change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(reach * (query @ state) + (query @ key.mT * between) @ change)
        left = (total[:, -1:] - total).exp()[..., None]  # decay from each token to the last
        state = total[:, -1].exp()[:, None, None] * state + (key * left).mT @ change
    return torch.cat(outputs, dim=1).transpose(0, 1), state
