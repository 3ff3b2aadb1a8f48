"""The compiled kernels for linear layers with few rows are correct on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import rotary_store_kv
from slipstream.kernels.linear import head_sample, linear, norm_rope
from slipstream.kernels.linear.linear_choice import (
    H100_WINNERS,
    PARTS,
    Choice,
    Gemv,
    Shape,
    Skinny,
    default_choice,
    fits,
)
from slipstream.kernels.linear.linear_tuned import create_chooser
from slipstream.kernels.linear.rotation import Rotation
from slipstream.kernels.sampling import sample

from ..lab.linear_tune import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HALVES = [torch.bfloat16, torch.float16]
OTHERS = [Shape("qkv", 1152, 896), Shape("down", 200, 1048), Shape("gate_up", 500, 96)]
CASES = [*H100_WINNERS, *((shape, rows) for shape in OTHERS for rows in (1, 16, 32, 64))]


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Fill freed memory with NaN, so that outputs that a kernel does not write are noticed."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        torch.full((size,), float("nan"), device="cuda")


@pytest.fixture(autouse=True)
def dependent_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable dependent launches, the harder case, whatever the environment sets."""
    from slipstream.kernels import launch

    monkeypatch.setattr(launch, "pdl_wanted", lambda: True)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def close(got: Tensor, exact: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    error = float((got.double() - exact.double()).norm() / exact.double().norm())
    assert error < {torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype], error


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "bucket"), CASES, ids=str)
def test_every_tuned_kernel_is_correct(shape: Shape, bucket: int, dtype: torch.dtype) -> None:
    """The error is that of one rounding, with as many rows as the bucket has and with fewer."""
    choice = H100_WINNERS.get((shape, bucket), default_choice(shape, bucket))
    weight = randn(shape.outputs, shape.inputs, dtype=dtype, scale=shape.inputs**-0.5)
    for rows in {bucket, max(1, bucket - 7)}:
        assert fits(choice, shape, rows)
        error = relative_error(shape, choice, randn(rows, shape.inputs, dtype=dtype), weight)
        assert error < {torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]


@pytest.mark.parametrize("size", [576, 4096])
def test_single_row_kernels_apply_norm_bias_residual_and_activation(size: int) -> None:
    x, weight, bias = randn(1, size), randn(512, size, scale=size**-0.5), randn(512)
    norm, residual = (torch.rand(size, device="cuda").bfloat16(), 1e-5), randn(1, 512)
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm[0].double()
    exact = normed @ weight.double().T + bias.double()
    for choice in (Gemv(4, 1024, 4), Gemv(4, 2048, 4), Gemv(4, 512, 4, 4)):
        close(linear.linear(x, weight, bias, choice, norm), exact)
        got = linear.linear(x, weight, bias, choice, norm, residual)
        close(got, exact + residual.double())
        gate, up = exact.chunk(2, -1)
        got = linear.gated_linear(x, weight, bias, "gelu_tanh", choice, norm)
        close(got, torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("tma", [False, True])
def test_tiles_load_with_and_without_tensor_descriptors(tma: bool) -> None:
    from slipstream.kernels import launch
    from slipstream.kernels.linear.triton import skinny

    x, weight = randn(9, 328), randn(200, 328, scale=0.05)
    if tma and not launch.has_tma(x):
        pytest.skip("this GPU has no TMA")
    choice = Skinny(64, 64, 3, 4, 3, 16)
    parts = skinny.multiply(x, weight, choice, PARTS, tma=tma)
    close(parts.sum(0), x.double() @ weight.double().T)


@pytest.mark.parametrize("choice", [Skinny(64, 128, 4, 4, 4, 16), Skinny(64, 128, 3, 4, 1, 64)])
def test_a_row_does_not_depend_on_its_position_or_on_other_rows(choice: Choice) -> None:
    x, weight = randn(9, 1024), randn(640, 1024, scale=0.03)
    alone = linear.linear_parts(x, weight, None, choice)
    place = torch.randperm(60, device="cuda")[:9]
    moved = torch.full((60, 1024), float("nan"), device="cuda", dtype=torch.bfloat16)
    moved[place] = x
    again = linear.linear_parts(moved, weight, None, choice)
    assert torch.equal(alone, again.index_select(again.dim() - 2, place))


@pytest.mark.parametrize("vocab", [49152, 128256])
@pytest.mark.parametrize("rows", [1, 5, 60])
def test_the_fused_head_samples_the_same_tokens_as_sampling_its_logits(
    rows: int, vocab: int
) -> None:
    x, weight = randn(rows, 576), randn(vocab, 576, scale=0.1)
    temperature = torch.rand(rows, device="cuda") + 0.5
    temperature[torch.rand(rows, device="cuda") < 0.2] = 0.0
    is_greedy = temperature == 0
    choice = default_choice(Shape("head", vocab, 576), rows)
    assert choice is not None
    for start in range(0, 64, 8):  # many draws: the noise must be equal, not only its distribution
        seeds = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
        positions = torch.arange(start, start + rows, device="cuda")
        draws = head_sample.Draws(seeds, positions, is_greedy, temperature, sample.DRAFT)
        for of in (draws, None):
            got = head_sample.sample_head(x, weight, of, choice)
            logits = linear.linear(x, weight, None, choice).float()
            expected = logits.argmax(-1)
            if of is not None:
                scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
                keys = (seeds, positions, sample.DRAFT, is_greedy)
                expected = sample.gumbel_sample(scaled, *keys)
            assert torch.equal(got[0], expected)
            assert torch.equal(got[1], logits.amax(-1))


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("rows", [1, 4, 33])
def test_graphs_with_dependent_launches_equal_eager(rows: int) -> None:
    """A chain of layers, with torch's copies and fills between, is bit-equal in 20 replays."""
    hidden, inner = 1024, 2048
    weights = [randn(1536, hidden, scale=0.03), randn(2 * inner, hidden, scale=0.03)]
    weights += [randn(hidden, inner, scale=0.02)]
    gain = torch.rand(hidden, device="cuda").bfloat16()
    x = randn(rows, hidden)
    kept = torch.empty_like(x)
    cos_sin = torch.randn(64, 64, device="cuda")
    positions = torch.randint(0, 64, (rows,), device="cuda")
    roles = ("qkv", "gate_up", "down")
    choices = [
        default_choice(Shape(role, *weight.shape), rows)
        for role, weight in zip(roles, weights, strict=True)
    ]

    def layer(stream: Tensor) -> Tensor:
        normed = norm_rope.rms_norm(stream, gain, 1e-5)
        qkv = linear.linear_parts(normed, weights[0], None, choices[0])
        heads = qkv.view(*qkv.shape[:-1], 24, 64)
        query, key, value = torch.split(heads, [16, 4, 4], dim=-2)
        rotation = Rotation(positions, cos_sin)
        query, _, _ = rotary_store_kv.rotary_qkv(query, key, value, rotation, torch.bfloat16)
        kept.copy_(query.reshape(rows, hidden))  # a copy before a dependent launch
        act = linear.gated_linear(kept, weights[1], None, "silu", choices[1])
        down = linear.linear_parts(act, weights[2], None, choices[2])
        return norm_rope.fused_add_rms_norm(down, stream, gain, 1e-5)[1]

    def run() -> Tensor:
        stream = x
        for _ in range(8):
            kept.fill_(float("nan"))
            stream = layer(stream)
        return stream

    eager = run()
    assert eager.isfinite().all()
    graph, out = captured(run)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


def test_auto_selects_triton_only_on_measured_gpus() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    chooser = create_chooser("auto", device, torch.bfloat16)
    shape = Shape("gate_up", 28672, 4096)
    if torch.cuda.get_device_capability() == (9, 0):
        assert chooser is not None and isinstance(chooser.choose(shape, 1), Gemv)
        assert chooser.choose(Shape("qkv", 6144, 4096), 200) is None
    assert create_chooser("torch", device, torch.bfloat16) is None
    assert create_chooser("triton", device, torch.float32) is None
