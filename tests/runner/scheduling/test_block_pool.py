"""The block pool: which blocks it gives out, what it caches, and what it evicts first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.runner.scheduling.block_pool import NULL_BLOCK, BlockPool


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_blocks_without_contents_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([b])
    pool.release([a])
    pool.release([c])
    assert pool.allocate(1) == [c]
    assert pool.allocate(1) == [b]
    assert (pool.lookup(b"a"), pool.lookup(b"b")) == (a, None)


def test_using_a_cached_block_makes_it_recent() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([a, b])
    pool.take([a])
    pool.release([a])
    assert pool.allocate(1) == [b]


def test_a_block_is_free_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(3)
    (a,) = pool.allocate(1)
    pool.take([a, NULL_BLOCK])
    pool.release([a])
    assert (pool.ref_count(a), pool.num_free) == (1, 1)
    pool.release([a])
    assert (pool.ref_count(a), pool.num_free) == (0, 2)
    with pytest.raises(AssertionError, match="twice"):
        pool.release([a])


def test_equal_contents_are_kept_once() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.publish(a, b"same")
    pool.publish(b, b"same")
    pool.release([a, b])
    assert pool.lookup(b"same") == a
    assert pool.allocate(1) == [b]


def test_a_reset_forgets_free_blocks_and_spares_held_ones() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([a])
    pool.reset_cache()
    assert (pool.lookup(b"a"), pool.lookup(b"b"), pool.num_free) == (None, b, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=60))
def test_counts_always_add_up(operations: list[tuple[int, int]]) -> None:
    pool, held = BlockPool(7), []
    contents: dict[int, bytes] = {}
    for kind, number in operations:
        if kind == 0 and pool.num_free:
            held += pool.allocate(1)
            contents.pop(held[-1], None)
        elif kind == 1 and held:
            pool.release([held.pop(number % len(held))])
        elif kind == 2 and held:
            block = held[number % len(held)]
            if block not in contents:
                contents[block] = b"%d" % len(contents)
                pool.publish(block, contents[block])
        elif kind == 3 and (block := pool.lookup(b"%d" % number)) is not None:
            pool.take([block])
            held.append(block)
        assert pool.num_free == 6 - len(set(held))
        assert all(pool.ref_count(block) == held.count(block) for block in range(1, 7))
