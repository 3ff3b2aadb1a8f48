"""Capture sizes, descriptors, dispatch and the resolution of modes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from slipstream.configs.schema import GraphConfig
from slipstream.runner.graphs.dispatch import (
    GraphConfigError,
    capture_sizes,
    default_capture_sizes,
    descriptors,
    dispatch,
    mixed_capture_sizes,
    resolve_draft_decode,
    resolve_target,
    thinned,
    wanted_mode,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
NEVER, SINGLE, UNIFORM, ALWAYS = AttentionCGSupport


def test_default_sizes_grow_in_steps_of_8_then_16_then_128() -> None:
    sizes = default_capture_sizes(2048)
    assert sizes[:9] == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert sizes[-6:] == (496, 512, 640, 768, 896, 1024)
    assert all(b - a <= (16 if b <= 512 else 128) for a, b in zip(sizes, sizes[1:], strict=False))
    assert default_capture_sizes(700)[-3:] == (512, 640, 700)
    assert default_capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    for most in (1, 40, 127):  # the widest batch of decodes has a graph of its own
        found = descriptors(DECODE_ONLY, [1], default_capture_sizes(most), most, most)
        assert max(each.num_tokens for each in found) == most


def test_a_server_with_a_drafter_captures_few_mixed_batches() -> None:
    """In pieces each mixed size needs one graph per layer: of 39 sizes 13 are left, while uniform
    batches keep all. Whole, mixed batches have 69 sizes, up to 2,048 tokens."""
    sizes, mixed = default_capture_sizes(8192), mixed_capture_sizes(None, 8192, PIECEWISE)
    before = descriptors(BOTH, [1, 4], sizes, 256, 8192)
    after = descriptors(BOTH, [1, 4], sizes, 256, 8192, mixed)

    def count(found: list[BatchExecutionDescriptor]) -> tuple[int, int]:
        full = sum(desc.mode is FULL for desc in found)
        return len(found) - full, full

    assert (count(before), count(after)) == ((39, 60), (13, 60))
    mixed = mixed_capture_sizes(None, 8192, FULL)
    whole = descriptors(CUDAGraphMode.FULL_AND_FULL, [1, 4], sizes, 256, 8192, mixed)
    assert count(whole) == (0, 60 + len(mixed) - 2)  # 1 and 2 are rounded up to 4
    assert len(mixed) == 69 and mixed[-1] == 2048
    # padding stays within a half where tokens cost time, and a doubling where weights do
    real = sorted(desc.num_tokens for desc in after if desc.mode is PIECEWISE)
    assert all(b / a <= (1.5 if a >= 128 else 2) for a, b in zip(real, real[1:], strict=False))
    assert real[-1] == 512
    assert mixed_capture_sizes((8, 1), 64, FULL) == (1, 8)
    assert mixed_capture_sizes(None, 40, FULL)[-1] == 32


def test_steps_that_verify_are_padded_by_less_than_a_tile_of_rows() -> None:
    """Each size is captured for the target, token selection, draft rejection and the drafter."""
    found = descriptors(DECODE_ONLY, [1, 4], default_capture_sizes(2048), 64, 2048)
    verified = {desc.num_tokens for desc in found if desc.uniform_token_count == 4}
    assert (len(found), len(verified)) == (28, 19)
    for requests in range(1, 65):
        padded = dispatch(found, 4 * requests, requests, 4)
        assert padded.mode is FULL and padded.num_tokens - 4 * requests < 16


def test_256_requests_that_verify_3_drafts_have_graphs() -> None:
    """1,024 tokens: without graphs their speed varied by up to a fifth (docs/measurements.md)."""
    found = descriptors(DECODE_ONLY, [1, 4], default_capture_sizes(8192), 256, 8192)
    for requests in range(129, 257):
        padded = dispatch(found, 4 * requests, requests, 4)
        assert padded.mode is FULL and padded.num_tokens - 4 * requests < 128


@pytest.mark.parametrize("most", [1, 2, 3, 48, 64, 100, 256])
def test_thinned_sizes_keep_the_ends_and_none_twice(most: int) -> None:
    """A size captured twice is counted twice, and then the pool seems to be in use for ever."""
    found = descriptors(DECODE_ONLY, [1], default_capture_sizes(8192), most, 8192)[::-1]
    few = [desc.num_tokens for desc in thinned(found)]
    assert few == sorted(set(few)) and few[0] == 1 and few[-1] == most
    assert all(b <= 2 * a for a, b in zip(few, few[1:], strict=False))
    assert thinned([]) == []


def test_listed_sizes_are_sorted_and_checked() -> None:
    assert capture_sizes((8, 1, 8), 64) == (1, 8)
    with pytest.raises(GraphConfigError, match="--cudagraph-capture-sizes contains 65"):
        capture_sizes((65,), 64)
    with pytest.raises(GraphConfigError, match="contains 0"):
        capture_sizes((0,), 64)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6])
def test_uniform_sizes_are_multiples_of_the_query_length(length: int) -> None:
    found = descriptors(DECODE_ONLY, [length], default_capture_sizes(512), 20, 512)
    assert found
    for desc in found:
        assert desc.mode is FULL and desc.uniform_token_count == length
        assert desc.num_reqs is not None and desc.num_reqs * length == desc.num_tokens
        assert desc.num_reqs <= 20 and desc.num_tokens <= 512
    # The largest decode batch has a graph of its own although 20 * length is in no default list.
    assert max(desc.num_reqs or 0 for desc in found) == 20


def test_piecewise_comes_first_and_each_kind_largest_first() -> None:
    found = descriptors(BOTH, [4], (1, 2, 8, 16), 8, 16)
    assert [(d.mode, d.num_tokens, d.num_reqs, d.uniform_token_count) for d in found] == [
        (PIECEWISE, 16, None, None),
        (PIECEWISE, 8, None, None),
        (PIECEWISE, 4, None, None),
        (FULL, 16, 4, 4),
        (FULL, 8, 2, 4),
        (FULL, 4, 1, 4),
    ]


def test_full_mixed_pads_requests() -> None:
    found = descriptors(FULL, [1], (4, 32), 8, 32)
    assert [(d.num_tokens, d.num_reqs) for d in found] == [(32, 8), (4, 4)]


CAPTURED = descriptors(BOTH, [1, 4], (1, 2, 4, 8, 16), 4, 16)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((4, 1, 4), (FULL, 4, 1, 4)),
        ((12, 3, 4), (FULL, 16, 4, 4)),  # scans upward: no uniform size 12
        ((3, 3, 1), (FULL, 4, 4, 1)),
        ((5, 2, None), (PIECEWISE, 8, None, None)),
        ((9, 3, 3), (PIECEWISE, 16, None, None)),  # no family of length 3
        ((17, 3, None), (NONE, 17, 3, None)),
        ((0, 0, None), (NONE, 0, 0, None)),
    ],
)
def test_dispatch(batch: tuple[int, int, int | None], expected: tuple[object, ...]) -> None:
    desc = dispatch(CAPTURED, *batch)
    assert (desc.mode, desc.num_tokens, desc.num_reqs, desc.uniform_token_count) == expected


def test_nothing_captured_runs_eager_unpadded() -> None:
    assert dispatch([], 5, 2, None) == BatchExecutionDescriptor(NONE, 5, 2, None)


def test_dispatch_obeys_the_worst_rank() -> None:
    assert dispatch(CAPTURED, 4, 1, 4, best=PIECEWISE).mode is PIECEWISE
    assert dispatch(CAPTURED, 4, 1, 4, best=NONE).mode is NONE


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    num_reqs=st.integers(1, 16),
    length=st.integers(1, 6),
    extra=st.integers(0, 5),
)
def test_dispatch_finds_the_cheapest_that_serves(
    sizes: list[int], lengths: list[int], num_reqs: int, length: int, extra: int
) -> None:
    captured = descriptors(BOTH, lengths, tuple(sizes), 16, 96)
    uniform = None if extra else length
    num_tokens = num_reqs * length + extra
    desc = dispatch(captured, num_tokens, num_reqs, uniform)
    serving = [d for d in captured if d.serves(num_tokens, num_reqs, uniform)]
    assert (desc.mode is NONE) == (not serving)
    if serving:
        assert desc in serving
        full = [d for d in serving if d.mode is FULL]
        assert desc.num_tokens == min(d.num_tokens for d in full or serving)
        assert desc.mode is (FULL if full else PIECEWISE)


@pytest.mark.parametrize(
    ("wanted", "support", "lengths", "mode", "full_lengths"),
    [
        (BOTH, ALWAYS, (4,), BOTH, (4,)),
        (FULL, ALWAYS, (4,), FULL, (4,)),
        (FULL, UNIFORM, (4,), BOTH, (4,)),
        (FULL, SINGLE, (1,), BOTH, (1,)),
        (BOTH, NEVER, (1,), PIECEWISE, ()),
        (BOTH, SINGLE, (4,), PIECEWISE, ()),
        (BOTH, SINGLE, (1, 4), BOTH, (1,)),
        (BOTH, UNIFORM, (1, 4), BOTH, (1, 4)),
        (PIECEWISE, NEVER, (4,), PIECEWISE, (4,)),
        (NONE, ALWAYS, (4,), NONE, (4,)),
    ],
)
def test_modes_of_the_target(
    wanted: CUDAGraphMode,
    support: AttentionCGSupport,
    lengths: tuple[int, ...],
    mode: CUDAGraphMode,
    full_lengths: tuple[int, ...],
) -> None:
    decision = resolve_target(wanted, support, lengths)
    assert (decision.mode, decision.uniform_token_counts) == (mode, full_lengths)
    assert bool(decision.reason) == (mode is not wanted or full_lengths != lengths)


def test_full_without_any_support_is_an_error() -> None:
    with pytest.raises(GraphConfigError, match="can never run inside a graph"):
        resolve_target(FULL, NEVER, (1,))


@pytest.mark.parametrize(
    ("wanted", "support", "mode"),
    [
        (DECODE_ONLY, ALWAYS, DECODE_ONLY),
        (BOTH, SINGLE, DECODE_ONLY),
        (FULL, UNIFORM, DECODE_ONLY),
        (DECODE_ONLY, NEVER, NONE),
        (NONE, ALWAYS, NONE),
    ],
)
def test_draft_decode_is_whole_or_not_at_all(
    wanted: CUDAGraphMode, support: AttentionCGSupport, mode: CUDAGraphMode
) -> None:
    assert resolve_draft_decode(wanted, support).mode is mode


def test_trap_04_t5_39773_piecewise_draft_decode_is_a_configuration_error() -> None:
    with pytest.raises(GraphConfigError, match="never piecewise"):
        resolve_draft_decode(PIECEWISE, ALWAYS)


def test_flags_become_a_wanted_mode() -> None:
    assert wanted_mode(GraphConfig(), "cuda") is CUDAGraphMode.FULL_AND_FULL
    assert wanted_mode(GraphConfig(cudagraph_mode="piecewise"), "cuda") is PIECEWISE
    for config, device in [
        (GraphConfig(enforce_eager=True), "cuda"),
        (GraphConfig(cudagraph_mode="none"), "cuda"),
        (GraphConfig(), "cpu"),
    ]:
        assert wanted_mode(config, device) is NONE
