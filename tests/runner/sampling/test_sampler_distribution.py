"""Chi-square of every sampling option against every kind of draft, at each row of a verify step.

Rows 0, 1 and 2 of a request judge draft 0, draft 1 and nothing (bonus). Whatever was drafted, the
first token must have the distribution p_0, and after an accepted draft the next one p_1 given it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_harness import Table, assert_law, expected_distribution, sampler, uniform_rows
from torch import Tensor

from slipstream.configs.options import ConfigError
from slipstream.kernels.sampling.sample import DRAFT, gumbel_sample
from slipstream.runner.messages import SamplingParams
from slipstream.speculators.verification import SyntheticVerifier

V, COUNT, PROMPT, OUTPUT = 32, 20000, [1, 2, 3, 2], [4, 5, 4, 11]
OPTIONS: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2, "temperature": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {6: 2.0, 7: -100.0, 9: -1.0}},
    "allowed": {"allowed_token_ids": [2, 4, 6, 8, 20, 31]},
    "mask": {},
    "bad_words": {"bad_words_token_ids": [[6], [8, 4], [11, 8, 4]]},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [4, 10]},
    "top_k_top_p": {"top_k": 10, "top_p": 0.8, "temperature": 1.2},
    "everything": {
        "temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "repetition_penalty": 1.2, "logit_bias": {8: 1.5, 3: -2.0},
        "bad_words_token_ids": [[8, 8], [5]], "min_tokens": 6, "stop_token_ids": [12],
    },
}  # fmt: skip


def draft_tables(kind: str, logits: Tensor, table: Table) -> tuple[Tensor, Tensor | None]:
    """Two drafts per request and their q; one-hot drafts are two fixed ids."""
    if kind == "one_hot":
        return torch.tensor([[8, 4]]).expand(COUNT, 2).contiguous(), None
    generator = torch.Generator().manual_seed(1)
    q_logits = logits[:2] + torch.randn(2, V, generator=generator)  # roughly right
    drafts = torch.stack(
        [
            gumbel_sample(
                q_logits[j].expand(COUNT, V), table.sampling.seed,
                table.total_len.long() - 1 + j, DRAFT,
            )
            for j in range(2)
        ],
        1,
    )  # fmt: skip
    return drafts, q_logits.expand(COUNT, 2, V)


@pytest.mark.parametrize("kind", ["one_hot", "probabilistic"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_row_has_the_targets_distribution(option: str, kind: str) -> None:
    params = SamplingParams(seed=0, max_tokens=99, **OPTIONS[option])  # type: ignore[arg-type]
    table = Table.repeated(params, PROMPT, OUTPUT, COUNT, V)
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(3)) * 1.2
    logits[0, 8] = logits[1, 4] = 2.5  # likely drafts, so that later rows are seen often
    drafts, table.draft_logits = draft_tables(kind, logits, table)
    rows = uniform_rows(table, drafts)
    bitmask, masks = None, [None] * 3
    if option == "mask":
        allowed = torch.rand(3, V, generator=torch.Generator().manual_seed(4)) < 0.5
        allowed[0, 8] = allowed[1, 4] = True
        words = (allowed.long() << torch.arange(V)).sum(1).to(torch.int32)
        bitmask, masks = words[:, None].repeat(COUNT, 1), list(allowed.tolist())

    out = sampler().sample(logits.repeat(COUNT, 1), rows, table, bitmask)

    tokens, counts = out.sampled_token_ids.numpy(), out.num_sampled.numpy()
    assert not out.has_nan.any()
    assert (out.num_rejected.numpy() == 3 - counts).all()
    assert ((tokens >= 0) == (np.arange(3) < counts[:, None])).all()
    given = np.ones(COUNT, dtype=bool)
    output, checked = list(OUTPUT), 0
    for row in range(3):
        law = expected_distribution(logits[row].tolist(), params, PROMPT, output, masks[row])
        if given.sum() > 300:
            assert_law(tokens[given, row], law)
            checked += 1
        if row < 2:  # go on with the requests that accepted the commonest draft
            accepted = given & (counts > row + 1)
            if not accepted.any():
                break
            draft = np.bincount(drafts.numpy()[accepted, row]).argmax()
            given = accepted & (drafts.numpy()[:, row] == draft)
            output.append(int(draft))
    assert checked >= 2, "later rows were hardly ever reached"


@pytest.mark.parametrize("kind", ["one_hot", "probabilistic"])
def test_acceptance_is_what_the_theory_says(kind: str) -> None:
    table = Table.repeated(SamplingParams(seed=0, max_tokens=9), PROMPT, OUTPUT, COUNT, V)
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(3))
    drafts, table.draft_logits = draft_tables(kind, logits, table)
    out = sampler().sample(logits.repeat(COUNT, 1), uniform_rows(table, drafts), table)
    p = logits[0].softmax(-1)
    expected = p[8].item()
    if table.draft_logits is not None:
        expected = torch.minimum(p, table.draft_logits[0, 0].softmax(-1)).sum().item()
    accepted = (out.num_sampled > 1).float().mean().item()
    assert abs(accepted - expected) < 4 * (expected * (1 - expected) / COUNT) ** 0.5


def test_synthetic_acceptance_meets_its_unconditional_rates(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rates = (0.8, 0.6, 0.3)
    judge = sampler(synthetic_acceptance_rates=rates, num_speculative_tokens=3)
    assert "NOT" in caplog.text
    table = Table.repeated(SamplingParams(seed=0, max_tokens=9), PROMPT, OUTPUT, COUNT, V)
    drafts = torch.randint(0, V, (COUNT, 3))
    out = judge.sample(torch.zeros(COUNT * 4, V), uniform_rows(table, drafts), table)
    for position, rate in enumerate(rates):
        measured = (out.num_sampled > position + 1).float().mean().item()
        assert abs(measured - rate) < 0.015
    kept = torch.arange(4) < (out.num_sampled - 1)[:, None]
    padded = torch.cat([drafts, torch.full((COUNT, 1), -1)], 1)
    assert (out.sampled_token_ids[kept] == padded[kept]).all()
    assert isinstance(judge.verify, SyntheticVerifier)
    judge.verify.set_rates((0.2, 0.1))  # the third never stands
    out = judge.sample(torch.zeros(COUNT * 4, V), uniform_rows(table, drafts), table)
    counts = [(out.num_sampled > position + 1).float().mean().item() for position in range(3)]
    assert counts == pytest.approx([0.2, 0.1, 0.0], abs=0.015)
    with pytest.raises(ConfigError, match="not increase"):
        sampler(synthetic_acceptance_rates=(0.5, 0.6))
