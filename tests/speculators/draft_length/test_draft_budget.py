"""The budget of drafts: drafts that are accepted are paid for, others soon cost next to nothing."""

from __future__ import annotations

import pytest

from slipstream.speculators.draft_length.draft_budget import DraftBudget

K = 8


def spend(budget: DraftBudget, accepted_of: list[int], num_reqs: int = 1) -> list[int]:
    """Drafts of the steps of slot 0 whose next `accepted_of[i]` drafts would be accepted."""
    drafted = []
    for right in accepted_of:
        count = min(K, budget.limit(0, num_reqs))
        accepted = min(right, count)
        if count:
            budget.record(0, accepted, count - accepted)
        drafted.append(count)
    return drafted


def test_accepted_drafts_grow_to_the_maximum() -> None:
    drafted = spend(DraftBudget(1, K), [K] * 6)
    assert drafted[0] < K and drafted[-1] == K and drafted == sorted(drafted)


def test_drafts_that_are_never_accepted_cost_few_rows() -> None:
    drafted = spend(DraftBudget(1, K), [0] * 200)
    assert sum(drafted) < 0.1 * 200
    assert set(drafted[20:]) == {0, 1}  # single drafts go on asking


def test_a_copy_is_noticed_after_many_rejections() -> None:
    budget = DraftBudget(1, K)
    spend(budget, [0] * 40)
    drafted = spend(budget, [K] * 200)
    assert drafted[-1] == K


def test_rows_of_a_full_step_must_be_accepted_more_often() -> None:
    half = [1, 0] * 30
    alone, crowded = (sum(spend(DraftBudget(1, K), half, num_reqs)) for num_reqs in (1, 16))
    assert crowded < alone


def test_a_new_request_starts_afresh() -> None:
    budget = DraftBudget(2, K)
    first = budget.limit(1, 1)
    spend(budget, [0] * 50)
    assert budget.limit(1, 1) == first  # slots do not share
    budget.restart(0)
    assert budget.limit(0, 1) == first


@pytest.mark.parametrize("num_reqs", [2, 40])
def test_only_shared_rows_feel_the_size_of_the_step(num_reqs: int) -> None:
    slots = list(range(num_reqs))
    shared = DraftBudget(num_reqs, K).limits(slots, [True] * num_reqs)
    alone = DraftBudget(num_reqs, K).limits(slots, [False] * num_reqs)
    single = DraftBudget(1, K).limit(0, 1)
    assert alone == [single] * num_reqs
    assert all(count <= single for count in shared) and (num_reqs < 40 or shared[0] < single)
