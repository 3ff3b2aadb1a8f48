"""Drafters on a GPU: drafts from graphs equal eager ones, and a copy of the target is accepted.

The graphs are those of whole steps, of all draft decodes together and of each draft decode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.speculators.all_drafters import METHODS, Drafters  # noqa: E402
from tests.speculators.recorded_proposals import Proposals, recorded_proposals  # noqa: E402
from tests.speculators.tiny_engine import TinyEngine, prompts  # noqa: E402

from slipstream.configs.graphs import AttentionCGSupport  # noqa: E402
from slipstream.configs.schema import SpeculativeConfig  # noqa: E402
from slipstream.kernels.attention import mla  # noqa: E402
from slipstream.runner.attention.triton import TritonBuilder  # noqa: E402
from slipstream.runner.graphs.manager import relative_error  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZES: dict[str, Any] = {
    "cache": {"block_size": 16, "num_gpu_blocks_override": 200},
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 96},
}
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "whole steps": {},
    "one graph": {"cudagraph_whole_step": False},
    "a graph each": {"cudagraph_draft_loop": False},
}
STEPS, ROUNDS, LENGTH = 200, 3, 95


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"), wide_heads=True)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Disable TF32, because padding may change a product's kernel and its rounding near-ties."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def engine_for(target: Path, config: SpeculativeConfig, graphs: str) -> TinyEngine:
    graph = {"cudagraph_capture_sizes": (4, 8, 16), "attention_backend": "triton"} | GRAPHS[graphs]
    return TinyEngine(target, config, graph=graph, device="cuda", **dict(SIZES))


def proposals(drafters: Drafters, method: str, graphs: str) -> tuple[Proposals, int]:
    """Run the drafter of `method`; returns its proposals and the number of steps."""
    config = drafters.speculative(method, 3, draft_sampling="probabilistic", watchdog=False)
    engine = engine_for(drafters.pair(method)[0], config, graphs)
    speculator = engine.engine._runner.speculator
    steps = 0
    stage = speculator.stage

    def counted(inputs: Any) -> None:
        nonlocal steps
        steps += 1
        stage(inputs)

    speculator.stage = counted
    with recorded_proposals() as seen:
        for number in range(ROUNDS):
            temperature = 0.0 if number % 2 else 0.7
            chosen = prompts(4, seed=number, longest=20)
            engine.run(chosen, max_tokens=LENGTH, temperature=temperature)
    engine.close()
    return seen, steps


@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_graphs_equal_eager_ones_for_200_steps(drafters: Drafters, method: str) -> None:
    (eager, steps), *others = (proposals(drafters, method, graphs) for graphs in GRAPHS)
    assert steps >= STEPS
    known = {tuple(tokens): drafts for tokens, drafts in eager}
    for seen, _ in others:
        drafts = [(drafts, known.get(tuple(tokens))) for tokens, drafts in seen]
        same = sum(mine == theirs for mine, theirs in drafts)
        assert same >= 0.99 * len(drafts), f"{same} of {len(drafts)}"  # near-ties may differ
        for position in range(3):
            column = [mine[position] == theirs[position] for mine, theirs in drafts if theirs]
            assert sum(column) >= 0.99 * len(column)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "claim", [AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.UNIFORM_BATCH]
)
@pytest.mark.parametrize("mode", ["full_and_piecewise", "full"])
def test_prefills_and_verify_steps_run_with_a_reduced_graph_claim(
    drafters: Drafters,
    method: str,
    claim: AttentionCGSupport,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TritonBuilder, "supports", claim)
    graph = {"cudagraph_capture_sizes": (4, 8), "attention_backend": "triton"}
    engine = TinyEngine(
        drafters.pair(method)[0],
        drafters.speculative(method, 1),
        graph=graph | {"cudagraph_mode": mode},
        device="cuda",
        **dict(SIZES),
    )
    for options in ({}, {"speculative_enabled": False}):
        run = engine.run(prompts(3, seed=5), max_tokens=8, **options)
        assert all(len(tokens) == 8 for tokens in run.tokens.values())
    engine.close()


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("k", range(1, 8))
def test_a_copy_of_the_target_is_accepted_at_every_position(
    drafters: Drafters, k: int, graphs: str
) -> None:
    target = drafters.pair("draft_model")[0]
    config = SpeculativeConfig(
        method="draft_model", model=str(target), num_speculative_tokens=k, draft_sampling="greedy"
    )
    engine = engine_for(target, config, graphs)
    run = engine.run(prompts(4, seed=k), max_tokens=1 + 6 * (k + 1))
    engine.close()
    assert run.num_drafts >= 4 * 6
    assert min(run.acceptance()) > 0.98


@pytest.mark.parametrize("rows", [1, 33, 256])
@pytest.mark.parametrize("heads", [16, 128])
def test_mla_projections_equal_their_references(rows: int, heads: int) -> None:
    torch.manual_seed(rows + heads)
    query = torch.randn(rows, heads, 192, device="cuda").bfloat16()[..., :128]
    latent = torch.randn(rows, heads, 512, device="cuda").bfloat16()
    weights = (torch.randn(2, heads, 128, 512, device="cuda") / 16).bfloat16()
    for got, expected in (
        (mla.absorb_query(query, weights[0]),
         mla.project_heads_reference(query.float(), weights[0].float())),
        (mla.expand_value(latent, weights[1]),
         mla.project_heads_reference(latent.float(), weights[1].float().mT)),
    ):  # fmt: skip
        assert relative_error(got, expected) < 6e-3
