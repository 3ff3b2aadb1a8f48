"""Which states are saved, when they can be found, and that nobody waits for their blocks."""

from __future__ import annotations

from slipstream.runner.scheduling.kv_blocks import BlockGroup, KVBlocks
from slipstream.runner.scheduling.prefix_cache import BlockHashes
from slipstream.runner.scheduling.state_snapshots import StateGroup, StateSnapshots


def snapshots(num_blocks: int = 4, log: int = 3, size: int = 8) -> StateSnapshots:
    return StateSnapshots(StateGroup(num_blocks, size, log))


def hashes(count: int = 64) -> BlockHashes:
    return BlockHashes(list(range(count)))


def test_a_long_row_saves_where_it_ends() -> None:
    made, known = snapshots(), hashes()
    assert made.shorten(made.admit(0, 0), known, 0, 30) == 24
    request = made.admit(0, 0)
    saving = made.plan(request, known, 0, 24)
    assert saving is not None and (saving.border, saving.is_logged) == (24, False)
    assert made.find(known, 24) is None  # not before the step has landed
    made.land(request, known, 0, 24)
    assert made.find(known, 24) == saving.block and not request.savings
    assert made.find(known, 8) is None and made.find(known, 23) is None


def test_borders_inside_a_long_row_are_passed_over() -> None:
    made, known = snapshots(), hashes()
    request = made.admit(0, 0)
    assert made.plan(request, known, 0, 20) is None
    assert made.plan(request, known, 20, 3) is None
    assert request.next_border == 24


def test_short_rows_save_in_a_later_step_that_knows_what_was_accepted() -> None:
    made, known = snapshots(), hashes()
    request = made.admit(0, 0)
    made.plan(request, known, 0, 6)
    saving = made.plan(request, known, 6, 3)  # tokens 6, 7 and 8: may pass 8
    assert saving is not None and (saving.border, saving.is_logged) == (8, True)
    assert made.plan(request, known, 9, 3) is None  # still the same border
    made.land(request, known, 6, 3)  # one of three was accepted
    made.land(request, known, 7, 3)
    assert made.find(known, 8) is None
    made.land(request, known, 9, 3)  # it began beyond the border, and so absorbed it
    assert made.find(known, 8) == saving.block


def test_a_slot_saves_one_logged_state_at_a_time() -> None:
    """The device keeps one place for each slot, which a second one would overwrite."""
    made, known = snapshots(), hashes()
    request = made.admit(0, 0)
    first = made.plan(request, known, 6, 3)
    assert first is not None and first.is_logged
    assert made.plan(request, known, 9, 7) is None  # a long row that ends at 16
    made.land(request, known, 6, 3)
    made.land(request, known, 9, 7)
    assert made.find(known, 8) == first.block and made.find(known, 16) is None
    assert made.plan(request, known, 16, 8) is not None


def test_long_rows_in_flight_each_save() -> None:
    made, known = snapshots(), hashes()
    request = made.admit(0, 0)
    assert made.plan(request, known, 0, 8) is not None
    assert made.plan(request, known, 8, 8) is not None
    made.land(request, known, 0, 8)
    assert made.find(known, 8) is not None and made.find(known, 16) is None


def test_without_free_blocks_nothing_is_saved_and_later_borders_are() -> None:
    made, known = snapshots(num_blocks=2), hashes()
    first, second = made.admit(0, 0), made.admit(0, 0)
    assert made.plan(first, known, 0, 8) is not None
    assert made.plan(second, known, 0, 8) is None
    made.release(first)  # aborted: what its step writes is nobody's
    assert made.find(known, 8) is None
    assert made.plan(second, known, 8, 8) is not None


def test_a_state_that_is_saved_already_is_not_saved_again() -> None:
    made, known = snapshots(), hashes()
    request = made.admit(0, 0)
    made.plan(request, known, 0, 24)
    made.land(request, known, 0, 24)
    assert made.shorten(request, known, 0, 30) == 30  # and no chunk ends there for its sake
    assert made.plan(made.admit(0, 0), known, 0, 24) is None


def test_tokens_that_are_not_known_yet_can_be_saved() -> None:
    """Without drafts a decode's state is absorbed at once, before its token is on the host."""
    made, known = snapshots(log=0), hashes(7)
    request = made.admit(0, 0)
    made.plan(request, known, 0, 7)
    assert made.plan(request, known, 7, 1) is not None


def test_a_prompt_that_must_be_one_row_is_not_cut() -> None:
    made = StateSnapshots(StateGroup(4, 8, 3), cuts_chunks=False)
    assert made.shorten(made.admit(0, 0), hashes(), 0, 30) == 30
    empty = snapshots(num_blocks=1)
    assert empty.shorten(empty.admit(0, 0), hashes(), 0, 30) == 30


def test_a_prefix_matches_only_where_a_state_is_saved() -> None:
    made, known = snapshots(), hashes()
    kv = KVBlocks([BlockGroup(40, 4)], 64, 32, snapshots=made)
    blocks = kv.admit(kv.match(known, 60))
    assert kv.extend(blocks, 60) is not None and blocks.snapshots is not None
    saving = made.plan(blocks.snapshots, known, 0, 24)
    assert saving is not None
    made.land(blocks.snapshots, known, 0, 24)
    kv.publish(blocks, known, 40)
    match = kv.match(known, 60)
    assert (match.num_tokens, match.snapshot) == (24, saving.block)
    assert len(match.tables[0]) == 6
    assert match.num_shared == 40
    assert kv.match(known, 24).num_tokens == 0  # one token must be left to compute
    kv.release(blocks)
    assert kv.match(known, 60).num_tokens == 24
    kv.reset_prefix_cache()
    assert kv.match(known, 60).num_tokens == 0 and made.pool.num_free == 3


def test_the_least_recently_used_state_gives_way() -> None:
    made = snapshots(num_blocks=3)
    texts = [BlockHashes([seed] * 16) for seed in range(3)]
    for known in texts[:2]:
        request = made.admit(0, 0)
        made.plan(request, known, 0, 8)
        made.land(request, known, 0, 8)
    kept = made.find(texts[0], 8)
    assert kept is not None
    made.admit(8, kept)  # used
    request = made.admit(0, 0)
    made.plan(request, texts[2], 0, 8)
    assert made.find(texts[0], 8) == kept and made.find(texts[1], 8) is None


def test_what_two_requests_share_is_saved_where_they_part() -> None:
    made, known = snapshots(), hashes()
    request = made.admit(8, 0, num_shared=29)  # blocks of 29 tokens, but a state after 8
    assert made.shorten(request, known, 8, 40) == 16  # to 24, the border before
    assert made.plan(request, known, 8, 16) is not None
    made.land(request, known, 8, 16)
    assert made.shorten(request, known, 24, 30) == 24  # to 48, the last border
    assert made.shorten(made.admit(8, 0, 29), known, 8, 42) == 40  # the branch is saved already


def test_a_request_that_leaves_its_blocks_gives_back_what_it_was_saving() -> None:
    """Otherwise each abort in the middle of a saving would cost a block for ever."""
    made, known = snapshots(), hashes()
    kv = KVBlocks([BlockGroup(40, 4)], 64, 32, snapshots=made)
    free = made.pool.num_free
    blocks = kv.admit(kv.match(known, 20))
    assert blocks.snapshots is not None
    assert made.plan(blocks.snapshots, known, 0, 8) is not None
    assert made.pool.num_free == free - 1
    kv.release(blocks)
    assert made.pool.num_free == free
