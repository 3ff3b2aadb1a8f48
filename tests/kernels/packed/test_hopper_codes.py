"""Products of codes on Hopper GPUs, the roles of warps run as threads, equal those in float32."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.kernels.linear.linear_choice import Shape
from slipstream.kernels.linear.norm_rope import fused_add_rms_norm, fused_add_rms_norm_reference
from slipstream.kernels.packed import choice as packed_choice
from slipstream.kernels.packed import coded_choice
from slipstream.kernels.packed.coded import (
    Coding,
    code_rows,
    code_rows_reference,
    decode_rows,
    norm_and_code,
)
from slipstream.kernels.packed.coded_linear import coding_of
from slipstream.kernels.packed.kinds import GATE_UP, PARTS, PLAIN, Codes, Quantised, fits_roles
from slipstream.kernels.packed.linear import packed_gated_linear, packed_linear_parts

from ..gluon_threads import ThreadedKernel
from .test_coded import close, made, rows_of

pytestmark = pytest.mark.usefixtures("triton_interpreter", "poison")
HALF = torch.float16
TILE = Codes(32, 128, 3, 4, 1, 64, 0, 0, roles=1)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory, so that unwritten outputs are noticed; and enable the kernels."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernel, which runs on the CPU."""
    from slipstream.kernels.packed.triton import hopper_codes

    ThreadedKernel(hopper_codes, "_hopper_codes_kernel").replace(monkeypatch)
    return hopper_codes


@pytest.mark.parametrize(
    ("name", "mode", "rows", "size", "programs", "changes"),
    [
        ("fp8 rows", "plain", 70, 328, 2, {}),  # two tiles of rows, and a few in the last
        ("fp8 rows", "plain", 130, 1032, 3, {"block_m": 128, "stages": 2, "promote": 1}),
        ("fp8 rows", "gated", 3, 328, 1, {"stages": 5}),  # more stages than steps
        ("fp8 rows", "gated", 67, 520, 2, {"block_m": 128, "block_n": 16, "by_group": 1}),
        ("fp8 rows", "parts", 9, 1032, 2, {"split_k": 2, "block_m": 128, "by_group": 1}),
        ("fp8 rows", "gated", 3, 1032, 1, {"stages": 2, "block_n": 16}),
        ("fp8 rows", "parts", 5, 520, 2, {"split_k": 2, "by_group": 1, "narrow": 1}),
        ("fp8 rows", "parts", 9, 328, 1, {"split_k": 4, "stages": 2}),  # one part has no step
        ("fp8 rows", "gated", 200, 328, 3,
         {"block_m": 128, "block_n": 16, "joined": 1, "stages": 2}),
        ("fp8 rows", "gated", 9, 520, 1, {"joined": 1, "stages": 2}),
        ("fp8 blocks", "gated", 66, 264, 2, {"by_group": 1, "block_n": 64}),
        ("fp8 blocks", "parts", 17, 520, 2, {"by_group": 1, "split_k": 2}),
    ],
)  # fmt: skip
def test_products_are_those_of_the_codes(
    kernel: Any,
    name: str,
    mode: str,
    rows: int,
    size: int,
    programs: int,
    changes: dict[str, int],
) -> None:
    blocks = name == "fp8 blocks"
    outputs = 256 if blocks else 2 * 22 if mode == "gated" else 37
    columns = outputs // 2 if mode == "gated" else outputs
    weight, exact = made(name, outputs, size)
    choice = replace(TILE, **changes)
    assert fits_roles(weight, "gate_up" if mode == "gated" else "o", choice.block_n)
    x, bias = rows_of(rows, size).clamp(-1e3, 1e3), torch.randn(outputs).half()
    coding = coding_of(weight, choice)
    coded = code_rows(x, coding)
    product = decode_rows(coded, coding).double() @ exact.T + bias
    given = {"programs": programs}
    if mode == "plain":
        residual = torch.randn(rows, columns).half()
        got = kernel.multiply(coded, weight, choice, HALF, PLAIN, bias, "", residual, **given)
        close(got, product + residual)
    elif mode == "gated":
        gate, up = (product / 1024).chunk(2, -1)  # within the range of float16
        small = replace(weight, scales=weight.scales / 1024)
        got = kernel.multiply(coded, small, choice, HALF, GATE_UP, bias / 1024, **given)
        close(got, torch.nn.functional.silu(gate) * up, 2e-3)
    else:
        parts = kernel.multiply(coded, weight, choice, HALF, PARTS, bias, **given)
        assert parts.shape == (choice.split_k, rows, columns)
        assert parts.dtype == (HALF if choice.narrow else torch.float32)
        close(parts.double().sum(0), product, 1e-3 if choice.narrow else 1e-5)


@pytest.mark.parametrize(
    ("outputs", "changes"),
    [(256, {}), (168, {}), (168, {"joined": 1, "block_m": 128})],
)
def test_a_gated_layer_writes_codes_for_the_next(
    kernel: Any, outputs: int, changes: dict[str, int]
) -> None:
    """The codes are those of its 16-bit output: each program has a whole group of 128."""
    weight, _ = made("fp8 rows", 2 * outputs, 264)
    choice = replace(TILE, block_n=128, stages=2, **changes)
    x, coding = rows_of(67, 264).clamp(-9, 9), Coding(outputs, True)
    coded_x = code_rows(x, coding_of(weight, choice))
    act = packed_gated_linear(coded_x, weight, None, "gelu_tanh", choice, None, HALF)
    assert act.shape == (67, outputs) and act.dtype == HALF
    coded = packed_gated_linear(coded_x, weight, None, "gelu_tanh", choice, None, HALF, coding)
    end = coding.num_codes + 4 * coding.spans
    assert torch.equal(coded[:, :end], code_rows_reference(act, coding)[:, :end])


def test_it_equals_the_kernel_without_roles(kernel: Any) -> None:
    """With a row's scale and with groups, both kernels compute the same layer."""
    weight, _ = made("fp8 rows", 40, 520)
    x = torch.randn(5, 520).half()
    for by_group in (0, 1):
        choice = replace(TILE, by_group=by_group, split_k=2, promote=1)
        other = Codes(16, 128, 3, 1, 2, 16, by_group)
        got = packed_linear_parts(x, weight, None, choice).sum(0)
        close(got, packed_linear_parts(x, weight, None, other).sum(0).double(), 1e-5)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_norms_sum_parts_of_16_bits_in_float32(dtype: torch.dtype) -> None:
    parts, stream = torch.randn(4, 3, 256).to(dtype), torch.randn(3, 256).to(dtype)
    gain, coding = torch.rand(256).to(dtype), Coding(256, True)
    wide = parts.float()
    for got, exact in (
        (fused_add_rms_norm(parts, stream.clone(), gain, 1e-5),
         fused_add_rms_norm(wide, stream.clone(), gain, 1e-5)),
        (norm_and_code(parts, stream, gain, 1e-5, coding),
         norm_and_code(wide, stream, gain, 1e-5, coding)),
        (fused_add_rms_norm_reference(parts, stream, gain, 1e-5),
         fused_add_rms_norm_reference(wide, stream, gain, 1e-5)),
    ):  # fmt: skip
        assert all(torch.equal(*pair) for pair in zip(got, exact, strict=True))


def test_it_is_chosen_on_hopper_for_scales_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {role: Shape(role, 4096, 4096) for role in ("qkv", "o", "down")}
    layers["gate_up"] = Shape("gate_up", 28672, 4096)
    made_of: dict[str, Any] = {"kind": "fp8", "activations": "fp8-token", "row_group": 1}
    made_of |= {"order": None, "zeros": None}
    weight: Any = SimpleNamespace(**made_of, group=4096, columns=4096, device="card")

    def chosen(role: str, rows: int) -> Any:
        weight.shape = (layers[role].outputs, layers[role].inputs)
        return coded_choice.choose_coded(weight, layers[role], rows)

    def on(major: int) -> None:
        card = SimpleNamespace(capability=(major, 0))
        monkeypatch.setattr(coded_choice, "card_of", lambda device: card)

    on(10)
    before = {(role, rows): chosen(role, rows) for role in layers for rows in (16, 40, 128, 256)}
    assert not any(choice is not None and choice.roles for choice in before.values())
    monkeypatch.setattr(coded_choice, "USE_ROLES", False)
    on(9)
    assert before == {(role, rows): chosen(role, rows) for role, rows in before}
    monkeypatch.setattr(coded_choice, "USE_ROLES", True)
    weight.group = weight.row_group = 128
    of_blocks = {role: chosen(role, 128) for role in layers}
    assert all(choice.roles and choice.by_group for choice in of_blocks.values())
    layers["gate_up"] = Shape("gate_up", 28608, 4096)  # gates end inside a block
    assert not chosen("gate_up", 128).roles
    layers["gate_up"] = Shape("gate_up", 28672, 4096)
    weight.group, weight.row_group = 4096, 1
    measured = replace(TILE, narrow=1)
    table = {("fp8", layers["o"], rows): measured for rows in (16, 32)}
    table["fp8", layers["o"], 64] = None
    monkeypatch.setattr(coded_choice, "_ROLES", table)
    assert chosen("o", 9) == chosen("o", 20) == measured and chosen("o", 40) == before["o", 40]
    assert chosen("down", 20) is None
    layers["head"] = Shape("head", 4096, 4096)
    assert not getattr(chosen("head", 128), "roles", 0)
    monkeypatch.setattr(coded_choice, "_ROLES", {})
    for role, rows in before:
        choice = chosen(role, rows)
        if rows == 16:
            assert choice == before[role, rows]
            continue
        assert choice.roles and choice.block_k == 128 and choice.block_m == min(rows + 24, 128)
        gates = 2 if role == "gate_up" else 1
        codes = (gates * choice.block_n + choice.block_m) * 128
        assert choice.stages * codes <= 208 * 1024 and choice.stages >= 4
        assert choice.split_k == 1 or layers[role].may_split
        tiles = layers[role].outputs // gates // choice.block_n * rows / choice.block_m
        assert choice.split_k == 1 or tiles * choice.split_k <= 132
        assert choice.by_group == (role in ("o", "down"))


def test_torch_multiplies_more_than_256_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks where its library can, of which each condition counts."""
    card = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(coded_choice, "card_of", lambda device: card)
    rows, blocks = made("fp8 rows", 256, 512)[0], made("fp8 blocks", 256, 512)[0]
    for weight in (rows, blocks):
        assert isinstance(packed_choice.choose_packed(weight, "o", 256), Codes)
        for version in ("12.8", "12.9", "13.0"):
            monkeypatch.setattr(torch.version, "cuda", version)
            choice = packed_choice.choose_packed(weight, "o", 257)
            assert isinstance(choice, Quantised) == (weight is rows or version > "12.8")
    for size in ((256, 640), (320, 512)):
        assert not packed_choice.can_quantise(made("fp8 blocks", *size)[0])
    monkeypatch.setattr(packed_choice, "is_hopper", lambda weight: False)
    assert not packed_choice.can_quantise(blocks)


def test_a_tile_may_not_meet_two_blocks() -> None:
    blocks, _ = made("fp8 blocks", 256, 264)
    assert fits_roles(blocks, "gate_up", 128) and not fits_roles(blocks, "o", 256)
    half, _ = made("fp8 blocks", 192, 264)  # gates end inside a block of 128 rows
    assert not fits_roles(half, "gate_up", 32)
    rows, _ = made("fp8 rows", 192, 264)
    assert fits_roles(rows, "gate_up", 32) and fits_roles(rows, "o", 256)
