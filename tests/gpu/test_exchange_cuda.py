"""Two GPUs exchange rows by all-to-all, under graphs too, and hold gpt-oss's experts whole.

`parallel.sh OUT PYTHON SECONDS exchange` runs these tests and measures both exchanges.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.configs.schema import GraphConfig, ModelConfig, ParallelConfig
from slipstream.runner.loading.matching import slots_of_one_form
from slipstream.runner.loading.weights import make_hf_config
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model

from .test_engine_group_cuda import served as engines_served
from .test_engine_group_cuda import speculative
from .test_parallel_cuda import DRAFTER, EXPERTS, TARGET, compare, save_weights, submit, text_of
from .test_parallel_cuda import served as ranks_served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
GPT_OSS: dict[str, Any] = TARGET | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 16,
    "num_experts_per_tok": 4, "intermediate_size": 256, "sliding_window": 128,
    "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
TO_RANKS = ParallelConfig(1, 2, enable_expert_parallel=True, all2all_backend="all_to_all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exchange")
    for name, config in (("drafter", DRAFTER), ("experts", EXPERTS), ("gpt_oss", GPT_OSS)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    save_weights(EXPERTS, folder / "experts")
    save_weights(GPT_OSS, folder / "gpt_oss")
    save_mxfp4(folder / "gpt_oss_mxfp4")
    return folder


def save_mxfp4(folder: Path) -> None:
    """gpt-oss with experts in MXFP4, as it is released."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    hf_config = make_hf_config(GPT_OSS, str(folder))
    slots = build_model(
        hf_config, WeightFormat(torch.device("meta"), torch.float32)
    ).checkpoint_slots()
    given = [name for name in slots if name.endswith("_blocks")]
    generator, stored = torch.Generator().manual_seed(0), {}
    for name, slot in slots_of_one_form(slots, given).items():
        if name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (121, 124)
            stored[name] = torch.randint(low, high, slot.shape, generator=generator).byte()
        else:
            stored[name] = torch.randn(slot.shape, generator=generator) * 0.09
    save_file(stored, folder / "model.safetensors")


def test_all_to_all_gives_the_sums_and_loads_of_whole_experts() -> None:
    """In graphs that are replayed with other rows, and without graphs."""
    script = Path(__file__).parents[1] / "lab" / "measure_exchange.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both exchanges are right" in done.stdout


@pytest.mark.parametrize("mode", ["graphs", "eager", "drafts"])
async def test_all_to_all_writes_the_text_of_one(mode: str, folder: Path) -> None:
    async with engines_served(folder, 1) as client:
        expected = await text_of(client)
    changes: dict[str, Any] = {"parallel": TO_RANKS}
    if mode == "eager":
        changes["graph"] = GraphConfig(enforce_eager=True)
    elif mode == "drafts":
        changes["speculative"] = speculative(folder)
    async with engines_served(folder, 2, **changes) as engines:
        for _ in range(2):
            compare(await text_of(engines), expected)
        stream = submit(engines, 3, 40)  # beside an idle engine
        ids = [token async for output in stream for token in output.token_ids]
        assert ids[:20] == expected[3][0][:20]


@pytest.mark.parametrize(("name", "dtype"), [("gpt_oss", "float32"), ("gpt_oss_mxfp4", "bfloat16")])
async def test_gpt_oss_by_experts_writes_the_same_text(name: str, dtype: str, folder: Path) -> None:
    """On two ranks, and on two engines that share the experts. In bfloat16, kernels read MXFP4.

    For token 18 of request 11, the scores of the fourth and fifth expert of the last layer differ
    by 6e-5, so that the sums of two ranks may choose the other one.
    """
    close: dict[str, Any] = {"routed": True}
    if dtype == "bfloat16":  # whose rounding decides more of the text
        close = {"tolerance": 0.2, "fewest": 0}
    async with ranks_served(folder, 1, name=name, dtype=dtype) as client:
        expected = await text_of(client)
    async with ranks_served(folder, 2, by_expert=True, name=name, dtype=dtype) as client:
        compare(await text_of(client), expected, **close)
    model = ModelConfig(model=str(folder / name), dtype=dtype)
    for parallel in (replace(TO_RANKS, all2all_backend="allgather_reducescatter"), TO_RANKS):
        async with engines_served(folder, 2, parallel=parallel, model=model) as engines:
            compare(await text_of(engines), expected, **close)
