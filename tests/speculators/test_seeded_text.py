"""An explicit seed repeats its text, whatever is drafted, with any other requests, preempted or
not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.configs.schema import SpeculativeConfig
from slipstream.kernels.sampling.verify import VerifyRows
from slipstream.runner.messages import AddRequest, SamplingParams
from slipstream.speculators.verification import verify_coupled, verify_standard

from ..cases import some
from .all_drafters import Drafters
from .tiny_engine import TinyEngine, prompts

OFF = SpeculativeConfig(method="off")
NUM_TOKENS = 28


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("seeded"))


def request(name: str, prompt: list[int], has_own_seed: bool, priority: int = 0) -> AddRequest:
    sampling = SamplingParams(
        seed=len(prompt) * 1000 + prompt[0],
        max_tokens=NUM_TOKENS,
        has_own_seed=has_own_seed,
        temperature=0.8,
        top_p=0.95,
    )
    return AddRequest(name, prompt, sampling, priority)


def texts(
    drafters: Drafters, speculative: SpeculativeConfig, company: int = 0, **engine: Any
) -> tuple[dict[str, list[int]], int]:
    """The tokens of four seeded requests, and how often any request was preempted."""
    made = TinyEngine(drafters.pair("draft_model")[0], speculative, **engine)
    try:
        seeded = [request(f"s{i}", p, True) for i, p in enumerate(prompts(4, seed=1))]
        others = [request(f"o{i}", p, False, -1) for i, p in enumerate(prompts(company, seed=2))]
        made.engine.handle([*seeded])
        found: dict[str, list[int]] = {}
        num_preemptions = num_steps = 0
        while made.engine.has_work():
            for step in made.engine.step():
                num_preemptions += step.stats.num_preemptions
                for output in step.outputs:
                    found.setdefault(output.request_id, []).extend(output.token_ids)
            num_steps += 1
            if num_steps % 2 == 0 and others:  # of higher priority, one by one
                made.engine.handle([others.pop()])
        return {name: found[name] for name in sorted(found) if name[0] == "s"}, num_preemptions
    finally:
        made.close()


@pytest.mark.parametrize(
    ("method", "k"),
    some(
        [("ngram", 3), ("ngram", None), ("draft_model", 3), ("draft_model", None)],
        kept=[("ngram", 3), ("draft_model", None)],
    ),
)
def test_any_drafts_any_company_same_text(drafters: Drafters, method: str, k: int | None) -> None:
    alone, _ = texts(drafters, OFF)
    assert [len(ids) for ids in alone.values()] == [NUM_TOKENS] * 4
    changes: dict[str, Any] = {"num_speculative_tokens": k}
    if method == "ngram":
        speculative = SpeculativeConfig(
            method="ngram", prompt_lookup_max=2, prompt_lookup_min=1, **changes
        )
    else:
        speculative = drafters.speculative(method, **changes, draft_sampling="probabilistic")
    assert texts(drafters, speculative)[0] == alone
    tight = {"cache": {"num_gpu_blocks_override": 40}, "scheduler": {"max_num_batched_tokens": 24}}
    crowded, num_preemptions = texts(drafters, speculative, company=8, **tight)
    assert num_preemptions > 0
    assert crowded == alone


def rows(seeded: list[bool], all_seeded: bool = False) -> VerifyRows:
    """Four requests of two drafts each, K = 2, random logits and q."""
    generator = torch.Generator().manual_seed(3)
    num_reqs, width, vocab = 4, 3, 7
    drafts = torch.randint(vocab, (num_reqs, width), generator=generator)
    drafts[:, -1] = -1
    of = torch.arange(num_reqs).repeat_interleave(width)
    return VerifyRows(
        logits=torch.randn(num_reqs * width, vocab, generator=generator),
        draft_ids=drafts.flatten(),
        draft_logits=torch.randn(num_reqs, width - 1, vocab, generator=generator),
        slots=of.int(),
        local_pos=torch.arange(width).repeat(num_reqs).int(),
        cu_num_logits=torch.arange(num_reqs + 1, dtype=torch.int32) * width,
        seeds=of * 17,
        positions=torch.arange(width).repeat(num_reqs) + 5,
        greedy=torch.zeros(num_reqs * width, dtype=torch.bool),
        all_greedy=False,
        any_greedy=False,
        width=width,
        seeded=torch.tensor(seeded).long() if any(seeded) and not all_seeded else None,
        all_seeded=all_seeded,
    )


def test_each_request_of_a_mixed_batch_is_judged_by_its_own_rule() -> None:
    by_chance, num_by_chance = verify_standard(rows([False] * 4))
    own, num_own = verify_coupled(rows([True] * 4))
    assert not torch.equal(own, by_chance)
    mixed, num_mixed = verify_standard(rows([True, False, True, False]))
    assert torch.equal(mixed[::2], own[::2]) and torch.equal(mixed[1::2], by_chance[1::2])
    assert torch.equal(num_mixed[::2], num_own[::2])
    assert torch.equal(num_mixed[1::2], num_by_chance[1::2])
    assert torch.equal(verify_standard(rows([True] * 4, all_seeded=True))[0], own)
