"""Start-up on a GPU compiles all kernels ahead, and none is compiled once the engine is ready."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs.schema import Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from slipstream.kernels.compile_log import watch_compilations
from slipstream.runner.engine.engine import Engine, build_engine
from slipstream.runner.messages import AddRequest, SamplingParams
from slipstream.runner.startup.compile_ahead import OFF, is_wanted

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
from ..kernels.test_compile_ahead import DRAFTER, TARGET  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
KINDS = [
    SamplingParams(seed=0, max_tokens=6, temperature=0.0),
    SamplingParams(seed=1, max_tokens=6, has_own_seed=True),
    SamplingParams(seed=2, max_tokens=6),
    SamplingParams(seed=3, max_tokens=6, top_p=0.5, top_k=3),
    SamplingParams(seed=4, max_tokens=6, presence_penalty=0.5),
    SamplingParams(seed=5, max_tokens=6, temperature=0.0, logprobs=2),
    SamplingParams(seed=6, max_tokens=6, logprobs=0, prompt_logprobs=1),
    SamplingParams(seed=7, max_tokens=6, min_p=0.1, logit_bias={3: 1.0}),
    SamplingParams(seed=8, max_tokens=6, temperature=0.0, allowed_token_ids=[3, 4, 5]),
]
START: dict[str, Any] = {}  # kernels compiled, and found in the cache, while `engine` was built


@pytest.fixture(scope="module", params=["off", "eagle3"])  # with the default K, which is auto
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("target", TARGET), ("drafter", DRAFTER)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    speculative = SpeculativeConfig()
    if request.param == "eagle3":
        speculative = SpeculativeConfig(
            method="eagle3",
            model=str(folder / "drafter"),
            load_format="dummy",
        )
    config = Config(
        model=ModelConfig(model=str(folder / "target"), load_format="dummy"),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512),
        speculative=speculative,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OFF, "1")
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        assert is_wanted(config)
        log = watch_compilations()
        before = len(log.compiled), log.num_cached
        engine = build_engine(config, lambda _: None)
        START["compiled"], START["cached"] = log.compiled[before[0] :], log.num_cached - before[1]
        yield engine
        engine.shutdown()


def test_all_kernels_of_a_start_are_compiled_ahead(engine: Engine) -> None:
    assert "compile" in engine.ready.startup_seconds
    assert START["cached"] > 0  # not all kernels, as this process may have loaded some before
    assert START["compiled"] == [], "kernels that were not compiled ahead"


@pytest.mark.parametrize(
    "lengths", [[1], [7], [16], [100], [300], [33, 1, 64], [129] * 3, [5] * 8, [5] * 20, [7] * 32]
)
def test_no_request_compiles_a_kernel(engine: Engine, lengths: list[int]) -> None:
    log = watch_compilations()
    before = list(log.compiled)
    for params in KINDS:
        engine.handle([AddRequest(f"{i}", [3] * n, params) for i, n in enumerate(lengths)])
        while engine.has_work():
            engine.step()
    assert log.compiled == before
