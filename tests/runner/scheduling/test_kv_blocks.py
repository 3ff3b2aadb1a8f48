"""Block tables over several groups: prefix matches, windows, room."""

from __future__ import annotations

import pytest

from slipstream.configs.options import ConfigError
from slipstream.runner.scheduling.kv_blocks import (
    BlockGroup,
    KVBlocks,
    RequestBlocks,
    first_block_in_window,
)
from slipstream.runner.scheduling.prefix_cache import BlockHashes

TOKENS = list(range(100, 140))


def make(*groups: BlockGroup, **options: bool) -> KVBlocks:
    return KVBlocks(groups, max_model_len=40, max_step_tokens=16, **options)


def hold(kv: KVBlocks, tokens: list[int], num_confirmed: int) -> RequestBlocks:
    """A request with these tokens, the first `num_confirmed` of them computed."""
    hashes = BlockHashes(tokens)
    blocks = kv.admit(kv.match(hashes, len(tokens)))
    assert kv.extend(blocks, len(tokens)) is not None
    kv.publish(blocks, hashes, num_confirmed)
    return blocks


def matched(kv: KVBlocks, tokens: list[int]) -> int:
    return kv.match(BlockHashes(tokens), len(tokens)).num_tokens


def test_only_confirmed_full_blocks_are_found() -> None:
    kv = make(BlockGroup(20, 4))
    hold(kv, TOKENS[:15], num_confirmed=11)
    assert matched(kv, TOKENS[:15]) == 8


def test_a_whole_prompt_in_cache_leaves_a_token_to_compute() -> None:
    kv = make(BlockGroup(20, 4))
    hold(kv, TOKENS[:12], num_confirmed=12)
    assert matched(kv, TOKENS[:12]) == 8
    assert matched(kv, TOKENS[:13]) == 12


def test_the_same_block_after_another_prefix_is_not_found() -> None:
    kv = make(BlockGroup(20, 4))
    hold(kv, TOKENS[:12], num_confirmed=12)
    assert matched(kv, [1, *TOKENS[1:12], 5]) == 0
    assert matched(kv, [*TOKENS[:7], 1, *TOKENS[8:12], 5]) == 4


@pytest.mark.parametrize("has_draft_kv", [False, True])
def test_another_extra_key_separates_equal_tokens(has_draft_kv: bool) -> None:
    """Also where a drafter's KV is all that a block holds, as the blocks of its own group do."""
    kv = make(BlockGroup(20, 4, needs_next_token=has_draft_kv))
    hold(kv, TOKENS[:13], num_confirmed=12)
    assert matched(kv, TOKENS[:13]) == 12
    assert kv.match(BlockHashes(TOKENS[:13], b"tenant"), 13).num_tokens == 0


def test_matched_blocks_are_shared_and_released_one_by_one() -> None:
    kv = make(BlockGroup(20, 4))
    first = hold(kv, TOKENS[:12], num_confirmed=12)
    second = hold(kv, TOKENS[:12], num_confirmed=8)
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] != first.tables[0][2]
    kv.release(first)
    assert matched(kv, TOKENS[:12]) == 8
    kv.release(second)
    assert kv.usage == 0.0


@pytest.mark.parametrize("fork", range(5, 14))
def test_a_block_with_draft_kv_is_found_only_before_the_same_next_token(fork: int) -> None:
    """Requests diverge at every position relative to a block's edge, one after another."""
    kv = make(BlockGroup(60, 4, needs_next_token=True))
    texts = [[*TOKENS[:fork], *[branch] * (20 - fork)] for branch in (1, 2, 3)]
    held = [hold(kv, tokens, num_confirmed=19) for tokens in texts]
    shared = (fork - 1) // 4  # whole blocks whose next token is the same, too
    for index, blocks in enumerate(held[1:]):
        assert blocks.tables[0][:shared] == held[0].tables[0][:shared]
        assert not set(blocks.tables[0][shared:]) & set(held[index].tables[0])
    for tokens, blocks in zip(texts, held, strict=True):
        match = kv.match(BlockHashes([*tokens, 9]), 21)
        assert match.num_tokens == 16 and match.tables[0] == blocks.tables[0][:4]


def test_a_prompt_that_ends_at_a_blocks_edge_is_found_by_the_token_that_followed() -> None:
    kv = make(BlockGroup(20, 4, needs_next_token=True))
    hold(kv, TOKENS[:13], num_confirmed=12)
    assert matched(kv, TOKENS[:13]) == matched(kv, TOKENS[:14]) == 12
    assert matched(kv, [*TOKENS[:12], 1]) == 8
    assert matched(kv, TOKENS[:12]) == 8  # one token is left to compute
    assert matched(kv, TOKENS[:5]) == 4


def test_only_groups_with_draft_kv_look_at_the_next_token() -> None:
    kv = make(BlockGroup(20, 4), BlockGroup(20, 4, needs_next_token=True))
    hold(kv, TOKENS[:13], num_confirmed=12)
    found = kv.match(BlockHashes([*TOKENS[:12], 1]), 13)
    assert found.num_tokens == 8 and [len(table) for table in found.tables] == [2, 2]
    target, drafts = kv.pools
    plain = BlockHashes(TOKENS[:13])
    assert target.lookup(plain.first(3, 4)[2]) is not None
    assert drafts.lookup(plain.first(3, 4)[2]) is None
    assert drafts.lookup(plain.first(3, 4, next_token=True)[2]) is not None


def test_after_a_drafter_swap_no_old_block_is_found_held_or_not() -> None:
    kv = make(BlockGroup(20, 4, needs_next_token=True))
    old, hashes = hold(kv, TOKENS[:17], num_confirmed=9), BlockHashes(TOKENS[:17])
    kv.release(hold(kv, [1] * 9, num_confirmed=8))
    kv.forget_contents()
    assert matched(kv, TOKENS[:17]) == matched(kv, [1] * 9) == 0
    kv.publish(old, hashes, 16)  # it still runs, over KV of both drafters
    assert matched(kv, TOKENS[:17]) == 0
    new = hold(kv, TOKENS[:17], num_confirmed=16)
    assert not set(new.tables[0]) & set(old.tables[0])
    assert kv.match(hashes, 17).tables[0] == new.tables[0][:4]
    kv.release(old)
    assert kv.match(hashes, 17).tables[0] == new.tables[0][:4]
    kv.release(new)
    assert kv.usage == 0.0 and kv.pools[0].num_free == 19


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = make(BlockGroup(20, 4), enable_prefix_caching=False)
    hold(kv, TOKENS[:12], num_confirmed=12)
    assert matched(kv, TOKENS[:12]) == 0


def test_a_match_is_the_longest_that_every_group_has() -> None:
    kv = make(BlockGroup(40, 2), BlockGroup(20, 4))
    hold(kv, TOKENS[:14], num_confirmed=14)
    assert matched(kv, TOKENS[:15]) == 12  # blocks of 2 would give 14


def test_a_window_group_matches_on_the_blocks_in_its_window_alone() -> None:
    kv = make(BlockGroup(20, 4), BlockGroup(20, 4, sliding_window=5))
    first = hold(kv, TOKENS[:17], num_confirmed=16)
    kv.slide(first, 16)
    assert first.tables[1][:3] == [0, 0, 0] and 0 not in first.tables[1][3:]
    window = kv.pools[1]
    for block_hash in BlockHashes(TOKENS[:16]).first(2, 4)[:2]:
        block = window.lookup(block_hash)
        assert block is not None and window.ref_count(block) == 0
    window.reset_cache()  # blocks 0 .. 2, out of the window, are gone
    match = kv.match(BlockHashes(TOKENS[:17]), 17)
    assert match.num_tokens == 16
    assert match.tables[1] == [0, 0, 0, first.tables[1][3]]
    # A shorter hit would need block 2 of the window group.
    assert matched(kv, TOKENS[:13]) == 0


def test_sliding_keeps_what_the_next_query_sees() -> None:
    kv = make(BlockGroup(20, 4, sliding_window=5))
    blocks = hold(kv, TOKENS[:20], num_confirmed=0)
    kv.slide(blocks, 11)  # query 11 sees keys 7 .. 11
    assert [block == 0 for block in blocks.tables[0]] == [True, False, False, False, False]
    kv.slide(blocks, 12)  # query 12 sees keys 8 .. 12
    assert [block == 0 for block in blocks.tables[0]] == [True, True, False, False, False]


def test_a_window_that_moves_in_steps_keeps_what_the_next_query_sees() -> None:
    """As the pending rows of a compressor with overlapping windows of 4 tokens."""
    group = BlockGroup(40, 2, sliding_window=8, window_step=4)
    kv = make(group)
    blocks = hold(kv, TOKENS[:24], num_confirmed=0)
    for confirmed in range(25):
        first = max(0, confirmed // 4 * 4 - 4)  # the first key that this query sees
        assert first_block_in_window(group, confirmed) == first // 2
        due = blocks.slides_at <= confirmed
        kv.slide(blocks, confirmed)
        assert [block == 0 for block in blocks.tables[0]] == [n < first // 2 for n in range(12)]
        assert due == (first // 2 > max(0, (confirmed - 1) // 4 * 4 - 4) // 2)


def test_only_blocks_that_a_hit_can_need_are_published() -> None:
    overlapping = BlockGroup(40, 2, sliding_window=4, window_step=2)
    restarting = BlockGroup(40, 2, sliding_window=8, window_step=8)
    kv = make(BlockGroup(40, 8), overlapping, restarting)
    hold(kv, TOKENS[:25], num_confirmed=24)
    hashes = BlockHashes(TOKENS[:24]).first(12, 2)[:12]
    found = [[pool.lookup(block) is not None for block in hashes] for pool in kv.pools[1:]]
    # before 8, 16 and 24 tokens, where hits end: the two tokens before, or nothing
    assert found == [[n % 4 == 3 for n in range(12)], [False] * 12]
    match = kv.match(BlockHashes(TOKENS[:25]), 25)
    assert match.num_tokens == 24
    assert [block != 0 for block in match.tables[1]] == [False] * 11 + [True]
    assert match.tables[2] == [0] * 12


def test_extend_is_all_or_nothing() -> None:
    kv = make(BlockGroup(41, 1), BlockGroup(11, 4))
    blocks = hold(kv, TOKENS[:20], num_confirmed=0)
    other = hold(kv, TOKENS[20:37], num_confirmed=0)
    before = [list(table) for table in blocks.tables]
    assert kv.extend(blocks, 24) is None  # the second group has no block left
    assert blocks.tables == before
    kv.release(other)
    new = kv.extend(blocks, 24)
    assert new is not None and [len(ids) for ids in new] == [4, 1]


def test_a_pool_too_small_for_one_request_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="lower --max-model-len or give the cache more memory"):
        make(BlockGroup(10, 4))
    make(BlockGroup(11, 4))
    make(BlockGroup(7, 4, sliding_window=5))


def test_admission_needs_room_for_the_whole_request_minus_shared_blocks() -> None:
    kv = make(BlockGroup(12, 4))
    hold(kv, TOKENS[:24], num_confirmed=24)  # 6 of 11 blocks
    fresh = kv.match(BlockHashes([1] * 24), 24)
    assert not kv.can_admit(fresh, 24)
    assert kv.can_admit(fresh, 20)
    shared = kv.match(BlockHashes(TOKENS[:24]), 24)
    assert kv.can_admit(shared, 40)
