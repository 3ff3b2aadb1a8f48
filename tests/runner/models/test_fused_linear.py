"""The Llama family through the linear kernels of few rows (interpreted) equals the plain path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream.kernels.linear.linear_choice import Choice, Gemv, Shape, Skinny, fits
from slipstream.kernels.linear.linear_tuned import LinearChooser
from slipstream.runner.attention.base import AttentionBackend
from slipstream.runner.attention.reference import ReferenceBackend
from slipstream.runner.attention.triton import TritonBackend
from slipstream.runner.models import moe
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model

from ...cases import some
from ...kernels.counted_kernel import CountedKernel
from ..model_harness import CPU, Sequences

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    shared_expert_intermediate_size=48,
)
DELTA = EXPERTS | dict(
    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
    linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
STEEP = dict(  # the scale of queries changes every two positions
    rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 2,
    },
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
TILE = Skinny(64, 32, 3, 4, 2, 16)
NO_NORM = Gemv(64, 64, 4, norm=0)
ROWS = [[(0, [5, 9, 33])], [(0, [71])], [(0, [2]), (1, [8])]]


class Chooser(LinearChooser):
    """Chooses large tiles, since interpreting costs time per program; records its calls."""

    def __init__(self) -> None:
        super().__init__({})
        self.asked: list[tuple[str, int]] = []

    def _look_up(self, shape: Shape, num_rows: int) -> Choice:
        self.asked.append((shape.role, num_rows))
        if num_rows == 1:
            return Gemv(64, 64, 4)
        return Skinny(64, 32, 3, 4, 2 if shape.may_split else 1, 16)


def make_model(kind: str, dtype: torch.dtype, chooser: LinearChooser | None) -> Any:
    config_class = getattr(transformers, f"{kind}Config")
    more: dict[str, Any] = {
        "Qwen2Moe": EXPERTS, "Qwen3Moe": EXPERTS, "Qwen3_5MoeText": DELTA, "Ministral3": STEEP
    }.get(kind, {})  # fmt: skip
    config = config_class(**SIZES, **more, head_dim=16, tie_word_embeddings=kind == "Llama")
    model = build_model(config, WeightFormat(CPU, dtype, linear=chooser))
    generator = torch.Generator().manual_seed(3)
    for slot in model.checkpoint_slots().values():
        weights = torch.ones(slot.shape)
        if slot.init != "ones":
            weights.normal_(0, 0.15, generator=generator)
        slot.load(weights.half().to(dtype))
    return model


def run(model: Any, backend: AttentionBackend, steps: Any = ROWS) -> list[Tensor]:
    """Logits and auxiliary hidden states of a prefill, a one-row decode and a two-row decode."""
    sequences = Sequences(model, 2, 16, 16, backend)
    out: list[Tensor] = []
    for rows in steps:
        logits, taps = sequences.step(rows, (0, 1, 2))
        out += [*logits, *taps]
    return out


@pytest.mark.parametrize(
    ("kind", "fuses"),
    some(
        [
            *[("Qwen2", False), ("Qwen3", True), ("Qwen2Moe", True), ("Qwen3Moe", True)],
            *[("Qwen3_5MoeText", True), ("Ministral3", True)],
        ],
        kept=[("Qwen2", False), ("Qwen3Moe", True)],
    ),
)
def test_few_rows_equal_the_plain_path(
    kind: str, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a back end without a fused kernel (`fuses` False)."""
    expected = run(make_model(kind, torch.float32, None), ReferenceBackend())
    chooser = Chooser()
    model = make_model(kind, torch.float16, chooser)
    backend = TritonBackend()
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    monkeypatch.setattr(moe, "_FEW_ROWS", TILE)
    if not fuses:
        monkeypatch.delattr("slipstream.runner.attention.triton.TritonMetadata.rotate_and_attend")
    got = run(model, backend)
    assert len(got) == len(expected) == 13
    for left, right in zip(got, expected, strict=True):
        assert left.shape == right.shape
        error = (left.float() - right).norm() / right.norm()
        assert error < 4e-3
    roles = {"qkv", "o", "gate_up", "down", "head"}
    assert set(chooser.asked) >= {(role, rows) for role in roles for rows in (1, 2, 3)}


MIXED: list[dict[str, Choice]] = [
    {"qkv": Gemv(64, 64, 4), "o": TILE, "gate_up": NO_NORM, "down": Gemv(64, 64, 4)},  # of an H100
    {"qkv": NO_NORM, "o": NO_NORM, "gate_up": replace(TILE, norm=1, split_k=1), "down": TILE},
    {"qkv": TILE, "o": Gemv(64, 64, 4), "gate_up": Gemv(64, 64, 4), "down": None},
]


@pytest.mark.parametrize("choices", MIXED)
def test_layers_that_fuse_norms_and_sums_mix_with_others(
    choices: dict[str, Choice], monkeypatch: pytest.MonkeyPatch
) -> None:

    class Mixed(LinearChooser):
        def _look_up(self, shape: Shape, num_rows: int) -> Choice:
            choice = choices.get(shape.role)
            return choice if fits(choice, shape, num_rows) else None

    steps = [[(0, [5])], [(0, [71])]]
    expected = run(make_model("Llama", torch.float32, None), ReferenceBackend(), steps)
    model = make_model("Llama", torch.float16, Mixed({}))
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    for left, right in zip(run(model, TritonBackend(), steps), expected, strict=True):
        assert (left.float() - right).norm() / right.norm() < 4e-3


def test_one_row_runs_five_kernels_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The four products contain norms, residual and SwiGLU; the fifth kernel rotates and stores."""
    from slipstream.kernels.linear.triton import norm_rope

    model = make_model("Llama", torch.float16, Chooser())
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    norms = CountedKernel(norm_rope._rms_norm_kernel)
    monkeypatch.setattr(norm_rope, "_rms_norm_kernel", norms)
    Sequences(model, 1, 16, 16, TritonBackend()).step([(0, [7])])
    assert norms.launches == 1  # the final one
    Sequences(model, 1, 16, 16, TritonBackend()).step([(0, [7, 8])])
    assert norms.launches == 1 + 2 * 2 + 1
