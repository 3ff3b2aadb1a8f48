"""The assembly that turns words into numbers, run by a small emulator, is exact for every word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from slipstream.kernels.quant.packed import (  # noqa: E402
    HIGH_BITS,
    Kind,
    PackedWeight,
    pack_bits,
)
from slipstream.kernels.quant.planes import plane_words  # noqa: E402
from slipstream.kernels.quant.tiled import FP4_FIELDS, FP4_SIGNS, slices_of  # noqa: E402
from slipstream.kernels.quant.triton import packed_codes  # noqa: E402
from slipstream.kernels.quant.triton.plane_codes import UNITS, assembly  # noqa: E402

MASK = 0xFFFFFFFF
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
CASES: list[tuple[str, Kind, str]] = [
    ("_FP8_BF16", "fp8", "bf16"),
    ("_FP8_F16", "fp8", "f16"),
    ("_INT8_BF16", "int8", "bf16"),
    ("_INT8_F16", "int8", "f16"),
    ("_INT4_BF16", "int4", "bf16"),
    ("_INT4_F16", "int4", "f16"),
    ("_FP4_BF16", "fp4", "bf16"),
    ("_FP4_F16", "fp4", "f16"),
]


def run(assembly: str, word: Tensor, outputs: int, *others: Tensor) -> list[Tensor]:
    """The outputs for registers `word` and `others` [n] int64, each [n] int64."""
    values = {f"${outputs + index}": register for index, register in enumerate((word, *others))}

    def get(operand: str) -> Tensor:
        return torch.tensor(int(operand, 0)) if operand[0].isdigit() else values[operand]

    operations: dict[str, Callable[..., Tensor]] = {
        "mov": lambda a: a.expand_as(word),
        "shl": lambda a, by: a << by & MASK,
        "shr": lambda a, by: a >> by,
        "and": lambda a, b: a & b,
    }
    for line in assembly.removesuffix("}").split(";")[1:]:
        name, _, rest = line.strip().partition(" ")
        if not name:
            continue
        target, *operands = (part.strip() for part in rest.split(","))
        kind = name.split(".")[0]
        inputs = [get(operand) for operand in operands]
        if kind == "lop3":
            a, b, c, table = inputs
            values[target] = {0xEA: a & b | c, 0x6A: a & b ^ c, 0xE4: a & c | b & ~c}[int(table)]
        elif kind == "fma":
            dtype = HALVES[name.rsplit(".", 1)[1].removesuffix("x2")]
            a, b, c = (halves(register.expand_as(word), dtype) for register in inputs)
            values[target] = joined(a * b + c, dtype)
        elif kind in ("mul", "sub"):
            dtype = HALVES[name.rsplit(".", 1)[1].removesuffix("x2")]
            values[target] = paired(kind, inputs[0], inputs[1], dtype)
        else:
            values[target] = operations[kind](*inputs)
    return [values[f"${index}"] for index in range(outputs)]


def halves(register: Tensor, dtype: torch.dtype) -> Tensor:
    """The two floats of registers [n]: [n, 2] float64."""
    bits = torch.stack((register & 0xFFFF, register >> 16), -1).to(torch.int32)
    return bits.to(torch.int16).view(dtype).double()


def paired(kind: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    left, right = halves(a, dtype), halves(b.expand_as(a), dtype)
    return joined(left * right if kind == "mul" else left - right, dtype)


def joined(exact: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = exact.to(dtype)
    assert torch.equal(rounded.double(), exact)  # never rounds
    bits = rounded.view(torch.int16).long() & 0xFFFF
    return bits[:, 0] | bits[:, 1] << 16


@pytest.mark.parametrize(("name", "kind", "dtype"), CASES)
def test_every_word_becomes_its_numbers(name: str, kind: Kind, dtype: str) -> None:
    slices = slices_of(kind)
    words = torch.arange(1 << 16)
    codes = torch.stack(
        [words >> 16 // slices * i & 255 >> 8 - 16 // slices for i in range(slices)]
    )
    if kind == "fp4":
        fields = torch.stack([words >> bit & 7 for bit in FP4_FIELDS])
        codes = fields | torch.stack([(words >> bit & 1) << 3 for bit in FP4_SIGNS])
    if kind == "fp8":
        words = words[((codes & 127) != 127).all(0)]  # no NaN
        codes = codes[:, ((codes & 127) != 127).all(0)]
    stored = codes[:, :, None].expand(-1, -1, 2).reshape(-1, 2).byte()
    values = stored[:, :1] if slices == 2 else stored[:, :1] | stored[:, 1:] << 4
    view = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kind, torch.uint8)
    weight = PackedWeight(kind, values.view(view), torch.ones(len(values), 1), 1, 1)
    expected = weight.dequantise().view(slices, -1).double()
    other = torch.roll(words, 12345)
    found = run(getattr(packed_codes, name).value, words | other << 16, slices)
    for index, register in enumerate(found):
        pair = halves(register, HALVES[dtype])
        assert torch.equal(pair[:, 0], expected[index])
        assert torch.equal(pair[:, 1], torch.roll(expected[index], 12345))


def test_one_product_applies_factor_and_scale_to_fp4() -> None:
    words = torch.arange(1 << 16)
    found = run(packed_codes._FP4_BF16.value, words, 4)
    first, second = torch.tensor(0x6F80), torch.tensor(0x7200)  # 2 ** 96 and 2 ** 101
    registers = [(bits | bits << 16).expand_as(words) for bits in (first, second)]
    scaled = run(packed_codes.FP4_TIMES.value, words, 4, *registers)
    for index, (plain, times) in enumerate(zip(found, scaled, strict=True)):
        power = -30 if index < 2 else -25  # of the 2 ** 126 that plain numbers contain
        expected = halves(plain, torch.bfloat16) * 2.0**power
        assert torch.equal(halves(times, torch.bfloat16), expected)


def test_parts_of_codes_are_exact() -> None:
    words = torch.arange(1 << 16)
    found = run(packed_codes._INT4_PARTS.value, words | torch.roll(words, 9) << 16, 4)
    for index, register in enumerate(found):
        pair = halves(register, torch.bfloat16) * 64
        assert torch.equal(pair[:, 0], (words >> 4 * index & 15) - 8.0)
        assert torch.equal(pair[:, 1], torch.roll((words >> 4 * index & 15) - 8.0, 9))


@pytest.mark.parametrize(("name", "base"), [("_RAW_BF16", 128), ("_RAW_F16", 1024)])
def test_codes_with_zeros_come_with_a_base(name: str, base: int) -> None:
    words = torch.arange(1 << 16)
    dtype = torch.bfloat16 if base == 128 else torch.float16
    for index, register in enumerate(run(getattr(packed_codes, name).value, words, 4)):
        found = halves(register, dtype)
        assert torch.equal(found[:, 0], (words >> 4 * index & 15) + base + 0.0)
        assert (found[:, 1] == base).all()


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("MASKED_4", "int4", torch.bfloat16),
        ("MASKED_4", "int4", torch.float16),
        ("MASKED_FP8_BF16", "fp8", torch.bfloat16),
        ("MASKED_FP8_F16", "fp8", torch.float16),
    ],
)
def test_masks_alone_give_numbers_times_a_power_of_two(
    name: str, kind: Kind, dtype: torch.dtype
) -> None:
    slices, words = slices_of(kind), torch.arange(1 << 16)
    if kind == "fp8":
        words = words[((words & 127) != 127) & ((words >> 8 & 127) != 127)]  # no NaN
    factors, _ = packed_codes.sum_factor(kind, dtype, True, 1.0)
    found = run(getattr(packed_codes, name).value, words | torch.roll(words, 77) << 16, slices)
    for index, register in enumerate(found):
        codes = words >> 16 // slices * index & (15 if slices == 4 else 255)
        numbers = codes if slices == 4 else codes.byte().view(torch.float8_e4m3fn)
        pair = halves(register, dtype) * factors[index]
        assert torch.equal(pair[:, 0], numbers.double())
        assert torch.equal(pair[:, 1], torch.roll(numbers.double(), 77))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", HIGH_BITS)
def test_words_of_two_planes_become_their_numbers(kind: Kind, dtype: str) -> None:
    """Every code comes out of every slice, from the words that tiling makes."""
    bits = 4 + HIGH_BITS[kind]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (64, 256), generator=generator).byte()
    low, high = plane_words(
        pack_bits(codes & 15, 4), pack_bits(codes >> 4, bits - 4), kind, codes.shape[1]
    )
    words, rest = (plane.long() & 0xFFFF for plane in (low, high))
    tiles, unit = 4 // HIGH_BITS[kind], UNITS[HALVES[dtype]]
    for tile in range(low.shape[1] // 16):
        span = tile // tiles
        left = words[:, 16 * tile : 16 * tile + 16].flatten()
        right = rest[:, 16 * span : 16 * span + 16].flatten()
        pair = left | torch.roll(left, 1) << 16, right | torch.roll(right, 1) << 16
        for centred in (False, True):
            zero = 8 << bits - 4 if centred else 0
            text = assembly(kind, tile % tiles, dtype, centred)
            for index, register in enumerate(run(text, pair[0], 4, pair[1])):
                start = 64 * tile + 16 * index
                expected = codes[:, start : start + 16].flatten().double() - zero
                found = halves(register, HALVES[dtype]) * unit
                assert torch.equal(found[:, 0], expected)
                assert torch.equal(found[:, 1], torch.roll(expected, 1))
