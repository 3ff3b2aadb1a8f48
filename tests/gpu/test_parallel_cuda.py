"""Two GPUs that share a model give the text of one, with and without graphs; a rank is killed.

`parallel.sh` runs these tests in an order of its own and measures more.

The model is a Llama in float32, with weights so large that rounding rarely decides its text.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from slipstream.configs.schema import (
    GraphConfig,
    ParallelConfig,
    SpeculativeConfig,
)
from slipstream.runner.loading.matching import slots_of_one_form
from slipstream.runner.loading.weights import make_hf_config
from slipstream.runner.messages import AddRequest, SamplingParams, StepStats
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model
from slipstream.server.engine.engine_client import Backoff, EngineClient, EngineDead

from ..runner.loading.quantised.quantised_folder import quantise
from .two_nodes import configured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1009,
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": None,
    "eos_token_id": None, "hidden_act": "silu",
}  # fmt: skip
DRAFTER = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 1009,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}  # fmt: skip
EXPERTS = TARGET | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
NUM_REQUESTS, MAX_TOKENS = 12, 48
# request -> its token ids, and their log probabilities
Text = dict[int, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    for name, config in (("target", TARGET), ("drafter", DRAFTER), ("experts", EXPERTS)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    save_weights(TARGET, folder / "target")
    save_weights(EXPERTS, folder / "experts")
    return folder


def save_weights(config: dict[str, Any], folder: Path) -> None:
    model = build_model(
        make_hf_config(config, str(folder)), WeightFormat(torch.device("meta"), torch.float32)
    )
    generator = torch.Generator().manual_seed(0)
    stored = {
        name: torch.ones(slot.shape)
        if slot.init == "ones"
        else torch.randn(slot.shape, generator=generator) * 0.09
        for name, slot in slots_of_one_form(model.checkpoint_slots()).items()
    }
    save_file(stored, folder / "model.safetensors")


@asynccontextmanager
async def served(
    folder: Path, size: int, by_expert: bool = False, name: str = "target", **changes: Any
) -> AsyncIterator[EngineClient]:
    parallel = ParallelConfig(
        size,
        enable_expert_parallel=by_expert,
        disable_custom_all_reduce="SLIPSTREAM_TEST_NCCL" in os.environ,
    )
    dtype = changes.pop("dtype", "float32")
    config = configured(folder / name, parallel, **changes)
    config = replace(config, model=replace(config.model, dtype=dtype))
    client = EngineClient(config, backoff=Backoff(first=0.05))
    await client.start()
    try:
        yield client
    finally:
        await client.shutdown()


def submit(
    client: EngineClient,
    index: int,
    max_tokens: int,
    temperature: float = 0.0,
    logprobs: int | None = 0,
) -> Any:
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(1009, (5 + 17 * index,), generator=generator).tolist()
    sampling = SamplingParams(
        seed=index,
        max_tokens=max_tokens,
        temperature=temperature,
        logprobs=logprobs,
        has_own_seed=True,
    )
    return client.submit(AddRequest(f"{index} {time.monotonic()}", prompt, sampling))


async def text_of(client: EngineClient, temperature: float = 0.0, logprobs: int | None = 0) -> Text:
    """Without log probabilities, no logits are gathered."""
    wanted = logprobs

    async def one(index: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        logprobs: list[float] = []
        async for output in submit(client, index, MAX_TOKENS, temperature, wanted):
            assert output.error is None, output.error
            ids += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or ()]
        return ids, logprobs

    return dict(enumerate(await asyncio.gather(*(one(i) for i in range(NUM_REQUESTS)))))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[float, Text]:
    """The texts of one GPU by temperature."""

    async def run() -> dict[float, Text]:
        async with served(folder, 1) as client:
            return {temperature: await text_of(client, temperature) for temperature in (0.0, 0.8)}

    with ThreadPoolExecutor(1) as thread:  # this one may have an event loop
        return thread.submit(asyncio.run, run()).result()


def compare(
    found: Text,
    expected: Text,
    tolerance: float = 2e-3,
    fewest: int = NUM_REQUESTS - 2,
    routed: bool = False,
) -> None:
    """Equal tokens, up to a few near-ties, and log probabilities to rounding before the first.

    In a text that is `routed`, a near-tie of two experts may change log probabilities but no token;
    it counts as a text that differs.
    """
    equal = 0
    for index, (ids, logprobs) in expected.items():
        other, others = found[index]
        same = next((i for i, (a, b) in enumerate(zip(ids, other, strict=True)) if a != b), None)
        far = [
            (index, a, b)
            for a, b in zip(logprobs[:same], others[:same], strict=bool(others))
            if not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
        ]
        assert routed or not far, far
        equal += same is None and not far
    print(f"{equal} of {len(expected)} texts equal")
    assert equal >= fewest


@pytest.mark.parametrize("graphs", ["graphs", "eager"])
async def test_two_gpus_write_the_text_of_one(
    graphs: str, folder: Path, alone: dict[float, Text]
) -> None:
    """Also what is drawn with a seed: both GPUs pick from parts of the vocabulary."""
    changes = {} if graphs == "graphs" else {"graph": GraphConfig(enforce_eager=True)}
    async with served(folder, 2, **changes) as client:
        for temperature, expected in alone.items():
            compare(await text_of(client, temperature), expected)
            compare(await text_of(client, temperature, None), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8 blocks", "float32"), ("int4 zeros", "float32"), ("int4 zeros", "bfloat16")],
)
async def test_parts_of_quantised_weights_write_the_same_text(
    name: str, dtype: str, folder: Path, tmp_path: Path
) -> None:
    """In float32 torch multiplies, and in bfloat16 the kernels for packed weights."""
    shutil.copytree(folder / "target", tmp_path / "target")
    quantise(tmp_path / "target", name)
    async with served(tmp_path, 1, dtype=dtype) as client:
        expected = await text_of(client)
    async with served(tmp_path, 2, dtype=dtype) as client:
        found = await text_of(client)
    if dtype == "float32":
        compare(found, expected)
    else:  # whose rounding decides more of the text
        compare(found, expected, tolerance=0.2, fewest=0)


def test_sums_through_shared_memory_are_right() -> None:
    """In graphs, too, and with equal bits on both GPUs."""
    script = Path(__file__).parents[1] / "lab" / "measure_allreduce.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all ways are right" in done.stdout


async def test_experts_divided_by_expert_write_the_same_text(folder: Path) -> None:
    async with served(folder, 1, name="experts") as client:
        expected = await text_of(client)
    async with served(folder, 2, by_expert=True, name="experts") as client:
        compare(await text_of(client), expected)


async def test_replays_equal_launches_beside_them(folder: Path) -> None:
    """Each step is run from a graph and without one; the worker ends if they differ."""
    graph = GraphConfig(debug_compare_eager=True)
    async with served(folder, 2, dtype="bfloat16", graph=graph) as client:
        for temperature in (0.0, 0.8):
            await text_of(client, temperature)
            await text_of(client, temperature, None)
        assert client.state == "ready"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_drafts_change_no_text_and_ranks_stay_equal(
    temperature: float, folder: Path, alone: dict[float, Text]
) -> None:
    """The ranks' digests are compared after every step: a difference would end the worker."""
    drafter = SpeculativeConfig(
        method="eagle3",
        model=str(folder / "drafter"),
        load_format="dummy",
        num_speculative_tokens=3,
    )
    async with served(folder, 2, speculative=drafter) as client:
        found = await text_of(client, temperature, None)
        if not temperature:
            compare(found, alone[0.0])
        assert client.state == "ready"
    assert all(len(ids) == MAX_TOKENS for ids, _ in found.values())


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [("float32", "greedy"), ("float32", "probabilistic"), ("bfloat16", "greedy")],
)
async def test_divided_and_whole_drafters_draft_alike(
    dtype: str, sampling: str, folder: Path, alone: dict[float, Text]
) -> None:
    """In graphs and eagerly. The drafter is a copy of the target, so that greedy drafts are right;
    in bfloat16, which packets add up, but for rounding. There a drafter that is divided as the
    target is rounds as it does, and may be right more often than a whole one."""
    shares: dict[tuple[int, str, float], float] = {}
    for size, graphs in ((1, "graphs"), (2, "graphs"), (2, "eager")):
        drafter = SpeculativeConfig(
            method="draft_model",
            model=str(folder / "target"),
            num_speculative_tokens=3,
            draft_sampling=sampling,
            draft_tensor_parallel_size=size,
        )
        graph = GraphConfig(enforce_eager=graphs == "eager")
        changes: dict[str, Any] = {"speculative": drafter, "graph": graph, "dtype": dtype}
        async with served(folder, 2, **changes) as client:
            steps: list[StepStats] = []
            client.stats = steps.append
            for temperature, expected in alone.items():
                steps.clear()
                found = await text_of(client, temperature, None)
                if dtype == "float32":
                    compare(found, expected)
                accepted, drafted = (
                    sum(getattr(step, name) for step in steps)
                    for name in ("num_accepted_tokens", "num_draft_tokens")
                )
                shares[size, graphs, temperature] = accepted / drafted
            assert client.state == "ready"
    print(f"{dtype}, {sampling}: accepted shares {shares}")
    for (size, graphs, temperature), share in shares.items():
        assert temperature or share > (0.95 if dtype == "float32" else 0.85), (size, graphs)
        more = share - shares[1, "graphs", temperature]
        assert -0.05 < more < (0.05 if dtype == "float32" else 0.15), (size, graphs, temperature)


async def test_a_killed_rank_ends_requests_and_the_group_starts_anew(folder: Path) -> None:
    async with served(folder, 2) as client:
        before = await text_of(client)
        assert client.worker_pid is not None
        first = client.worker_pid
        (rank,) = [
            child
            for child in psutil.Process(first).children()
            if any("engine.rank" in part for part in child.cmdline())
        ]
        stream = submit(client, 0, 900)
        await anext(aiter(stream))
        rank.kill()
        began = time.monotonic()
        with pytest.raises(EngineDead, match="tensor-parallel rank 1 was killed by SIGKILL"):
            async for _ in stream:
                pass
        print(f"noticed after {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began < 6
        while client.state != "ready" or client.worker_pid in (None, first):
            assert time.monotonic() - began < 100
            await asyncio.sleep(0.1)
        print(f"ready again after {time.monotonic() - began:.1f} s")
        compare(await text_of(client), before)
