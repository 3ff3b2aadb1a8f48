"""The products between two attentions in one launch, its programs and roles run as threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.packed.persistent.row_layer import multiply_row_reference
from slipstream.kernels.packed.persistent.row_weights import RowLayer, fits_row_layer
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.kernels.quant.tiled import tile

from ...cases import some
from ..gluon_threads import ThreadedKernel, load
from ..quant.random_weights import FORMATS, random_weight

pytestmark = pytest.mark.usefixtures("triton_interpreter")
CPU = torch.device("cpu")
NORM = torch.ones(256), 1e-5
SHAPES = ((256, 256), (1024, 256), (256, 512), (48, 256))  # o, gate and up, down, qkv
SMALLEST = 2.0**-133  # number of bfloat16
# attention's heads, hidden, inner and outputs of qkv: with two spans a step, products have one to
# three steps, and the last ones have one span
SIZES = {
    "int4 128": (768, 256, 768, 80),
    "fp8 rows": (640, 384, 384, 48),
}
# The same with an input of `down` that one warp copies in two parts.
LONG = {
    "int4 128": (256, 256, 2304, 80),
    "fp8 rows": (128, 128, 2176, 48),
}


def masked_4(words: Tensor) -> tuple[Tensor, ...]:
    low, high = words.int() & 255, words.int() >> 8 & 255
    return tuple((part & bits) * SMALLEST for part in (low, high) for bits in (15, 240))


def masked_8(words: Tensor) -> tuple[Tensor, ...]:
    codes = (words.int() & 255, words.int() >> 8 & 255)
    return tuple(
        code.to(torch.uint8).view(torch.float8_e4m3fn).float() * 2.0**-120 for code in codes
    )


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernel, which runs on the CPU; new memory is NaN."""
    empty = torch.Tensor.new_empty
    poisoned = lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    from slipstream.kernels.packed.persistent.triton import hopper_row

    ThreadedKernel(
        hopper_row,
        "_hopper_row_kernel",
        "meet_programs",
        masked_4=masked_4,
        masked_8=masked_8,
        load_eights=load,
        minus_eight=lambda spans, _: torch.full((spans, 16, 64), -8 * SMALLEST),
    ).replace(monkeypatch)
    return hopper_row


def layer_of(name: str, sizes: tuple[int, int, int, int]) -> RowLayer:
    heads, hidden, inner, outputs = sizes
    shapes = ((hidden, heads), (2 * inner, hidden), (hidden, inner), (outputs, hidden))
    weights = [tile(random_weight(name, *shape, seed=i)) for i, shape in enumerate(shapes)]
    norms = [(torch.rand(hidden) + 0.5, 1e-5 * (1 + i)) for i in range(2)]
    return RowLayer(*weights, *norms)


def run(
    kernel: Any,
    layer: RowLayer,
    programs: int,
    rows: int = 1,
    lasts: tuple[bool, ...] = (False, True),
    **changes: int,
) -> None:
    """Compare the kernel in a form with the plain version, also after the last layer (`lasts`)."""
    form = replace(kernel.Form(), **changes)
    x, residual = torch.randn(rows, layer.o.shape[1]), torch.randn(rows, layer.o.shape[0])
    # Rows differ much, so that a row normed by the squares of another is wrong.
    x *= torch.arange(1, rows + 1)[:, None]
    residual *= torch.arange(1, rows + 1)[:, None]
    counter = torch.zeros(1, dtype=torch.int32)
    for is_last in lasts:
        own = replace(layer, qkv=None, next_norm=None) if is_last else layer
        got = kernel.multiply(x, residual, own, counter, form, programs)
        for found, exact in zip(got, multiply_row_reference(x, residual, own), strict=True):
            assert (found is None) == (exact is None)
            if found is not None and exact is not None:
                assert found.shape == exact.shape
                atol = 1e-4 * exact.abs().mean(1, keepdim=True)
                assert (found - exact).abs().le(atol + 1e-4 * exact.abs()).all()


# programs, stages, steps of the input in registers, and spans
FORMS = [(1, 2, 4, 2), (3, 3, 1, 2), (5, 11, 4, 2), (7, 3, 4, 2), (4, 2, 2, 8)]


@pytest.mark.parametrize(
    ("name", "programs", "stages", "held", "spans"),
    some(
        [(name, *form) for name in SIZES for form in FORMS],
        kept=[(tuple(SIZES)[at % 2], *form) for at, form in enumerate(FORMS)],
    ),
)
def test_a_layer_is_that_of_its_parts(
    kernel: Any, name: str, programs: int, stages: int, held: int, spans: int
) -> None:
    """Also with more programs than tiles, and with more stages than steps of a program."""
    run(kernel, layer_of(name, SIZES[name]), programs, stages=stages, held=held, spans=spans)


@pytest.mark.parametrize(
    ("name", "programs"),
    some(
        [(name, programs) for name in LONG for programs in (1, 3)],
        kept=[("fp8 rows", 3)],
    ),
)
def test_an_input_may_be_longer_than_what_is_copied_at_once(
    kernel: Any, name: str, programs: int
) -> None:
    inner, spans = LONG[name][2], 1
    assert inner > kernel.block_of(inner, 32 * spans)
    run(kernel, layer_of(name, LONG[name]), programs, spans=spans)


# rows, programs, steps of the input in registers, spans, and whether attention was the last
FEW_ROWS = [
    (name, rows, *form, is_last)
    for name in SIZES
    for rows in (2, 3, 4)
    for form in ((1, 4, 2), (5, 1, 2), (3, 4, 1), (7, 4, 4))
    for is_last in (False, True)
]


@pytest.mark.parametrize(
    ("name", "rows", "programs", "held", "spans", "is_last"),
    some(
        FEW_ROWS,
        kept=[
            ("int4 128", 2, 5, 1, 2, True),
            ("int4 128", 3, 7, 4, 4, False),
            ("int4 128", 4, 1, 4, 2, True),
            ("fp8 rows", 2, 3, 4, 1, False),
            ("fp8 rows", 4, 5, 1, 2, False),
        ],
    ),
)
def test_each_of_few_rows_is_computed_with_its_own_norms(
    kernel: Any, name: str, rows: int, programs: int, held: int, spans: int, is_last: bool
) -> None:
    layer = layer_of(name, SIZES[name])
    run(kernel, layer, programs, rows, (is_last,), held=held, spans=spans)


@pytest.mark.parametrize("name", SIZES)
def test_no_row_depends_on_another(kernel: Any, name: str) -> None:
    layer, form = layer_of(name, (256, 256, 256, 48)), replace(kernel.Form(), spans=1)
    x, residual = torch.randn(4, layer.o.shape[1]), torch.randn(4, layer.o.shape[0])
    x[1], residual[1] = float("nan"), float("inf")
    counter = torch.zeros(1, dtype=torch.int32)
    whole = kernel.multiply(x, residual, layer, counter, form, 2)
    for rows in ([0], [0, 2, 3], [3, 0]):
        parts = kernel.multiply(x[rows], residual[rows], layer, counter, form, 2)
        for part, of_whole in zip(parts, whole, strict=True):
            torch.testing.assert_close(part, of_whole[rows], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("flying", some([1, 2, 5], [2]))
def test_fewer_steps_may_be_on_their_way_than_there_are_stages(kernel: Any, flying: int) -> None:
    run(kernel, layer_of("int4 128", SIZES["int4 128"]), 5, flying=flying, stages=5)


def test_it_knows_fp8_of_rows_and_int4_of_128_() -> None:
    known = {"int4 128", "fp8 rows"}
    for name in FORMATS:
        weights = [tile(random_weight(name, *shape)) for shape in SHAPES]
        layer = RowLayer(*weights, NORM, NORM)
        assert fits_row_layer(layer, torch.bfloat16, CPU) == (name in known), name
        assert not fits_row_layer(layer, torch.float16, CPU)


@pytest.mark.parametrize(("inner", "fits"), [(32768, True), (32768 + 128, False)])
def test_it_knows_inputs_that_fit_in_shared_memory(inner: int, fits: bool) -> None:
    weights = []
    for shape in ((128, 128), (2 * inner, 128), (128, inner)):
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        scales = torch.empty(shape[0], 1, device="meta")
        weights.append(tile(PackedWeight("fp8", codes, scales, shape[1], shape[1])))
    layer = RowLayer(*weights, None, NORM, None)
    assert fits_row_layer(layer, torch.bfloat16, CPU) == fits


def test_it_needs_matrices_that_follow_each_other() -> None:
    o, gate_up, down, qkv = (tile(random_weight("int4 128", *shape)) for shape in SHAPES)
    other = tile(random_weight("fp8 rows", *SHAPES[2]))
    layer = RowLayer(o, gate_up, down, qkv, NORM, NORM)
    assert fits_row_layer(layer, torch.bfloat16, CPU)
    assert fits_row_layer(replace(layer, qkv=None, next_norm=None), torch.bfloat16, CPU)
    for changes in ({"down": other}, {"o": qkv}, {"qkv": down}, {"gate_up": o}):
        assert not fits_row_layer(replace(layer, **changes), torch.bfloat16, CPU), changes
