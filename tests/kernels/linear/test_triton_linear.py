"""Linear layers of few rows, interpreted, equal torch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import rotary_store_kv
from slipstream.kernels.linear import head_sample, linear, norm_rope
from slipstream.kernels.linear.linear_choice import GATE_UP, PARTS, Choice, Gemv, Skinny
from slipstream.kernels.linear.rotation import Rotation
from slipstream.kernels.sampling import sample

from ...cases import some

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
HALVES = [torch.bfloat16, torch.float16]
ONE_ROW = [Gemv(16, 64, 4), Gemv(32, 256, 4), Gemv(32, 64, 4, 3)]
OTHER_ONE_ROW = [Gemv(64, 32, 4, 0, 0), Gemv(64, 64, 4, 0, 1, 2), Gemv(64, 256, 4, 0, 1, 2, 2)]
# Triton 3.6 cannot interpret bf16 products: fp16 is tested here, and bf16 in tests/gpu.
FEW_ROWS = [Skinny(16, 32, 3, 4, 1, 16), Skinny(64, 64, 3, 4, 1, 32)]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Triton for these tests, and fill new memory so that unwritten outputs are noticed."""
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned)


def inputs(rows: int, outputs: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(rows, size), torch.randn(outputs, size) / size**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outputs).to(dtype)


def close(got: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """Compare with `exact`, computed in float64 from the same rounded inputs.

    The difference is rounding only; the interpreter truncates bf16 instead.
    """
    assert got.shape == exact.shape and not got.isnan().any()
    error = (got.double() - exact).norm() / exact.norm()
    bound = {torch.bfloat16: 8e-3, torch.float16: 6e-4, torch.float32: 1e-6}[got.dtype]
    assert error < roundings * bound


def normed(x: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + norm[1]).rsqrt()
    return wide * scale * norm[0].double()


@pytest.mark.parametrize("choice", [*ONE_ROW, *OTHER_ONE_ROW, Skinny(64, 64, 3, 4, 1, 16, norm=1)])
@pytest.mark.parametrize(
    ("size", "dtype"),
    some([(64, torch.bfloat16), (200, torch.float16)], kept=[(200, torch.float16)]),
)
def test_one_row(choice: Gemv | Skinny, size: int, dtype: torch.dtype) -> None:
    roundings = 1
    if isinstance(choice, Skinny):
        dtype, roundings = torch.float16, 2  # it rounds normed rows, and before the residual
    elif not choice.norm:
        roundings = 3  # the norm rounds twice
    x, weight, bias = inputs(1, 50, size, dtype)
    norm, residual = (torch.rand(size).to(dtype), 1e-5), torch.randn(1, 50).to(dtype)
    exact = x.double() @ weight.double().T
    close(linear.linear(x, weight, None, choice), exact)
    both = bias.double() + residual.double()
    close(linear.linear(x, weight, bias, choice, None, residual), exact + both, roundings)
    exact = normed(x, norm) @ weight.double().T
    close(linear.linear(x, weight, bias, choice, norm), exact + bias, roundings)
    gate, up = (exact + bias).chunk(2, -1)
    for activation, act in (
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda v: torch.nn.functional.gelu(v, approximate="tanh")),
    ):
        got = linear.gated_linear(x, weight, bias, activation, choice, norm)
        close(got, act(gate) * up, roundings)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "size", "choice"), [(2, 48, 64, FEW_ROWS[0]), (35, 70, 104, FEW_ROWS[1])]
)
def test_few_rows(rows: int, outputs: int, size: int, choice: Skinny, tma: bool) -> None:
    from slipstream.kernels.linear.triton import skinny

    x, weight, bias = inputs(rows, outputs, size, torch.float16)
    exact = x.double() @ weight.double().T
    close(skinny.multiply(x, weight, choice, tma=tma), exact)
    close(skinny.multiply(x, weight, choice, bias=bias, tma=tma), exact + bias)
    gate, up = (exact + bias).chunk(2, -1)
    got = skinny.multiply(x, weight, choice, GATE_UP, bias, tma=tma)
    close(got, torch.nn.functional.silu(gate) * up)
    for split_k in (2, 5):  # parts may be unequal, and the last ones empty
        of = Skinny(*(choice.block_n, choice.block_k, 3, 4, split_k, choice.block_m))
        parts = skinny.multiply(x, weight, of, PARTS, bias, tma=tma)
        assert parts.shape == (split_k, rows, outputs) and parts.dtype == torch.float32
        close(parts.sum(0), exact + bias)


@pytest.mark.parametrize("choice", [None, ONE_ROW[0], FEW_ROWS[1]])
def test_the_public_functions_agree_with_their_references(choice: Choice) -> None:
    rows = 1 if isinstance(choice, Gemv) else 3
    x, weight, bias = inputs(rows, 64, 96, torch.float16)
    norm, residual = (torch.rand(96).half(), 1e-5), torch.randn(rows, 64).half()
    args = (x, weight, bias)
    for got, expected in (
        (
            linear.linear(*args, choice, norm, residual),
            linear.linear_reference(*args, norm, residual),
        ),
        (
            linear.gated_linear(*args, "gelu_tanh", choice, norm),
            linear.gated_linear_reference(*args, "gelu_tanh", norm),
        ),
        (whole(linear.linear_parts(*args, choice, norm)), linear.linear_reference(*args, norm)),
    ):
        torch.testing.assert_close(got.float(), expected.float(), rtol=0.03, atol=0.03)


def whole(parts: Tensor) -> Tensor:
    return parts.sum(0) if parts.dim() == 3 else parts


@pytest.mark.parametrize("choice", [FEW_ROWS[1], Skinny(64, 32, 3, 4, 3, 16)])
def test_a_row_does_not_depend_on_its_place_or_company(choice: Choice) -> None:
    """With the same kernel, a row's result does not depend on other rows, even NaN in padded ones.

    Inputs are small integers, which sum exactly, since numpy's products depend on the position.
    """
    x, weight = torch.randint(-8, 8, (9, 72)).half(), torch.randint(-8, 8, (40, 72)).half()
    alone = linear.linear_parts(x, weight, None, choice)
    place = torch.randperm(19)[:9]
    moved = torch.full((19, 72), float("nan")).half()
    moved[place] = x
    again = linear.linear_parts(moved, weight, None, choice)
    assert torch.equal(alone, again.index_select(again.dim() - 2, place))


def draws_of(rows: int) -> head_sample.Draws:
    heat = torch.rand(rows) + 0.5
    heat[torch.rand(rows) < 0.3] = 0.0
    return head_sample.Draws(
        torch.randint(-(2**62), 2**62, (rows,)),
        torch.randint(0, 5000, (rows,)),
        heat == 0,
        heat,
        sample.DRAFT,
    )


@pytest.mark.parametrize("choice", [None, *ONE_ROW[1:], FEW_ROWS[1]])
def test_the_head_picks_what_sampling_its_logits_picks(choice: Choice) -> None:
    rows = 1 if isinstance(choice, Gemv) else 6
    x, weight, _ = inputs(rows, 150, 64, torch.float16)
    nobody = replace(draws_of(rows), greedy=torch.ones(rows).bool(), temperature=torch.zeros(rows))
    for draws in (None, nobody, draws_of(rows)):
        got = head_sample.sample_head(x, weight, draws, choice)
        expected = head_sample.sample_head_reference(x, weight, draws, choice)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("choice", [ONE_ROW[0], FEW_ROWS[1]])
def test_equal_logits_give_the_lowest_token_and_nan_is_told(choice: Choice) -> None:
    rows = 1 if isinstance(choice, Gemv) else 2
    x, weight = torch.ones(rows, 32).half(), torch.zeros(90, 32).half()
    weight[[17, 18, 40, 88]] = 1.0
    tokens, largest = head_sample.sample_head(x, weight, None, choice)
    assert tokens.tolist() == [17] * rows and largest.tolist() == [32.0] * rows
    x[-1, 3] = float("nan")
    tokens, largest = head_sample.sample_head(x, weight, None, choice)
    assert largest[-1].isnan() and 0 <= int(tokens[-1]) < 90
    assert tokens.tolist()[:-1] == [17] * (rows - 1)


@pytest.mark.parametrize("dtype", HALVES)
def test_norm_of_parts(dtype: torch.dtype) -> None:
    parts, residual = torch.randn(3, 5, 96), torch.randn(5, 96).to(dtype)
    weight = torch.rand(96).to(dtype)
    exact = norm_rope.fused_add_rms_norm_reference(parts, residual, weight, 1e-6)
    for got, expected in zip(
        norm_rope.fused_add_rms_norm(parts, residual, weight, 1e-6), exact, strict=True
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize(
    ("num_parts", "has_norms", "dtype"),
    some(
        itertools.product((0, 3), (False, True), HALVES),
        kept=[(0, True, HALVES[0]), (3, False, HALVES[1]), (3, True, HALVES[0])],
    ),
)
def test_rotary_of_parts(num_parts: int, has_norms: bool, dtype: torch.dtype) -> None:
    """Sum, head norms, rotation and KV write start from the parts of a fused QKV projection."""
    shape = (num_parts, 7, 8, 64) if num_parts else (7, 8, 64)
    qkv = torch.randn(shape) if num_parts else torch.randn(shape).to(dtype)
    query, key, value = qkv.split([4, 2, 2], dim=-2)
    norms = (torch.rand(64).to(dtype), torch.rand(64).to(dtype), 1e-6) if has_norms else None
    rotation = Rotation(torch.randint(0, 50, (7,)), torch.randn(50, 48), False, norms)
    args = (query, key, value, rotation)
    expected = rotary_store_kv.rotary_qkv_reference(*args, dtype)
    got = rotary_store_kv.rotary_qkv(*args, dtype)
    tolerance = {"rtol": 1.6e-2, "atol": 3e-2}
    torch.testing.assert_close(got, expected, **tolerance)

    cache = torch.randn(2, 6, 4, 2, 64).to(dtype)
    slots = torch.randperm(24)[:7]
    slots[3] = -1
    wanted = cache.clone()
    reference = rotary_store_kv.rotary_store_kv_reference(*args, wanted, slots)
    rotated = rotary_store_kv.rotary_store_kv(*args, cache, slots)
    torch.testing.assert_close(rotated, reference, **tolerance)
    torch.testing.assert_close(cache, wanted, **tolerance)
