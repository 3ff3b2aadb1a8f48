"""The step of gated delta layers for rows of few tokens: one program advances a part of one head.

The kernel is bound by the bytes of the states, which it reads once and writes once. `StepPlan` says
how a state is cut into programs and in which order they run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..rows import DeltaRows, DeltaShape, DeltaState, DeltaWeights
from .delta_parts import conv_weights, convolved, gates_of, normed, row_fields

# Orders of programs, the fastest index first.
ROW_HEAD_TILE, TILE_HEAD_ROW, TILE_ROW_HEAD = 0, 1, 2
_FEW_ROWS = 16
_MOST_AT_ONCE = 4  # tokens; each has its own copy of the code


@dataclass(frozen=True)
class StepPlan:
    """How the states of a step are divided among programs."""

    block_v: int = 32  # values of a program, in one head
    warps: int = 1
    registers: int | None = None  # at most, of a thread; with fewer of them, more programs fit
    at_once: bool = False  # a row's tokens do not wait for one another, if the log holds few
    order: int = TILE_HEAD_ROW  # neighbours in memory are then neighbours in time
    streams: bool = False  # states are marked as read once and written once


@triton.jit
def _absorbed(state, key, value, decay, beta):
    """One token: a state tile [K, V] -> state; decay is a factor."""
    change = beta * (value - decay * tl.sum(state * key[:, None], 0))
    return decay * state + key[:, None] * change[None, :]


@triton.jit
def _advanced(state, query, key, value, decay, beta):
    """One token: a state tile [K, V] -> (state, output [V]); decay is a factor.

    The output is a sum over the old state and a share of the change, so that both sums over the
    state are independent of each other.
    """
    seen = tl.sum(state * key[:, None], 0)
    asked = tl.sum(state * query[:, None], 0)
    change = beta * (value - decay * seen)
    output = decay * asked + tl.sum(query * key, 0) * change
    return decay * state + key[:, None] * change[None, :], output


@triton.jit
def _dots(vector, others, COUNT: tl.constexpr):
    """The products of a vector with the first COUNT of others."""
    found = ()
    for j in tl.static_range(COUNT):
        found = found + (tl.sum(vector * others[j], 0),)
    return found


@triton.jit
def _corrected(seen, dots, changes, COUNT: tl.constexpr):
    """What a state yields after its first COUNT changes: dots are the products with their keys."""
    for j in tl.static_range(COUNT):
        seen = seen + dots[j] * changes[j]
    return seen


@triton.jit(
    do_not_specialize=["rows_stride", "num_slots"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _step_kernel(
    x,  # [M*, channels]
    out,  # [M*, Hv * Dv]
    conv,  # [conv channels, 4]
    decay_rate,  # [Hv]
    dt_bias,  # [Hv]
    state,  # [R + 1, Hv, Dk, Dv]
    history,  # [R + 1, 3 + LOG, channels]
    snapshots,  # [B, Hv, Dk, Dv]
    rows,  # [7, N*]
    query_start_loc,  # [N* + 1]
    conv_stride,
    tap_stride,
    x_stride,
    rows_stride,
    out_stride,
    num_slots,
    LOG: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ORDER: tl.constexpr,
    STREAMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tokens of a row in one head. States and logs are of earlier steps, so that logged tokens
    are absorbed before the kernel waits for x.

    Rows without work are masked, not skipped: behind a branch, the compiler would load the row's
    fields one after another.
    """
    if ORDER == 0:
        row, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    elif ORDER == 1:
        tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    else:
        tile, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV
    length, border, block, slot, start, lag, count = row_fields(rows, rows_stride, row)
    token = tl.load(query_start_loc + row).to(tl.int64)
    limit: tl.constexpr = LOG if LOG > 0 else 1
    count = tl.where(count > limit, 0, count)
    is_real = slot < num_slots - 1
    # Scalars are added to pointers first: then the offsets of a thread's elements are constants.
    k_at, v_at = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    first_v = tile * BLOCK_V
    in_k, in_v = k_at < DK, v_at < DV - first_v
    q_channel = (head // (HV // HK)) * DK
    k_channel = HK * DK + q_channel
    v_channel = 2 * HK * DK + head * DV + first_v
    b_channel = 2 * HK * DK + HV * DV + head
    place = k_at[:, None] * DV + v_at[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    known = (length > 0) & (lag + count > 0)  # a sequence begins with zeros
    own = state + slot * (HV * DK * DV) + head * (DK * DV) + first_v + place
    saved = snapshots + block * (HV * DK * DV) + head * (DK * DV) + first_v + place
    if STREAMS:
        current = tl.load(own, mask=in_tile & known, other=0.0, eviction_policy="evict_first")
    else:
        current = tl.load(own, mask=in_tile & known, other=0.0)
    # The inputs of the three tokens before.
    past = history + slot * (3 + LOG) * channels
    q_past = past + lag * channels + q_channel + k_at
    has0, has1, has2 = known & (length >= 3), known & (length >= 2), known
    k0 = tl.load(past + k_channel + k_at, mask=in_k & has0, other=0.0)
    k1 = tl.load(past + channels + k_channel + k_at, mask=in_k & has1, other=0.0)
    k2 = tl.load(past + 2 * channels + k_channel + k_at, mask=in_k & has2, other=0.0)
    v0 = tl.load(past + v_channel + v_at, mask=in_v & has0, other=0.0)
    v1 = tl.load(past + channels + v_channel + v_at, mask=in_v & has1, other=0.0)
    v2 = tl.load(past + 2 * channels + v_channel + v_at, mask=in_v & has2, other=0.0)
    has_new = count > 0
    q0 = tl.load(q_past, mask=in_k & has_new & (start >= 3), other=0.0)
    q1 = tl.load(q_past + channels, mask=in_k & has_new & (start >= 2), other=0.0)
    q2 = tl.load(q_past + 2 * channels, mask=in_k & has_new & (start >= 1), other=0.0)
    q_w0, q_w1, q_w2, q_w3 = conv_weights(conv, conv_stride, tap_stride, q_channel, k_at, in_k)
    k_w0, k_w1, k_w2, k_w3 = conv_weights(conv, conv_stride, tap_stride, k_channel, k_at, in_k)
    v_w0, v_w1, v_w2, v_w3 = conv_weights(conv, conv_stride, tap_stride, v_channel, v_at, in_v)
    rate, bias = tl.load(decay_rate + head), tl.load(dt_bias + head)
    if LOG > 0:
        past += 3 * channels
        # Each token's inputs are loaded while the token before is absorbed.
        k3 = tl.load(past + k_channel + k_at, mask=in_k & (lag > 0), other=0.0)
        v3 = tl.load(past + v_channel + v_at, mask=in_v & (lag > 0), other=0.0)
        b = tl.load(past + b_channel, mask=lag > 0, other=0.0)
        a = tl.load(past + b_channel + HV, mask=lag > 0, other=0.0)
        for t in range(lag):
            past += channels
            more = t + 1 < lag
            k4 = tl.load(past + k_channel + k_at, mask=in_k & more, other=0.0)
            v4 = tl.load(past + v_channel + v_at, mask=in_v & more, other=0.0)
            next_b = tl.load(past + b_channel, mask=more, other=0.0)
            next_a = tl.load(past + b_channel + HV, mask=more, other=0.0)
            decay, beta = gates_of(a, b, rate, bias)
            key = normed(convolved(k0, k1, k2, k3, k_w0, k_w1, k_w2, k_w3))
            value = convolved(v0, v1, v2, v3, v_w0, v_w1, v_w2, v_w3)
            current = _absorbed(current, key, value, tl.exp(decay), beta)
            if (length + t + 1 == border) & (block > 0) & is_real:
                tl.store(saved, current, mask=in_tile)
            a, b = next_a, next_b
            k0, k1, k2, k3 = k1, k2, k3, k4
            v0, v1, v2, v3 = v1, v2, v3, v4
        changed = (lag > 0) & is_real
        if STREAMS:
            tl.store(own, current, mask=in_tile & changed, cache_modifier=".cs")
        else:
            tl.store(own, current, mask=in_tile & changed)
    wait_for_inputs(PDL)
    now = x + token * x_stride
    target = out + token * out_stride + head * DV + first_v + v_at
    q3 = tl.load(now + q_channel + k_at, mask=in_k & has_new, other=0.0)
    k3 = tl.load(now + k_channel + k_at, mask=in_k & has_new, other=0.0)
    v3 = tl.load(now + v_channel + v_at, mask=in_v & has_new, other=0.0)
    b = tl.load(now + b_channel, mask=has_new, other=0.0)
    a = tl.load(now + b_channel + HV, mask=has_new, other=0.0)
    if AT_ONCE:
        # All tokens look at the state as it is now: `changes` [V] are what those before would have
        # added to it, times their keys, decayed as far as the token.
        ks, qs, vs = (k0, k1, k2, k3), (q0, q1, q2, q3), (v0, v1, v2, v3)
        bs, decays = (b,), (a,)
        for t in tl.static_range(1, LOG):
            more = t < count
            source = now + t * x_stride
            qs = qs + (tl.load(source + q_channel + k_at, mask=in_k & more, other=0.0),)
            ks = ks + (tl.load(source + k_channel + k_at, mask=in_k & more, other=0.0),)
            vs = vs + (tl.load(source + v_channel + v_at, mask=in_v & more, other=0.0),)
            bs = bs + (tl.load(source + b_channel, mask=more, other=0.0),)
            decays = decays + (tl.load(source + b_channel + HV, mask=more, other=0.0),)
        keys, changes, total = (), (), 1.0
        for t in tl.static_range(LOG):
            decay, beta = gates_of(decays[t], bs[t], rate, bias)
            query = normed(
                convolved(qs[t], qs[t + 1], qs[t + 2], qs[t + 3], q_w0, q_w1, q_w2, q_w3)
            )
            query = query * DK**-0.5
            key = normed(convolved(ks[t], ks[t + 1], ks[t + 2], ks[t + 3], k_w0, k_w1, k_w2, k_w3))
            value = convolved(vs[t], vs[t + 1], vs[t + 2], vs[t + 3], v_w0, v_w1, v_w2, v_w3)
            factor = tl.exp(decay)
            total = total * factor
            decayed = ()
            for j in tl.static_range(t):
                decayed = decayed + (changes[j] * factor,)
            seen = total * tl.sum(current * key[:, None], 0)
            asked = total * tl.sum(current * query[:, None], 0)
            seen = _corrected(seen, _dots(key, keys, t), decayed, t)
            keys, changes = keys + (key,), decayed + (beta * (value - seen),)
            asked = _corrected(asked, _dots(query, keys, t + 1), changes, t + 1)
            has_token = in_v & (t < count)
            tl.store(target + t * out_stride, asked.to(out.dtype.element_ty), mask=has_token)
    elif LOG > 0:
        for t in range(count):
            now += x_stride
            more = t + 1 < count
            q4 = tl.load(now + q_channel + k_at, mask=in_k & more, other=0.0)
            k4 = tl.load(now + k_channel + k_at, mask=in_k & more, other=0.0)
            v4 = tl.load(now + v_channel + v_at, mask=in_v & more, other=0.0)
            next_b = tl.load(now + b_channel, mask=more, other=0.0)
            next_a = tl.load(now + b_channel + HV, mask=more, other=0.0)
            decay, beta = gates_of(a, b, rate, bias)
            query = normed(convolved(q0, q1, q2, q3, q_w0, q_w1, q_w2, q_w3)) * DK**-0.5
            key = normed(convolved(k0, k1, k2, k3, k_w0, k_w1, k_w2, k_w3))
            value = convolved(v0, v1, v2, v3, v_w0, v_w1, v_w2, v_w3)
            current, result = _advanced(current, query, key, value, tl.exp(decay), beta)
            tl.store(target, result.to(out.dtype.element_ty), mask=in_v)
            target += out_stride
            a, b = next_a, next_b
            q0, q1, q2, q3 = q1, q2, q3, q4
            k0, k1, k2, k3 = k1, k2, k3, k4
            v0, v1, v2, v3 = v1, v2, v3, v4
    else:
        decay, beta = gates_of(a, b, rate, bias)
        query = normed(convolved(q0, q1, q2, q3, q_w0, q_w1, q_w2, q_w3)) * DK**-0.5
        key = normed(convolved(k0, k1, k2, k3, k_w0, k_w1, k_w2, k_w3))
        value = convolved(v0, v1, v2, v3, v_w0, v_w1, v_w2, v_w3)
        current, result = _advanced(current, query, key, value, tl.exp(decay), beta)
        tl.store(target, result.to(out.dtype.element_ty), mask=in_v & has_new)
        changed = has_new & is_real
        if STREAMS:
            tl.store(own, current, mask=in_tile & changed, cache_modifier=".cs")
        else:
            tl.store(own, current, mask=in_tile & changed)
        if changed & (start + count == border) & (block > 0):
            tl.store(saved, current, mask=in_tile)


def plan_step(num_rows: int, log: int) -> StepPlan:
    """The plan of a step of N* rows; the fastest of those measured on an H200."""
    if log:
        return StepPlan(32, 1, None, at_once=num_rows > 1)
    return StepPlan(32, 1, 200) if num_rows <= _FEW_ROWS else StepPlan(64, 4, 128)


def step_rows(
    x: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    state: DeltaState,
    rows: DeltaRows,
    out: Tensor,
) -> None:
    """Absorb logged tokens in all rows, and process the tokens of rows that are not bulk."""
    num_rows, num_slots = rows.values.shape[1], state.state.shape[0]
    plan = plan_step(num_rows, rows.log)
    block_v = min(plan.block_v, triton.next_power_of_2(shape.value_dim))
    sizes = num_rows, shape.num_value_heads, triton.cdiv(shape.value_dim, block_v)
    orders = ((0, 1, 2), (2, 1, 0), (2, 0, 1))
    _step_kernel[tuple(sizes[of] for of in orders[plan.order])](
        x,
        out,
        weights.conv,
        weights.decay_rate,
        weights.dt_bias,
        state.state,
        state.history,
        state.snapshots,
        rows.values,
        rows.query_start_loc,
        *weights.conv.stride(),
        x.stride(0),
        rows.values.stride(0),
        out.stride(0),
        num_slots=num_slots,
        LOG=rows.log,
        HK=shape.num_key_heads,
        HV=shape.num_value_heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_V=block_v,
        ORDER=plan.order,
        STREAMS=plan.streams,
        AT_ONCE=plan.at_once and 1 < rows.log <= _MOST_AT_ONCE,
        num_warps=plan.warps,
        maxnreg=plan.registers,
        **pdl_options(x),
    )


hash_functions(globals())
