"""Gated delta layers on a GPU: compiled kernels equal the references, and texts with drafts in
graphs equal texts without."""

from __future__ import annotations

import random
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.recurrent.delta_slots import Slots, random_steps  # noqa: E402
from tests.speculators.qwen_oracle import QwenOracle  # noqa: E402
from tests.speculators.recurrent_engine import drive, engine, texts  # noqa: E402

from slipstream.configs.schema import SpeculativeConfig  # noqa: E402
from slipstream.kernels.recurrent.gated_delta import gated_delta  # noqa: E402
from slipstream.kernels.recurrent.prepare_rows import prepare_rows  # noqa: E402
from slipstream.kernels.recurrent.rows import DeltaShape, OutputGate  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def to_gpu(value: Any) -> Any:
    """A copy of a dataclass of tensors on the GPU."""
    moved = {field.name: getattr(value, field.name).cuda() for field in fields(value)}
    return type(value)(**moved)


@pytest.mark.parametrize("log", [0, 1, 4])
@pytest.mark.parametrize("heads", [(16, 16), (16, 48), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_leave_the_states_of_the_reference(
    log: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    shape = DeltaShape(*heads, 128, 128, 4)
    text = torch.randn(2, 300, shape.channels).to(dtype)
    plain, own = (Slots.make(4, log, shape, dtype) for _ in range(2))
    own.weights, own.state, own.table = map(to_gpu, (own.weights, own.state, own.table))
    own.prepare, own.kernel, own.device = prepare_rows, gated_delta, torch.device("cuda")
    tolerance = 2e-4 if dtype is torch.float32 else 4e-2
    for (x, rows, padding), _ in random_steps(
        text, [2, 0], log, random.Random(log), [1, 1, 2, 3, 63, 64, 150]
    ):
        for slots in (plain, own):
            for slot, at, count in rows:
                border = at + count if count > log else at + 1
                slots.table.values[1, slot], slots.table.values[2, slot] = border, slot + 1
        expected, got = plain.run(x, rows, padding), own.run(x.cuda(), rows, padding)
        close = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(got.cpu(), expected, **close)
        known = (plain.table.values[0, :-1] > 0).nonzero()[:, 0]
        for one, other in zip(vars(own.state).values(), vars(plain.state).values(), strict=True):
            chosen = known if one.shape[0] == 5 else slice(1, None)
            torch.testing.assert_close(one.cpu()[chosen][:, :3], other[chosen][:, :3], **close)
        assert torch.equal(own.table.values.cpu()[:, :-1], plain.table.values[:, :-1])


@pytest.mark.parametrize("log", [0, 4])
@pytest.mark.parametrize("long", [1, 150])
def test_outputs_are_normed_and_gated(log: int, long: int) -> None:
    """One row of `long` tokens and one of a single token; what is padding becomes 0."""
    shape = DeltaShape(16, 48, 128, 128, 4)
    x = torch.randn(long + 4, shape.channels).bfloat16()
    wide = torch.randn(long + 4, shape.value_size + 64).bfloat16()
    gate = OutputGate(wide[:, 32:-32], torch.rand(128) + 0.5, 1e-6)
    plain, own = (Slots.make(3, log, shape, torch.bfloat16) for _ in range(2))
    own.weights, own.state, own.table = map(to_gpu, (own.weights, own.state, own.table))
    own.prepare, own.kernel, own.device = prepare_rows, gated_delta, torch.device("cuda")
    rows = [(0, 0, long), (2, 0, 1)]
    expected = plain.kernel(x, plain.weights, shape, plain.state, plain.rows(rows), gate)
    moved = OutputGate(gate.values.cuda(), gate.weight.cuda(), gate.eps)
    got = own.kernel(x.cuda(), own.weights, shape, own.state, own.rows(rows), moved).cpu()
    error = (got[: long + 1] - expected[: long + 1]).float().norm(dim=1)
    # A head whose values nearly cancel is scaled up by the norm, and its rounding with it.
    assert (error / expected[: long + 1].float().norm(dim=1)).max() < 2e-2
    assert not got[long + 1 :].any()


SIZES: dict[str, Any] = {
    "cache": {"block_size": 16, "num_gpu_blocks_override": 200, "state_block_size": 16},
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 96},
    "device": "cuda",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen") / "target"
    QwenOracle(made)
    return made


@pytest.mark.parametrize(
    ("method", "k", "graph"),
    [
        ("off", None, {}),
        ("mtp", 1, {}),
        ("mtp", 3, {}),
        ("mtp", 3, {"cudagraph_whole_step": False}),
    ],
)
def test_texts_are_those_of_plain_eager_steps(
    folder: Path, method: str, k: int | None, graph: dict[str, Any]
) -> None:
    """Arrivals, prefix hits, and drafts of which some are right, in graphs of every kind."""
    asked, found = texts(30, seed=3), []
    drafts = SpeculativeConfig(
        method=method, num_speculative_tokens=k, draft_sampling="greedy", watchdog=False
    )
    plain = {"cache": SIZES["cache"] | {"enable_prefix_caching": False}}
    for config, changes in (
        (SpeculativeConfig(), SIZES | plain | {"graph": {"enforce_eager": True}}),
        (drafts, SIZES | {"graph": graph}),
    ):
        made = engine(folder, config, **{name: dict(v) if isinstance(v, dict) else v
                                         for name, v in changes.items()})  # fmt: skip
        run, _ = drive(made, asked, 14, random.Random(1), aborts=False)
        made.close()
        found.append(run)
    wrong = [i for i in found[0].tokens if found[0].tokens[i] != found[1].tokens[i]]
    assert len(wrong) <= 1, f"more than a near-tie: {wrong}"
    if k:
        assert 0 < found[1].accepted < found[1].drafted
    assert any(found[1].cached_tokens.values())
