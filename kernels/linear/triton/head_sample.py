"""Picks tokens inside an output head's linear kernel, so that the logits are never written.

Each program of the linear kernel stores the best of its own tokens (`keep_best`), and a small
second kernel picks the best of these. Noise, ties and therefore tokens are those of
`kernels.sampling.sample`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ...sampling.triton.sample import BLOCK as LOGITS_BLOCK
from ...sampling.triton.sample import best_of_drawn_row, best_of_greedy_row, gumbel, row_key

_BLOCK = 4096  # best tokens that the second kernel reads at once
# (warps, limit of registers per thread, tiles) of a program that picks the best of a block of
# logits. The kernel's time depends on how many threads registers allow on a multiprocessor.
BEST_OF_BLOCK: tuple[int, int | None, int] = (16, None, 4)


@triton.jit
def keep_best(
    logits,  # [N, M] float32, already rounded to the model's dtype
    token,  # [N] int32
    inside,  # [N, 1] or [N, M], whether the logit exists
    row,  # [M] int32
    row_inside,  # [M]
    block,
    num_blocks,
    seeds,  # [L] int64
    positions,  # [L] int64
    greedy,  # [L] bool
    temperature,  # [L] float32, 0 = greedy
    best,  # [L, B] float32, score of the block's best token
    best_token,  # [L, B] int32
    largest,  # [L, B] float32, the block's largest logit, NaN if one is
    salt,
    NOISE: tl.constexpr,
):
    """Store each row's best token of this block of the vocabulary, the lowest id among equals."""
    logits = tl.where(inside, logits, float("-inf"))
    is_nan = logits != logits
    finite = tl.where(is_nan, float("-inf"), logits)
    score = finite
    if NOISE:
        cold = tl.load(greedy + row, mask=row_inside, other=1) != 0
        if tl.max((cold == 0).to(tl.int32), 0) > 0:  # skip the noise if all rows are greedy
            heat = tl.load(temperature + row, mask=row_inside, other=1.0)
            heat = tl.where(heat > 0.0, heat, 1.0)
            seed = tl.load(seeds + row, mask=row_inside, other=0)
            position = tl.load(positions + row, mask=row_inside, other=0)
            key_0, key_1 = row_key(seed, position, tl.full([], salt, tl.int32))
            noise = gumbel(key_0[None, :], key_1[None, :], token.to(tl.uint32)[:, None])
            noise = tl.where(cold[None, :], 0.0, noise)
            score = tl.div_rn(finite, heat[None, :] + tl.zeros_like(finite)) + noise
            score = tl.where(inside, score, float("-inf"))
    value = tl.max(score, 0)
    # two cheap reductions, maximum and then index, are faster than one that finds both
    best_at = tl.min(tl.where(score == value[None, :], token[:, None], 2147483647), 0)
    at = row * num_blocks + block
    tl.store(best + at, value, mask=row_inside)
    tl.store(best_token + at, best_at, mask=row_inside)
    top = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), tl.max(finite, 0))
    tl.store(largest + at, top, mask=row_inside)


@triton.jit
def _best_of_row(
    best,  # [L, B] float32
    best_token,  # [L, B] int32
    largest,  # [L, B] float32
    row,
    num_blocks,  # B
    BLOCK: tl.constexpr,
):
    """The best score of a row, its token and the row's largest logit, NaN if one is."""
    lane = tl.arange(0, BLOCK)
    value = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], 2147483647, tl.int32)
    top = value
    is_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_blocks, BLOCK):
        at = row * num_blocks + start + lane
        inside = start + lane < num_blocks
        score = tl.load(best + at, mask=inside, other=float("-inf"))
        candidate = tl.load(best_token + at, mask=inside, other=2147483647)
        # a lane reads its tokens in ascending order, so only a larger score replaces
        replaces = (score > value) | (token == 2147483647)
        token = tl.where(replaces, candidate, token)
        value = tl.where(replaces, score, value)
        logit = tl.load(largest + at, mask=inside, other=float("-inf"))
        is_nan |= (logit != logit).to(tl.int32)
        top = tl.maximum(top, logit)
    most = tl.max(value, 0)
    chosen = tl.min(tl.where(value == most, token, 2147483647), 0)
    top = tl.where(tl.max(is_nan, 0) > 0, float("nan"), tl.max(top, 0))
    return most, chosen, top


@triton.jit
def _finish_kernel(
    best,  # [L, B] float32
    best_token,  # [L, B] int32
    largest,  # [L, B] float32
    tokens,  # [L] int64
    row_largest,  # [L] float32
    num_blocks,  # B
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    _, token, top = _best_of_row(best, best_token, largest, row, num_blocks, BLOCK)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(row_largest + row, top)


@triton.jit
def _finish_part_kernel(
    best,  # [L, B] float32
    best_token,  # [L, B] int32
    largest,  # [L, B] float32
    part,  # [L, 3] float32: score, token, largest logit
    num_blocks,  # B
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    score, token, top = _best_of_row(best, best_token, largest, row, num_blocks, BLOCK)
    tl.store(part + row * 3, score)
    tl.store(part + row * 3 + 1, token.to(tl.float32))
    tl.store(part + row * 3 + 2, top)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    parts,  # [P, L, 3] float32
    tokens,  # [L] int64
    row_largest,  # [L] float32
    num_rows,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    row, lane = tl.program_id(0), tl.arange(0, LANES)
    inside = lane < PARTS
    at = parts + (lane * num_rows + row) * 3
    wait_for_inputs(PDL)
    score = tl.load(at, mask=inside, other=float("-inf"))
    token = tl.load(at + 1, mask=inside, other=0.0)
    top = tl.load(at + 2, mask=inside, other=float("-inf"))
    first = tl.min(tl.where(score == tl.max(score, 0), lane, LANES), 0)  # it has the lower ids
    tl.store(tokens + row, tl.sum(tl.where(lane == first, token, 0.0), 0).to(tl.int64))
    is_nan = tl.max((top != top).to(tl.int32), 0) > 0
    tl.store(row_largest + row, tl.where(is_nan, float("nan"), tl.max(top, 0)))


@triton.jit(
    do_not_specialize=["salt", "first"],
    do_not_specialize_on_alignment=["positions"],
)
def _best_of_block_kernel(
    logits,  # [L, V], any float
    seeds,  # [L] int64
    positions,  # [L] int64
    greedy,  # [L] bool
    temperature,  # [L] float32
    best,  # [L, B] float32
    best_token,  # [L, B] int32
    largest,  # [L, B] float32
    stride,
    vocab_size,
    num_blocks,
    salt,
    first,  # the id of the first token
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # of BLOCK logits, of a program
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    wait_for_inputs(PDL)
    logits += row * stride
    begin = block * TILES * BLOCK
    most, best_at, is_nan = tl.full([], 0.0, tl.float32), begin, tl.full([], 0, tl.int32)
    top, is_greedy = most, True
    if NOISE:
        is_greedy = tl.load(greedy + row) != 0
        if not is_greedy:
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            key_0, key_1 = row_key(seed, position, tl.full([], salt, tl.int32))
            heat = tl.load(temperature + row)
            heat = tl.where(heat > 0.0, heat, 1.0)
            most, best_at, is_nan, top = best_of_drawn_row(
                logits, begin, vocab_size, first, key_0, key_1, heat, BLOCK, TILES
            )
    if is_greedy:
        most, best_at, is_nan = best_of_greedy_row(logits, begin, vocab_size, BLOCK, TILES)
        top = most
    at = row * num_blocks + block
    tl.store(best + at, most)
    tl.store(best_token + at, best_at + first)
    tl.store(largest + at, tl.where(is_nan > 0, float("nan"), top))


def pick_rows(logits: Tensor, draws: Any = None) -> tuple[Tensor, Tensor]:
    """See `kernels.linear.head_sample.pick_rows`."""
    return _best_of_blocks(logits, draws, 0).finish()


def best_of_part(logits: Tensor, draws: Any, first: int) -> Tensor:
    """See `kernels.linear.head_sample.best_of_part`."""
    return _best_of_blocks(logits, draws, first).finish_part()


def best_of_parts(parts: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.linear.head_sample.best_of_parts`."""
    count, num_rows, _ = parts.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=parts.device)
    largest = torch.empty(num_rows, dtype=torch.float32, device=parts.device)
    if num_rows:
        _merge_kernel[(num_rows,)](
            parts,
            tokens,
            largest,
            num_rows,
            PARTS=count,
            LANES=triton.next_power_of_2(count),
            num_warps=1,
            **pdl_options(parts),
        )
    return tokens, largest


def _best_of_blocks(logits: Tensor, draws: Any, first: int) -> HeadRows:
    """The best tokens of each block of logits [L, V], whose first column is the token `first`."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_warps, registers, tiles = BEST_OF_BLOCK
    num_blocks = triton.cdiv(vocab_size, LOGITS_BLOCK * tiles)
    head = HeadRows.of(logits, draws)
    *rows, salt = head.arguments(num_blocks)
    if num_rows:
        _best_of_block_kernel[(num_rows, num_blocks)](
            logits,
            *rows,
            logits.stride(0),
            vocab_size,
            num_blocks,
            salt,
            first,
            NOISE=head.has_noise,
            BLOCK=LOGITS_BLOCK,
            TILES=tiles,
            num_warps=num_warps,
            maxnreg=registers,
            **pdl_options(logits),
        )
    return head


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def _gather_draws_kernel(
    slots,  # [L] int32
    temperature,  # [R] float32
    seeds,  # [R] int64
    row_temperature,  # [L] float32
    row_seeds,  # [L] int64
    row_greedy,  # [L] bool
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    wait_for_inputs(PDL)
    slot = tl.load(slots + row, mask=inside, other=0)
    heat = tl.load(temperature + slot, mask=inside, other=0.0)
    tl.store(row_temperature + row, heat, mask=inside)
    tl.store(row_seeds + row, tl.load(seeds + slot, mask=inside, other=0), mask=inside)
    tl.store(row_greedy + row, heat == 0.0, mask=inside)


def gather_draws(
    slots: Tensor, temperature: Tensor, seeds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather (seeds, greedy, temperature) by row: see `kernels.linear.head_sample.gather_draws`."""
    num_rows, block = slots.shape[0], 128
    row_seeds = torch.empty(num_rows, dtype=torch.int64, device=slots.device)
    greedy = torch.empty(num_rows, dtype=torch.bool, device=slots.device)
    heat = torch.empty(num_rows, dtype=torch.float32, device=slots.device)
    if num_rows:
        _gather_draws_kernel[(triton.cdiv(num_rows, block),)](
            slots,
            temperature,
            seeds,
            heat,
            row_seeds,
            greedy,
            num_rows,
            BLOCK=block,
            num_warps=4,
            **pdl_options(slots),
        )
    return row_seeds, greedy, heat


@dataclass
class HeadRows:
    """The rows that a head picks tokens for. Without seeds every row is greedy."""

    num_rows: int  # L
    device: torch.device
    seeds: Tensor | None  # [L] int64, None = no noise
    positions: Tensor | None  # [L] int64
    greedy: Tensor | None  # [L] bool
    temperature: Tensor | None  # [L] float32
    salt: int

    @classmethod
    def of(cls, x: Tensor, draws: Any) -> HeadRows:
        """The rows of x [L, ...], with their `kernels.linear.head_sample.Draws` or None."""
        if draws is None:
            return cls(x.shape[0], x.device, None, None, None, None, 0)
        keys = draws.seeds.contiguous(), draws.positions.contiguous()
        rules = draws.greedy.contiguous(), draws.temperature.contiguous()
        return cls(x.shape[0], x.device, *keys, *rules, draws.salt)

    @property
    def has_noise(self) -> bool:
        """Whether any row draws its token."""
        return self.seeds is not None

    def arguments(self, num_blocks: int) -> tuple[Any, ...]:
        """The arguments for `keep_best` of a kernel with `num_blocks` blocks of tokens; allocates
        its results."""
        shape, device = (self.num_rows, num_blocks), self.device
        self.best = torch.empty(shape, dtype=torch.float32, device=device)
        self.largest = torch.empty(shape, dtype=torch.float32, device=device)
        self.best_token = torch.empty(shape, dtype=torch.int32, device=device)
        rows: tuple[Any, ...] = (self.seeds, self.positions, self.greedy, self.temperature)
        if not self.has_noise:
            rows = (self.best,) * 4
        return (*rows, self.best, self.best_token, self.largest, self.salt)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Pick from the blocks' best: tokens [L] int64, and each row's largest logit [L] float32,
        which is NaN if any logit is."""
        tokens = torch.empty(self.num_rows, dtype=torch.int64, device=self.device)
        largest = torch.empty(self.num_rows, dtype=torch.float32, device=self.device)
        self._launch(_finish_kernel, tokens, largest)
        return tokens, largest

    def finish_part(self) -> Tensor:
        """As `finish` for a part of the vocabulary; see `head_sample.best_of_part`."""
        part = torch.empty(self.num_rows, 3, dtype=torch.float32, device=self.device)
        self._launch(_finish_part_kernel, part)
        return part

    def _launch(self, kernel: Any, *results: Tensor) -> None:
        num_blocks = self.best.shape[1]
        block = min(_BLOCK, triton.next_power_of_2(num_blocks))
        kernel[(self.num_rows,)](
            self.best,
            self.best_token,
            self.largest,
            *results,
            num_blocks,
            BLOCK=block,
            num_warps=max(1, min(16, block // 128)),
            **pdl_options(self.best),
        )


hash_functions(globals())
