"""The distribution of verified text: two tokens jointly, poisoned rows, coupled mode."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from slipstream.kernels.drafts.draw_drafts import draw_drafts
from slipstream.kernels.sampling.sample import DRAFT, RECOVERY, TARGET, gumbel_sample
from slipstream.kernels.sampling.verify import VerifyRows, rejection_sample, residual
from slipstream.speculators.verification import conditional_rates, verify_coupled, verify_standard

V, K = 8, 2
GENERATOR = torch.Generator().manual_seed(11)
P_FIRST = torch.randn(V, generator=GENERATOR) * 1.5  # logits of the first token
P_NEXT = torch.randn(V, V, generator=GENERATOR) * 1.5  # and of the next one, by the token before
DRAFTER = torch.Generator().manual_seed(5)
Q_FIRST = P_FIRST + torch.randn(V, generator=DRAFTER)  # the drafter knows the target roughly
Q_NEXT = P_NEXT + torch.randn(V, V, generator=DRAFTER)


def verify(
    logits: Tensor,  # [N, K + 1, V]
    drafts: Tensor,  # [N, K]
    q_logits: Tensor | None,  # [N, K, V]
    positions: Tensor,  # [N] of the first row
    rule=verify_standard,
    greedy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    count, width = logits.shape[:2]
    local = torch.arange(width, dtype=torch.int32).repeat(count)
    slots = torch.arange(count, dtype=torch.int32).repeat_interleave(width)
    greedy = torch.zeros(count, dtype=torch.bool) if greedy is None else greedy
    return rule(
        VerifyRows(
            logits=logits.flatten(0, 1).float(),
            draft_ids=torch.cat([drafts, torch.full((count, 1), -1)], 1).flatten(),
            draft_logits=q_logits,
            slots=slots,
            local_pos=local,
            cu_num_logits=torch.arange(count + 1, dtype=torch.int32) * width,
            seeds=slots.long(),
            positions=positions.repeat_interleave(width) + local,
            greedy=greedy[slots],
            all_greedy=bool(greedy.all()),
            any_greedy=bool(greedy.any()),
            width=width,
        )
    )


def two_tokens(count: int, kind: str, draft_salt: int = DRAFT, rule=verify_standard) -> Tensor:
    """The first two tokens of `count` requests, [N, 2], from as many verify steps as needed."""
    seeds = torch.arange(count)
    first = torch.full((count,), 10)  # position of the row that gives the first token

    def draw(logits: Tensor, position: Tensor) -> Tensor:
        if kind == "one_hot":
            return logits.argmax(-1)
        return gumbel_sample(logits, seeds, position, draft_salt)

    def step(known: Tensor | None, position: Tensor) -> tuple[Tensor, Tensor]:
        q = [Q_FIRST.expand(count, V) if known is None else Q_NEXT[known]]
        p = [P_FIRST.expand(count, V) if known is None else P_NEXT[known]]
        drafts = []
        for j in range(K):
            drafts.append(draw(q[j], position + j))
            q.append(Q_NEXT[drafts[j]])
            p.append(P_NEXT[drafts[j]])
        q_logits = torch.stack(q[:K], 1) if kind == "probabilistic" else None
        return verify(torch.stack(p, 1), torch.stack(drafts, 1), q_logits, position, rule)

    emitted, accepted = step(None, first)
    again, _ = step(emitted[:, 0], first + 1)  # for those that emitted one token only
    second = torch.where(accepted > 0, emitted[:, 1], again[:, 0])
    return torch.stack([emitted[:, 0], second], 1)


def distance_to_autoregressive(pairs: Tensor) -> float:
    """Total variation between the distribution of pairs and the target's own, by enumeration."""
    law = (P_FIRST.softmax(-1)[:, None] * P_NEXT.softmax(-1)).flatten()
    counts = torch.bincount(pairs[:, 0] * V + pairs[:, 1], minlength=V * V)
    return 0.5 * float((counts / pairs.shape[0] - law).abs().sum())


def test_joint_law_of_two_tokens_is_the_autoregressive_one() -> None:
    """The distance of 100,000 honest draws is about 0.005; shared noise gives five times that."""
    for kind in ("one_hot", "probabilistic"):
        assert distance_to_autoregressive(two_tokens(100_000, kind)) < 0.009
    coupled = two_tokens(100_000, "probabilistic", rule=verify_coupled)
    assert distance_to_autoregressive(coupled) < 0.009


def test_trap_07_negative_control_noise_shared_by_draft_and_recovery_is_seen() -> None:
    assert distance_to_autoregressive(two_tokens(100_000, "probabilistic", RECOVERY)) > 0.02


def test_drafts_and_recovered_tokens_are_drawn_with_noise_of_their_own() -> None:
    """With shared noise the recovered token is the second best of the draft's own draw, always.

    Drafts are drawn from flat logits, so a draw shows its noise; the target excludes the draft, so
    each is rejected and the recovered token shows the noise of the recovery. Few rows suffice.
    """
    count, size = 96, 64
    slots = torch.arange(count, dtype=torch.int32)
    seeds, positions = torch.randint(2**62, (count,)), torch.randint(5000, (count,))
    drafter = SimpleNamespace(
        idx_mapping=slots,
        temperature=torch.ones(count),
        seed=seeds,
        noise_positions=positions.clone(),
        step=torch.zeros(count, dtype=torch.int64),
        draft_tokens=torch.full((count, 1), -1),
        decode_ids=torch.full((count,), -1, dtype=torch.int32),
    )
    q = torch.full((count, 1, size), -torch.inf)
    draw_drafts(torch.zeros(count, size), drafter, None, q)
    drafts = drafter.draft_tokens
    second = gumbel_sample(
        torch.zeros(count, size).scatter_(1, drafts, -torch.inf), seeds, positions, DRAFT
    )
    logits = torch.zeros(count, 2, size)
    logits[:, 0].scatter_(1, drafts, -torch.inf)
    rows = VerifyRows(
        logits=logits.flatten(0, 1),
        draft_ids=torch.cat([drafts, torch.full((count, 1), -1)], 1).flatten(),
        draft_logits=q,
        slots=slots.repeat_interleave(2),
        local_pos=torch.arange(2, dtype=torch.int32).repeat(count),
        cu_num_logits=torch.arange(count + 1, dtype=torch.int32) * 2,
        seeds=seeds.repeat_interleave(2),
        positions=(positions[:, None] + torch.arange(2)).flatten(),
        greedy=torch.zeros(2 * count, dtype=torch.bool),
        all_greedy=False,
        any_greedy=False,
        width=2,
    )
    emitted, accepted = rejection_sample(rows)
    assert (accepted == 0).all() and (emitted[:, 0] != drafts[:, 0]).all()
    same = int((emitted[:, 0] == second).sum())
    assert same <= 8, f"{same} of {count} recovered tokens follow the draft's noise, not 1.5"


def test_coupled_mode_may_share_noise_and_then_accepts_more() -> None:
    shared = two_tokens(100_000, "probabilistic", TARGET, verify_coupled)
    assert distance_to_autoregressive(shared) < 0.012


def test_coupled_mode_emits_the_seeded_tokens_whatever_is_drafted() -> None:
    count = 2000
    p = torch.randn(count, K + 1, V)
    positions = torch.arange(count)
    alone = torch.stack(
        [gumbel_sample(p[:, j], torch.arange(count), positions + j, TARGET) for j in range(K + 1)],
        1,
    )
    emitted, accepted = verify(p, alone[:, :K], None, positions, verify_coupled)
    assert (accepted == K).all() and (emitted == alone).all()
    wrong = (alone[:, :K] + torch.tensor([0, 1])) % V
    emitted, accepted = verify(p, wrong, None, positions, verify_coupled)
    assert (accepted == 1).all() and (emitted[:, :2] == alone[:, :2]).all()
    assert (emitted[:, 2] == -1).all()


def test_greedy_rows_accept_exactly_the_argmax_and_emit_it() -> None:
    count = 500
    p = torch.randn(count, K + 1, V)
    best = p.argmax(-1)
    drafts = best[:, :K].clone()
    drafts[::3, 0] = (drafts[::3, 0] + 1) % V
    drafts[1::3, 1] = -1
    greedy = torch.ones(count, dtype=torch.bool)
    greedy[-1] = False  # one random request must not change the greedy ones
    emitted, accepted = verify(p, drafts, None, torch.arange(count), greedy=greedy)
    expected = torch.tensor([0, 1, 2]).repeat(count)[:count]
    assert (accepted == expected)[:-1].all()
    kept = torch.arange(K + 1) <= expected[:, None]
    assert (emitted == torch.where(kept, best, -1))[:-1].all()
    alone, _ = verify(p, drafts, None, torch.arange(count), greedy=torch.ones(count).bool())
    assert (alone == emitted)[:-1].all()


def test_poison_a_missing_draft_in_the_middle_stops_and_samples_plain_p() -> None:
    count = 20_000
    p = torch.randn(V, generator=GENERATOR).expand(count, 3, V).clone()
    p[:, 0, 3] = 9.0  # draft 0 is nearly always accepted
    drafts = torch.tensor([[3, -1]]).expand(count, 2)
    emitted, accepted = verify(p, drafts, None, torch.arange(count))
    reached = accepted == 1
    assert reached.float().mean() > 0.99 and accepted.max() == 1
    law = torch.bincount(emitted[reached, 1], minlength=V) / reached.sum()
    assert 0.5 * (law - p[0, 1].softmax(-1)).abs().sum() < 0.015


def test_poison_a_draft_that_q_could_not_have_drawn() -> None:
    count = 1000
    p = torch.zeros(count, 2, V)
    p[500:, :, 5] = -torch.inf  # and p cannot draw it either: must be rejected
    q = torch.zeros(count, 1, V)
    q[:, :, 5] = -torch.inf
    emitted, accepted = verify(p, torch.full((count, 1), 5), q, torch.arange(count))
    assert (accepted[:500] == 1).all() and (accepted[500:] == 0).all()
    assert (emitted[500:, 0] != 5).all() and (emitted[500:, 0] >= 0).all()


def test_poison_an_empty_residual_samples_p() -> None:
    """If p = q, or both are one-hot at the rejected draft, the residual is empty: the row samples
    p."""
    count = 2000
    p = torch.randn(V, generator=GENERATOR).expand(count, 2, V)
    one_hot = torch.full((count, 2, V), -torch.inf)
    one_hot[:, :, 4] = 0.0
    drafts = torch.full((count, 1), 4)
    positions = torch.zeros(count, dtype=torch.int64)
    certain = one_hot[0, 0]
    assert (residual(certain[None], certain[None], drafts[:1]) == -torch.inf).all()
    assert (residual(certain[None], None, drafts[:1]) == -torch.inf).all()
    for q in (None, one_hot[:, :1]):
        emitted, _ = verify(one_hot, drafts, q, positions)
        assert (emitted[:, 0] == 4).all()
    # q far above p at the draft and equal to p elsewhere: a residual of rounding errors
    q = p[:, :1].clone()
    emitted, accepted = verify(p, drafts, q, positions)
    assert (accepted == 1).all() and (emitted >= 0).all() and (emitted < V).all()


def test_a_smaller_draft_vocabulary_covers_the_first_ids() -> None:
    count, small = 100_000, 5
    p = torch.randn(V, generator=GENERATOR).expand(count, 2, V)
    q = torch.randn(small, generator=GENERATOR).expand(count, 1, small)
    drafts = gumbel_sample(q[:, 0], torch.arange(count), torch.zeros(count).long(), DRAFT)
    emitted, _ = verify(p, drafts[:, None], q, torch.zeros(count).long())
    law = torch.bincount(emitted[:, 0], minlength=V) / count
    assert 0.5 * (law - p[0, 0].softmax(-1)).abs().sum() < 0.008


def test_conditional_rates_multiply_to_the_unconditional_ones() -> None:
    rates = conditional_rates((0.8, 0.6, 0.0, 0.0))
    assert torch.tensor(rates).cumprod(0).tolist() == torch.tensor([0.8, 0.6, 0.0, 0.0]).tolist()
