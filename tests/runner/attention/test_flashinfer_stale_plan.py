"""FlashInfer's plan at replay, with the fake wrappers of `test_attention_backends`."""

from __future__ import annotations

import torch

from slipstream.runner.attention.triton import TritonMetadata

from .test_attention_backends import (
    GQA,
    batch_of,
    expected_of,
    flashinfer_builder,
    full,
    tensors_of,
)


def test_trap_19_a_stale_flashinfer_plan_is_wrong_and_memory_stays_in_place_for_1000_steps() -> (
    None
):
    """A replay uses its wrapper's plan: without a new one it is wrong (the negative control).

    The workspace, index buffers and wrapper that a graph has baked are never moved or replaced.
    """
    builder, length = flashinfer_builder(), 2
    desc = full(3, length)

    def addresses() -> list[int]:
        buffers = (builder._query_indptr, builder._page_indptr, builder._page_indices)
        return [t.data_ptr() for t in (builder._workspace, builder._last_page_len, *buffers)]

    short = batch_of([length] * 3, [5, 4, 3])
    builder.build_for_capture(short, desc)
    (wrapper,) = builder._wrappers.values()
    baked = addresses()
    wrong = 0
    cache = tensors_of(GQA, batch_of([length] * 3, [256] * 3))[3]
    for step in range(1000):
        lens = [3 + step % 254, 3 + (7 * step) % 254, 2 + step // 4]
        common = batch_of([length] * 3, lens)
        check = step % 50 == 49
        if check:
            tensors = (*tensors_of(GQA, common)[:3], cache.clone())
            expected, _ = expected_of(GQA, common, tensors)
            store = TritonMetadata(common, length)  # the graph's KV write, which needs no plan
            store.attend(GQA, *tensors)
            query, caches = tensors[0], (tensors[3][0], tensors[3][1])
            stale = wrapper.run(query, caches, out=torch.empty_like(query))
            wrong += not torch.allclose(stale, expected, rtol=1e-2, atol=1e-2)
        assert builder.build(common, desc).can_replay
        if check:
            fresh = wrapper.run(query, caches, out=torch.empty_like(query))
            torch.testing.assert_close(fresh, expected, rtol=1e-5, atol=1e-5)
        assert addresses() == baked and list(builder._wrappers.values()) == [wrapper]
    assert wrong == 20 and builder.num_eager_fallbacks == 0
