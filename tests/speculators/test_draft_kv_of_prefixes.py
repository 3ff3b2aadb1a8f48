"""A drafter's KV in a reused prefix equals that of a fresh prefill, wherever texts diverge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import AddRequest, ChangeSpeculator, SamplingParams

from ..cases import some
from ..runner.exchanging import ask
from .all_drafters import Drafters
from .eagle_oracle import head_weights, save_head
from .tiny_engine import VOCAB, TinyEngine, save_llama

BLOCK = 4
EDGES = range(2 * BLOCK, 3 * BLOCK)  # the shared length, at each place of a block


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


def draft_kv(engine: TinyEngine, prompt: Sequence[int]) -> tuple[list[Tensor], int]:
    """The drafter's KV of the prompt without its last token, and how many tokens of the prompt
    were cached."""
    made = engine.engine
    made.handle([AddRequest("kv", list(prompt), SamplingParams(0, 2, temperature=0.0))])
    cached = None
    while cached is None:
        for step in made.step():
            for output in step.outputs:
                cached = output.num_cached_tokens
    engine.synchronize()
    runner = made._runner
    cache, table = runner._target.cache, runner.table  # type: ignore[attr-defined]
    at = torch.arange(len(prompt) - 1)
    found = []
    for layer in runner.speculator.host.draft_layers:
        blocks = table.block_tables[cache.group_of_layer[layer.layer_id]][0].long()
        kv = cache.kv_caches[layer.layer_id]
        rows = (blocks[at // BLOCK], at % BLOCK)
        found.append((kv[rows] if layer.is_mla else kv[(slice(None), *rows)]).clone())
    while made.has_work():
        made.step()
    return found, cached


@pytest.mark.parametrize(
    "method", some(("eagle", "eagle3", "mtp", "draft_model"), ("eagle3", "mtp"))
)
def test_at_every_edge_a_reused_prefix_has_the_kv_of_its_own_continuation(
    drafters: Drafters, method: str
) -> None:
    """Two texts diverge at each place of a block; each continues with an answer and another
    turn."""
    target, config = drafters.pair(method)[0], drafters.speculative(method, 2)
    warm = TinyEngine(target, config)
    cold = TinyEngine(target, config, cache={"enable_prefix_caching": False})
    random = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=random).tolist()

    for edge in EDGES:
        shared = tokens(edge)
        for branch in range(2):
            prompt = [*shared, branch, *tokens(7)]
            answer = warm.run([prompt], max_tokens=6).tokens["0"]
            turn = [*prompt, *answer, *tokens(3)]
            kv, num_cached = draft_kv(warm, turn)
            fresh, none = draft_kv(cold, turn)
            # All but what may still be unwritten of the answer, or is not a whole block.
            assert none == 0 and num_cached >= len(prompt) + len(answer) - 1 - BLOCK
            for got, expected in zip(kv, fresh, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    warm.close()
    cold.close()


def test_a_swap_leaves_no_kv_of_the_old_head_to_later_requests(tmp_path: Path) -> None:
    """Nor do requests that were running then, whose blocks hold KV of both heads."""
    target = save_llama(tmp_path / "target", layers=4)
    heads = [save_head(tmp_path / f"head{i}", head_weights(False, seed=i), False) for i in range(2)]
    options = {"num_speculative_tokens": 2, "draft_sampling": "greedy"}
    config = [SpeculativeConfig("eagle", str(head), **options) for head in heads]  # type: ignore[arg-type]
    made, other = (TinyEngine(target, one) for one in config)
    prompt = list(range(1, 20))
    assert ask(made, "load", heads[1]) is None
    made.run([prompt], max_tokens=4)  # free, but cached
    running = AddRequest("long", [*prompt, 30], SamplingParams(0, 40, temperature=0.0))
    made.engine.handle([running])
    written: list[int] = []

    def step() -> None:
        for outputs in made.engine.step():
            for output in outputs.outputs:
                written.extend(output.token_ids)

    while len(written) < 5:
        step()
    made.engine.handle([ChangeSpeculator("try")])
    while made.engine.has_work():
        step()
    assert len(written) == 40
    hits = []
    for text in ([*prompt, 30, *written[:-1]], [*prompt, 7], [*prompt, 30, *written, 8]):
        kv, num_cached = draft_kv(made, text)
        hits.append(num_cached)
        expected, _ = draft_kv(other, text)
        for got, wanted in zip(kv, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert hits[0] == 0 and hits[1] >= len(prompt) - BLOCK and hits[2] >= len(prompt) + 35
    made.close()
    other.close()
