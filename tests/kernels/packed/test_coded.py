"""Coded rows, and products of codes with codes, interpreted: they equal the same in float32."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.linear_choice import Gemv, Shape, Skinny
from slipstream.kernels.packed import choice as choices
from slipstream.kernels.packed.choice import choose_packed
from slipstream.kernels.packed.coded import (
    Coding,
    code_rows,
    code_rows_reference,
    decode_rows,
    gate_and_code,
    norm_and_code,
    planes,
)
from slipstream.kernels.packed.coded_choice import choose_coded
from slipstream.kernels.packed.coded_linear import coded_linear, coding_of
from slipstream.kernels.packed.kinds import GATE_UP, PARTS, PLAIN, Codes, Quantised
from slipstream.kernels.packed.linear import (
    packed_gated_linear,
    packed_linear,
    packed_linear_parts,
)
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.kernels.quant.tiled import TiledWeight, tile

from ...cases import some
from ..quant.random_weights import random_weight

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
FEW = Codes(16, 128, 3, 1, 1, 16, 0)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory, so that unwritten outputs are noticed; and enable the kernels."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")


def rows_of(num_rows: int, size: int) -> Tensor:
    """Rows of very different sizes, and one of zeros."""
    x = torch.randn(num_rows, size) * 2.0 ** torch.randint(-9, 9, (num_rows, 1))
    x[num_rows // 2] = 0
    x[-1, 0] = 30_000
    return x.half()


def made(name: str, outputs: int, size: int) -> tuple[TiledWeight, Tensor]:
    """A weight whose checkpoint asks for codes, and its exact numbers."""
    weight = random_weight(name, outputs, size)
    asks: Any = "fp8-token" if name == "fp8 rows" else "fp8-block"
    return tile(replace(weight, activations=asks)), weight.dequantise().double()


def close(got: Tensor, exact: Tensor, bound: float = 1e-3) -> None:
    """The relative error of each row is that of one rounding of the output."""
    error = (got.double() - exact).norm(dim=-1)
    limit = bound * exact.norm(dim=-1) + 1e-6
    assert got.isfinite().all() and (error <= limit).all(), (error / limit).max()


@pytest.mark.parametrize(
    ("size", "by_group"),
    some([(s, g) for s in (128, 200, 1352) for g in (0, 1)], kept=[(200, 0), (200, 1), (1352, 1)]),
)
def test_coded_rows_are_those_of_the_reference(size: int, by_group: int) -> None:
    x, coding = rows_of(5, size), Coding(size, by_group > 0)
    coded = code_rows(x, coding)
    assert coded.dtype == torch.uint8 and coded.shape == (5, coding.row_bytes)
    end = coding.num_codes + 4 * (coding.spans if by_group else 1)  # the rest is never read
    assert coding.row_bytes % 16 == 0
    assert torch.equal(coded[:, :end], code_rows_reference(x, coding)[:, :end])
    numbers = decode_rows(coded, coding)
    assert (numbers - x.float()).abs().max() <= x.float().abs().max() / 16
    assert not numbers[2].any()
    for row in (0, 4):  # codes of a row depend on no other
        assert torch.equal(code_rows(x[row : row + 1], coding)[0, :end], coded[row, :end])


@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks"])
def test_planar_rows_have_the_same_codes_and_are_multiplied_by_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, exact = made(name, 320, 200)
    x, norm = torch.randn(3, 200).half(), (torch.rand(200).half(), 1e-5)
    in_blocks = name == "fp8 blocks"
    plain, planar = Coding(200, in_blocks), Coding(200, in_blocks, planar=True)
    coded = code_rows(x, planar)
    assert coded.shape[0] == 3
    for got, expected in zip(
        planes(coded, planar), planes(code_rows_reference(x, planar), planar), strict=True
    ):
        assert torch.equal(got[:3].float(), expected[:3].float())
    numbers = decode_rows(coded, planar)
    assert torch.equal(numbers, decode_rows(code_rows(x, plain), plain))
    codes, scales = planes(coded, planar)
    assert codes.is_contiguous() and scales.T.is_contiguous() and scales.data_ptr() % 16 == 0
    assert len(codes) == len(scales) == (4 if in_blocks else 3)  # as torch wants them
    normed, stream = norm_and_code(x, x, *norm, planar)
    assert torch.equal(stream, x + x)
    both = torch.randn(3, 400).half()
    act = gate_and_code(both, "silu", planar)
    gate, up = both.float().chunk(2, -1)
    exact_act = torch.nn.functional.silu(gate) * up
    close(decode_rows(act, planar), exact_act.double(), 0.05)

    def multiplied(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **_: Any) -> Tensor:
        if in_blocks:  # [M, K / 128] and [K / 128, N / 128]
            found.append(scale_b)
            assert scale_a.stride() == (1, 4) and scale_b.stride() == (1, 2)
            scale_a = scale_a.repeat_interleave(128, 1)
            scale_b = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : b.shape[1]]
        return ((a.float() * scale_a) @ (b.float() * scale_b)).half()

    found: list[Tensor] = []
    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    for rows in (coded, normed, act):
        got = packed_linear(rows, weight, None, Quantised(), dtype=torch.float16)
        parts = packed_linear_parts(rows, weight, None, Quantised(), dtype=torch.float16)
        assert torch.equal(parts, got)
        close(got, decode_rows(rows, planar).double() @ exact.T)
    part = packed_linear(coded, weight.first_rows(256), None, Quantised(), dtype=torch.float16)
    close(part, numbers.double() @ exact[:256].T)
    if in_blocks:
        assert weight.by_rows is not None and torch.equal(found[-1], weight.by_rows[:2].T)
        assert found[0].data_ptr() == weight.by_rows.data_ptr()  # copied by no product
    for start in (None, norm):  # rows that no kernel before has coded
        got = packed_linear(x, weight, None, Quantised(), start)
        rows = coded if start is None else norm_and_code(x, None, *norm, planar)[0]
        close(got, decode_rows(rows, planar).double() @ exact.T)
    gate, up = (numbers.double() @ exact.T).chunk(2, -1)
    for wants in (Coding(160, in_blocks, planar=True), Coding(160, True)):
        got = packed_gated_linear(
            coded, weight, None, "silu", Quantised(), None, torch.float16, wants
        )
        close(decode_rows(got, wants), torch.nn.functional.silu(gate) * up, 0.05)


@pytest.mark.parametrize(
    ("parts", "wide", "by_group"),
    some(
        [(p, w, g) for p, w in ((0, False), (3, False), (0, True)) for g in (0, 1)],
        kept=[(3, False, 1), (0, True, 0)],
    ),
)
def test_a_norm_writes_codes(parts: int, wide: bool, by_group: int) -> None:
    size, coding = 328, Coding(328, by_group > 0)
    buffer = torch.randn(4, 2 * size).half()
    residual, weight = buffer[:, :size], torch.rand(size).to(torch.float32 if wide else torch.half)
    x = torch.randn(parts, 4, size) if parts else torch.randn(4, size).half()
    coded, stream = norm_and_code(x, residual, weight, 1e-5, coding)
    total = ((x.sum(0) if parts else x.float()) + residual.float()).half()
    assert torch.equal(stream, total)
    normed = total.float() * (total.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed = (normed * weight).half() if wide else normed.half() * weight
    expected = decode_rows(code_rows_reference(normed, coding), coding)
    got = decode_rows(coded, coding)
    assert (got == expected).double().mean() > 0.98  # a number may round to the other side
    assert (got - expected).abs().max() <= expected.abs().max() / 7
    alone, same = norm_and_code(total, None, weight, 1e-5, coding)
    assert same is total
    assert torch.equal(decode_rows(alone, coding), got)


PRODUCTS = [
    (name, mode, rows, size, by_group, tma)
    for name in ("fp8 rows", "fp8 blocks")
    for mode in ("plain", "gated", "parts")
    for rows, size, tma in ((3, 328, True), (17, 264, False), (3, 128, False))
    for by_group in ((0, 1) if name == "fp8 rows" else (1,))
]
KEPT = [
    ("fp8 rows", "plain", 3, 128, 0, False),
    ("fp8 rows", "gated", 3, 328, 0, True),
    ("fp8 rows", "parts", 3, 328, 1, True),
    ("fp8 blocks", "gated", 3, 328, 1, True),
    ("fp8 blocks", "parts", 17, 264, 1, False),
]


@pytest.mark.parametrize(
    ("name", "mode", "rows", "size", "by_group", "tma"), some(PRODUCTS, kept=KEPT)
)
def test_products_are_those_of_the_codes(
    name: str, mode: str, rows: int, size: int, by_group: int, tma: bool
) -> None:
    from slipstream.kernels.packed.triton import coded_product as kernel

    outputs = 2 * 22 if mode == "gated" else 37
    weight, exact = made(name, outputs, size)
    choice = replace(FEW, by_group=by_group, split_k=2 if mode == "parts" else 1)
    x, bias, residual = rows_of(rows, size), torch.randn(outputs).half(), torch.randn(rows, 37)
    coding = coding_of(weight, choice)
    coded = code_rows(x, coding)
    product = decode_rows(coded, coding).double() @ exact.T + bias
    half = torch.float16
    if mode == "plain":
        got = kernel.multiply(
            coded, weight, choice, half, PLAIN, bias, "", residual.half(), tma=tma
        )
        close(got, product + residual.half())
    elif mode == "gated":
        gate, up = (product / 1024).chunk(2, -1)  # within the range of float16
        small = replace(weight, scales=weight.scales / 1024)
        got = kernel.multiply(coded, small, choice, half, GATE_UP, bias / 1024, tma=tma)
        close(got, torch.nn.functional.silu(gate) * up, 2e-3)
    else:
        parts = kernel.multiply(coded, weight, choice, half, PARTS, bias, tma=tma)
        assert parts.shape == (2, rows, 37) and parts.dtype == torch.float32
        close(parts.sum(0), product, 1e-5)
        narrow = replace(choice, narrow=1)
        small = kernel.multiply(coded, weight, narrow, half, PARTS, bias, tma=tma)
        assert torch.equal(small, parts.half())


@pytest.mark.parametrize(
    ("name", "outputs"),
    some(
        [(name, n) for name in ("fp8 rows", "fp8 blocks") for n in (256, 168)],
        kept=[("fp8 blocks", 256), ("fp8 rows", 168)],
    ),
)
def test_a_gated_layer_writes_codes_for_the_next(name: str, outputs: int) -> None:
    """The codes are those of its 16-bit output: each program has a whole group of 128."""
    weight, _ = made(name, 2 * outputs, 264)
    choice = Codes(128, 128, 3, 1, 1, 16, 1)
    x, coding = rows_of(3, 264).clamp(-9, 9), Coding(outputs, True)
    act = packed_gated_linear(x, weight, None, "silu", choice)
    assert act.shape == (3, outputs) and act.dtype == x.dtype
    coded = packed_gated_linear(x, weight, None, "silu", choice, None, None, coding)
    end = coding.num_codes + 4 * coding.spans
    assert torch.equal(coded[:, :end], code_rows_reference(act, coding)[:, :end])
    for other in (replace(choice, block_n=64), replace(coding, by_group=False)):
        kernel = other if isinstance(other, Codes) else choice
        wants = other if isinstance(other, Coding) else coding
        out = packed_gated_linear(x, weight, None, "silu", kernel, None, None, wants)
        assert torch.equal(out, act)  # a layer that cannot write what is wanted writes numbers


def test_sums_in_steps_equal_sums_of_the_tensor_cores_where_these_are_exact() -> None:
    weight, exact = made("fp8 rows", 37, 520)
    x = rows_of(2, 520)
    kept = [replace(FEW, promote=promote, block_k=k) for promote in (0, 1) for k in (128, 256)]
    coding = coding_of(weight, kept[0])
    expected = decode_rows(code_rows(x, coding), coding).double() @ exact.T
    for choice in kept:
        close(packed_linear_parts(x, weight, None, choice), expected)


def test_a_block_that_gate_and_up_share_has_its_own_scales() -> None:
    """Rows of the up projection that begin inside a block of 128 rows."""
    weight, exact = made("fp8 blocks", 2 * 96, 256)
    choice, x = Codes(32, 128, 3, 1, 1, 16, 1), torch.randn(3, 256).half()
    coding = coding_of(weight, choice)
    gate, up = (decode_rows(code_rows(x, coding), coding).double() @ exact.T).chunk(2, -1)
    got = coded_linear(x, weight, replace(choice, block_n=64), mode=GATE_UP)
    close(got, torch.nn.functional.silu(gate) * up, 2e-3)


def test_norms_of_rows_that_are_not_coded_yet() -> None:
    weight, exact = made("fp8 rows", 24, 256)
    x, norm = torch.randn(3, 256).half(), (torch.rand(256).half(), 1e-5)
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm[0].double()
    close(packed_linear(x, weight, None, FEW, norm), normed @ exact.T, 0.05)


def test_codes_are_chosen_only_if_the_checkpoint_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fp8 rows", "fp8 blocks"):
        weight, _ = made(name, 64, 512)
        for role in ("qkv", "o", "gate_up", "down", "other"):
            assert not isinstance(choose_packed(weight, role, 1), Codes)
            for rows in (2, 16, 17, 64, 65, 128, 129, 256):
                choice = choose_packed(weight, role, rows)
                if 16 < rows <= 64 or (role in ("o", "other") and rows <= 16):
                    assert isinstance(choice, Skinny)  # as fast; or nothing before it codes
                    continue
                if name == "fp8 rows" and rows > (128 if role in ("o", "down") else 64):
                    assert isinstance(choice, Quantised)
                    continue
                assert isinstance(choice, Codes)
                assert choice.split_k == 1 or role in ("qkv", "o", "down")
                assert choice.by_group or name == "fp8 rows"
            assert not isinstance(choose_packed(weight, role, 257), Codes)
        plain = replace(weight, activations="16bit")
        assert isinstance(choose_packed(plain, "down", 16), Skinny)
    weight, _ = made("fp8 rows", 64, 512)
    assert isinstance(choose_packed(weight, "down", 257), Quantised)
    assert isinstance(choose_packed(weight, "down", 1), Gemv)
    other = tile(random_weight("int8 rows", 64, 512))
    assert choose_coded(other, Shape("o", 64, 512), 16) is None
    monkeypatch.setattr(choices, "choose_coded", lambda *rest: None)
    assert isinstance(choose_packed(weight, "down", 16), Skinny)  # a table may prefer 16 bits


def test_measured_tiles_come_before_the_rule() -> None:
    from slipstream.kernels.packed.coded_choice import _MEASURED

    made_of: dict[str, Any] = {"kind": "fp8", "activations": "fp8-token", "row_group": 1}
    made_of |= {"order": None, "zeros": None, "device": torch.device("cpu")}
    for (name, shape, bucket), choice in _MEASURED.items():
        assert name == "fp8"
        weight: Any = SimpleNamespace(**made_of, group=shape.inputs, columns=shape.inputs)
        assert choose_coded(weight, shape, bucket) == choice
        if choice is not None:
            assert choice.block_m >= min(bucket, 128) and choice.block_k % 128 == 0
            assert choice.split_k == 1 or shape.may_split
    few = Shape("down", 64, 1 << 16)  # a tile alone would fill no GPU
    weight = SimpleNamespace(**made_of, group=few.inputs, columns=few.inputs)
    found = choose_coded(weight, few, 16)
    assert found is not None and found.split_k == 8


def test_reordered_columns_are_not_coded() -> None:
    packed = PackedWeight(
        "fp8", torch.zeros(8, 128).to(torch.float8_e4m3fn), torch.ones(8, 1), 128, 128,
        order=torch.randperm(128).int(), activations="fp8-token",
    )  # fmt: skip
    assert choose_coded(tile(packed), Shape("o", 8, 128), 16) is None
