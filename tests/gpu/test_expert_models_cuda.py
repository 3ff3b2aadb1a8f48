"""Models with experts on a GPU: graphs and drafts leave greedy text as eager steps write it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.runner.loading.quantised.stored_formats import FORMATS  # noqa: E402
from tests.speculators.test_expert_models import FAMILIES, SHAPE, VOCAB  # noqa: E402
from tests.speculators.tiny_engine import TinyEngine, prompts  # noqa: E402

from slipstream.configs.schema import SpeculativeConfig  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
WIDE: dict[str, Any] = {**SHAPE, "hidden_size": 64, "head_dim": 16}  # the least of a matrix unit
SIZES: dict[str, Any] = {
    "cache": {"block_size": 16, "num_gpu_blocks_override": 200},
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 96},
}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Disable TF32, because padding may change a product's kernel and its rounding near-ties."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module", params=[*FAMILIES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**WIDE, **FAMILIES[request.param])
    model = getattr(transformers, f"{request.param}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_()
    path = tmp_path_factory.mktemp("models") / str(request.param)
    model.save_pretrained(path)
    return path


def texts(folder: Path, method: str, device: str = "cuda", **changes: Any) -> dict[str, list[int]]:
    graph = {"cudagraph_capture_sizes": (4, 8, 16)} | changes.pop("graph", {})
    drafter = SpeculativeConfig(method=method)
    if method != "off":
        drafter = SpeculativeConfig(method=method, num_speculative_tokens=3, watchdog=False)
    sizes = {name: dict(values) for name, values in SIZES.items()}
    engine = TinyEngine(folder, drafter, graph=graph, device=device, **sizes, **changes)
    asked = [[token % VOCAB for token in ids] for ids in prompts(4, seed=3, longest=20)]
    run = engine.run(asked, max_tokens=40)
    engine.close()
    assert method == "off" or 0 < run.accepted < run.drafted
    return run.tokens


def test_graphs_and_drafts_write_the_text_of_eager_steps(folder: Path) -> None:
    eager = texts(folder, "off", graph={"enforce_eager": True})
    assert texts(folder, "off") == eager
    assert texts(folder, "ngram") == eager
    reference = texts(folder, "off", device="cpu", graph={"cudagraph_capture_sizes": None})
    assert {name: ids[:8] for name, ids in reference.items()} == {
        name: ids[:8] for name, ids in eager.items()
    }


def test_packed_experts_in_graphs(tmp_path: Path) -> None:
    """gpt-oss with random MXFP4 weights, which stay so on a Hopper GPU."""
    config = transformers.GptOssConfig(**WIDE, **FAMILIES["GptOss"])
    config.architectures = ["GptOssForCausalLM"]
    raw = config.to_dict() | {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
        }
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    graph = {"debug_compare_eager": True}  # each replay with an eager run
    found = texts(tmp_path, "off", graph=graph, dtype="bfloat16", load_format="dummy")
    assert [len(ids) for ids in found.values()] == [40] * 4


@pytest.mark.parametrize("name", ["fp8 blocks", "int4 zeros", "nvfp4"])
def test_quantised_experts_in_graphs(name: str, tmp_path: Path) -> None:
    """Qwen3-MoE with random weights in a quantised format; all experts of a layer are packed."""
    config = transformers.Qwen3MoeConfig(**WIDE, **FAMILIES["Qwen3Moe"])
    config.architectures = ["Qwen3MoeForCausalLM"]
    raw = config.to_dict() | {"quantization_config": FORMATS[name].config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    graph = {"debug_compare_eager": True}  # each replay with an eager run
    found = texts(tmp_path, "off", graph=graph, dtype="bfloat16", load_format="dummy")
    assert [len(ids) for ids in found.values()] == [40] * 4
