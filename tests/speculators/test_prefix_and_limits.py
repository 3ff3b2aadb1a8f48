"""Drafters at real lengths: a long shared prefix, and a drafter with fewer positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.drafters.draft_graphs import DraftGraphs
from slipstream.speculators.base import DraftInputs

from ..cases import some
from .eagle_oracle import head_weights, save_head
from .recorded_graphs import graph_engine
from .recorded_proposals import recorded_proposals
from .tiny_engine import VOCAB, TinyEngine, save_llama

PREFIX, BLOCK = 4000, 16


@pytest.mark.parametrize("eagle3", some((False, True), (True,)))
def test_trap_15_turn_two_of_a_chat_finds_a_prefix_of_4000_tokens(
    tmp_path: Path, eagle3: bool
) -> None:
    """All but at most two blocks of it are found, and the drafts equal those of a cold run."""
    target = save_llama(tmp_path / "target", layers=4, max_len=4224)
    taps: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]} if eagle3 else {}
    head = save_head(tmp_path / "head", head_weights(eagle3), eagle3, **taps)
    config = SpeculativeConfig(
        method="eagle3" if eagle3 else "eagle", model=str(head), num_speculative_tokens=3,
        draft_sampling="greedy",
    )  # fmt: skip
    sizes: dict[str, Any] = {
        "cache": {"block_size": BLOCK, "num_gpu_blocks_override": 600},
        "scheduler": {"max_num_batched_tokens": 1024},
    }
    generator = torch.Generator().manual_seed(4)
    first = torch.randint(VOCAB, (PREFIX,), generator=generator).tolist()
    cold = TinyEngine(target, config, **dict(sizes))
    chat = TinyEngine(target, config, **dict(sizes))
    answer = chat.run([first], max_tokens=9).tokens["0"]
    turn = [*first, *answer, *torch.randint(VOCAB, (37,), generator=generator).tolist()]
    with recorded_proposals() as hit:
        second = chat.run([turn], max_tokens=8)
    with recorded_proposals() as expected:
        alone = cold.run([turn], max_tokens=8)
    for engine in (cold, chat):
        engine.close()
    assert alone.cached_tokens["0"] == 0
    assert second.cached_tokens["0"] >= PREFIX - 2 * BLOCK
    assert second.tokens == alone.tokens
    assert hit == expected and len(hit) > 2


@pytest.mark.parametrize("loop", some([False, True], [True]))
def test_trap_17_a_shorter_drafter_keeps_the_kv_of_its_last_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    """Decodes of a request beyond the limit stay at position limit - 1; other requests may share
    its KV."""
    limit = 40
    target = save_llama(tmp_path, layers=4)
    config = SpeculativeConfig(
        method="draft_model", model=str(target), num_speculative_tokens=3, max_model_len=limit,
        draft_sampling="greedy",
    )  # fmt: skip
    kept: list[Tensor] = []
    propose = DraftGraphs.propose

    def watched(self: Any, inputs: DraftInputs) -> None:
        propose(self, inputs)
        layer = self.speculator.host.draft_layers[-1].layer_id
        cache = self.attention._cache.kv_caches[layer]
        table: Any = inputs.requests
        group = self.attention._cache.group_of_layer[layer]
        block = int(table.block_tables[group][int(inputs.idx_mapping[0]), (limit - 1) // 4])
        if int(inputs.num_sampled[0]):
            kept.append(cache[:, block, (limit - 1) % 4].clone())

    monkeypatch.setattr(DraftGraphs, "propose", watched)
    with graph_engine(target, config, loop=loop) as engine:
        engine.run([list(range(37))], max_tokens=20)
    # the positions up to the limit come first; from then on nothing may change
    assert len(kept) > 6
    last = kept[-1]
    settled = [index for index, rows in enumerate(kept) if torch.equal(rows, last)]
    assert settled == list(range(settled[0], len(kept))) and len(settled) > 4
    assert last.abs().max() > 0
