"""K by request: accepted drafts are made, and rejected ones soon cost next to nothing."""

from __future__ import annotations

import pytest

from slipstream.speculators.draft_length.request_limits import RequestLimits
from slipstream.speculators.draft_length.step_costs import StepCosts

K = 8


def limits(num_slots: int, greedy: bool = True) -> RequestLimits:
    made = RequestLimits(num_slots, K, StepCosts({}, K))
    for slot in range(num_slots):
        made.restart(slot, greedy)
    return made


def spend(chooser: RequestLimits, accepted_of: list[int], num_reqs: int = 1) -> list[int]:
    """Drafts of the steps of slot 0 whose next `accepted_of[i]` drafts would be accepted."""
    drafted, before = [], 0  # the drafts that a step makes are verified in the next one
    for right in accepted_of:
        count = int(chooser.choose(range(num_reqs))[0])
        chooser.observe([0], [before], [min(right, before)])
        drafted.append(count)
        before = count
    return drafted


def test_accepted_drafts_grow_to_the_maximum() -> None:
    drafted = spend(limits(1), [K] * 9)
    assert drafted[0] < K and drafted[-1] == K and drafted == sorted(drafted)


def test_drafts_that_are_never_accepted_cost_few_rows() -> None:
    drafted = spend(limits(1), [0] * 200)
    assert sum(drafted) < 0.15 * 200
    assert set(drafted[20:]) == {0, 1}  # single drafts go on asking


def test_a_copy_is_noticed_after_many_rejections() -> None:
    chooser = limits(1)
    spend(chooser, [0] * 40)
    drafted = spend(chooser, [K] * 200)
    assert drafted[-1] == K


def test_rows_of_a_full_step_must_be_accepted_more_often() -> None:
    half = [1, 0] * 30
    alone, crowded = (sum(spend(limits(16), half, num_reqs)) for num_reqs in (1, 16))
    assert crowded < alone


def test_a_new_request_starts_afresh() -> None:
    chooser = limits(2)
    first = chooser.choose([1])[0]
    spend(chooser, [0] * 50)
    assert chooser.choose([1])[0] == first  # slots do not share
    chooser.restart(0, greedy=True)
    assert chooser.choose([0])[0] == first


@pytest.mark.parametrize("num_reqs", [2, 40])
def test_only_greedy_requests_feel_the_size_of_the_step(num_reqs: int) -> None:
    slots = list(range(num_reqs))
    shared = limits(num_reqs).choose(slots).tolist()
    alone = limits(num_reqs, greedy=False).choose(slots).tolist()
    single = limits(1).choose([0])[0]
    assert alone == [single] * num_reqs
    assert all(count <= single for count in shared) and (num_reqs < 40 or shared[0] < single)
