"""A block whose checkpoint asks for fp8 activations hands coded rows from layer to layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.linear_choice import Skinny
from slipstream.kernels.packed import choice, coded_linear
from slipstream.kernels.packed.kinds import Codes, Quantised
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.llama import DecoderLayer

CONFIG = SimpleNamespace(
    model_type="llama", hidden_size=256, intermediate_size=256, num_attention_heads=2,
    num_key_value_heads=1, head_dim=128, rms_norm_eps=1e-5, sliding_window=None,
)  # fmt: skip
PARTS = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("",),
}


class Attends:
    """Attention that returns its queries, which are summed if they are parts."""

    def rotate_and_attend(self, layer: int, query: Tensor, *rest: Any) -> Tensor:
        return (query.sum(0) if query.dim() == 4 else query).half().contiguous()


def block(dtype: torch.dtype = torch.float16) -> DecoderLayer:
    """A block with random weights, the same in each call."""
    fmt = WeightFormat(torch.device("cpu"), dtype, packed=True)
    layer = DecoderLayer(CONFIG, 0, 0, fmt)
    make = torch.Generator().manual_seed(1)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.uniform_(0.5, 1.5, generator=make)
    for path, shards in PARTS.items():
        linear = layer.get_submodule(path)
        for shard in shards:
            rows = linear.shards[shard]  # type: ignore[operator,index]
            values = torch.randn(rows, 256, generator=make).to(torch.float8_e4m3fn)
            scales = torch.rand(rows, 1, generator=make) / 16
            weight = PackedWeight("fp8", values, scales, 256, 256, activations="fp8-token")
            linear.use_part(shard, weight)  # type: ignore[operator]
    return layer


def run(layer: DecoderLayer, hidden: Tensor, residual: Tensor | None) -> Tensor:
    rotary: Any = SimpleNamespace(cos=None, positions=None, cos_sin_cache=None, interleaved=False)
    attends: Any = Attends()
    out, stream = layer.forward(hidden, residual, rotary, attends)
    whole = out.sum(0) if out.dim() == 3 else out
    return whole.float() + (0 if stream is None else stream.float())


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
def test_norms_and_the_gated_layer_code_what_the_next_layer_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, stream = torch.randn(3, 256).half(), torch.randn(3, 256).half()
    expected = [run(block(), x, residual) for residual in (None, stream)]
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    own: list[tuple[int, ...]] = []
    code_rows = coded_linear.code_rows

    def spied(x: Tensor, *rest: Any) -> Tensor:
        own.append(tuple(x.shape))
        return code_rows(x, *rest)

    monkeypatch.setattr(coded_linear, "code_rows", spied)
    layer = block()
    for path in PARTS:
        packed = layer.get_submodule(path).packed
        chosen = packed._choice_for(3)  # type: ignore[operator,union-attr]
        assert isinstance(chosen, Codes if "o_proj" not in path else Skinny)
        assert not isinstance(packed._choice_for(1), Codes)  # type: ignore[operator,union-attr]
    for residual, exact in zip((None, stream), expected, strict=True):
        got = run(layer, x, residual)
        error = (got - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.08, error  # that of coded activations
    assert not own  # no kernel codes rows that another has written


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
def test_in_wide_steps_torch_multiplies_what_norms_and_gates_have_coded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No layer of a step of more than 256 rows loses the dtype of its result on the way.

    A step of 9 rows runs as such a step does, because interpreting costs time per row."""
    x, stream = torch.randn(9, 256).half(), torch.randn(9, 256).half()
    expected = run(block(), x, stream)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    calls = []

    def multiplied(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **rest: Any) -> Tensor:
        calls.append(b.shape[1])
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(rest["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    layer = block()
    for path in PARTS:
        packed = layer.get_submodule(path).packed
        assert isinstance(packed._choice_for(260), Quantised)  # type: ignore[operator,union-attr]
    monkeypatch.setattr(choice, "EXACT_ROWS", 8)
    monkeypatch.setattr(choice, "choose_coded", lambda *args: None)
    got = run(layer, x, stream)
    error = (got - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.08, error
    assert calls == [512, 256, 512, 256]  # qkv, o, gate and up, down


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("rows", [3, 40, 260])
def test_numbers_of_32_bits_are_never_coded(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of codes writes float32, so that such a model multiplies widened weights."""
    x = torch.randn(rows, 256)
    expected = run(block(torch.float32), x, None)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    layer = block(torch.float32)
    assert all(layer.get_submodule(path).packed.coding(rows) is None for path in PARTS)  # type: ignore[operator,union-attr]
    if rows == 3:
        error = (run(layer, x, None) - expected).norm() / expected.norm()
        assert error < 1e-3  # that of attention, which rounds to float16 here
