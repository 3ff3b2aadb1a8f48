"""Computes an output head and picks tokens in one kernel, without writing the logits.

A token is argmax(logits / temperature + noise) of its row, where the logits are rounded to the
model's dtype and the noise is that of `kernels.sampling.sample`. It is the token which that module
picks from the same logits, also if there are ties. Logits of different linear kernels may differ in
the last bits; noise and ties never depend on the kernel or the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import use_triton
from ..operation import operation
from ..sampling.sample import TARGET, gumbel_noise, gumbel_sample_reference, row_keys
from .linear import linear
from .linear_choice import SAMPLE, Choice, Gemv, Wide


@dataclass(frozen=True)
class Draws:
    """How L rows draw their tokens; each tensor is [L]."""

    seeds: Tensor  # int64
    positions: Tensor  # int64, sequence position of the row's input token
    greedy: Tensor  # bool
    temperature: Tensor  # float32, 0 = greedy
    salt: int = TARGET


def gather_draws(
    slots: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, salt: int = TARGET
) -> Draws:
    """Gather the `Draws` of rows from their requests' columns.

    slots: [L] int32, row -> slot; temperature: [R] float32 and seeds: [R] int64, by slot;
    positions: [L] int64.
    """
    if use_triton(slots):
        from .triton.head_sample import gather_draws as gather_draws_triton

        columns = gather_draws_triton(slots, temperature, seeds)
    else:
        heat = temperature[slots]
        columns = (seeds[slots], heat == 0, heat)
    return Draws(columns[0], positions, *columns[1:], salt)


def sample_head(
    x: Tensor, weight: Tensor, draws: Draws | None = None, choice: Choice = None
) -> tuple[Tensor, Tensor]:
    """Pick a token for each row of the head's input.

    x: [L, H]; weight: [V, H]; without `draws` every row is greedy. Returns the tokens [L] int64 and
    each row's largest logit [L] float32, which is NaN if any logit is.
    """
    if not use_triton(x):
        return sample_head_reference(x, weight, draws)
    if choice is None or isinstance(choice, Wide):
        return pick_rows(linear(x, weight, None, choice), draws)
    from .triton import gemv, skinny
    from .triton.head_sample import HeadRows

    head = HeadRows.of(x, draws)
    multiply: Any = gemv.multiply if isinstance(choice, Gemv) else skinny.multiply
    multiply(x, weight, choice, SAMPLE, head=head)
    result: tuple[Tensor, Tensor] = head.finish()
    return result


def sample_head_reference(
    x: Tensor, weight: Tensor, draws: Draws | None = None, choice: Choice = None
) -> tuple[Tensor, Tensor]:
    """The plain version of `sample_head`: computes the logits with `choice`, then picks tokens."""
    return pick_rows_reference(linear(x, weight, None, choice), draws)


def pick_rows_reference(logits: Tensor, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
    """Pick a token for each row of logits [L, V]; otherwise as `sample_head`."""
    if draws is None:
        return logits.argmax(-1), logits.amax(-1).float()
    logits = logits.float()
    heat = torch.where(draws.temperature > 0, draws.temperature, 1.0)[:, None]
    keys = (draws.seeds, draws.positions, draws.salt, draws.greedy)
    return gumbel_sample_reference(logits / heat, *keys), logits.amax(-1)


pick_rows = operation(pick_rows_reference, "logits", ".triton.head_sample")


def best_of_part_reference(logits: Tensor, draws: Draws | None, first: int) -> Tensor:
    """As `pick_rows` for a part of the vocabulary, the tokens from `first` on: logits [L, n].

    Returns [L, 3] float32 for `best_of_parts`: the score of the best token, the token (below
    2 ** 24), and the largest logit.
    """
    scores = logits = logits.float()
    if draws is not None:
        heat = torch.where(draws.temperature > 0, draws.temperature, 1.0)[:, None]
        keys = row_keys(draws.seeds, draws.positions, draws.salt)
        noise = gumbel_noise(keys, logits.shape[1], first)
        scores = noise.masked_fill_(draws.greedy[:, None], 0.0).add_(logits / heat)
    best, places = scores.max(-1)
    return torch.stack((best, (places + first).float(), logits.amax(-1)), -1)


best_of_part = operation(best_of_part_reference, "logits", ".triton.head_sample")


def best_of_parts_reference(parts: Tensor) -> tuple[Tensor, Tensor]:
    """What `pick_rows` returns for the whole vocabulary.

    parts: [P, L, 3] float32, of each part in ascending order of tokens what `best_of_part` returns.
    """
    best = parts[:, :, 0].argmax(0, keepdim=True)  # the first of equal ones has the lowest id
    tokens = parts[:, :, 1].gather(0, best)[0]
    return tokens.long(), parts[:, :, 2].amax(0)


best_of_parts = operation(best_of_parts_reference, "parts", ".triton.head_sample")
