"""Every format of quantised checkpoints stands for the numbers that NumPy reads, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.configs.model.quantisation import parse_quantisation
from slipstream.kernels.cpu.weight import QuantizedWeight, available
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.gguf_values import values_of
from slipstream.runner.loading.quantised.parts import Parts, group_names
from slipstream.runner.loading.quantised.read import read_matrix
from slipstream.runner.loading.quantised.rows import stored_rows_of

from .stored_formats import FORMATS, packed_integers, tensors_of

SIZES = [(1, 1), (131, 160), (24, 288)]


def written(name: str, rows: int, columns: int) -> tuple[Parts, torch.Tensor]:
    """A matrix of this format and about this size, and its numbers."""
    made = FORMATS[name]
    rows = -(-rows // made.row_divisor) * made.row_divisor
    columns = -(-columns // made.divisor) * made.divisor
    fields, numbers = made.write(np.random.default_rng(rows), rows, columns)
    said = parse_quantisation({"quantization_config": made.config})
    parts = Parts("model.q_proj.weight", "a folder", tensors_of(fields), said)
    return parts, torch.from_numpy(np.ascontiguousarray(numbers))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_numbers_are_exact(name: str, size: tuple[int, int]) -> None:
    parts, numbers = written(name, *size)
    weight = read_matrix(parts)
    assert weight.shape == tuple(numbers.shape)
    assert torch.equal(weight.dequantise(), numbers)
    assert all(tensor.is_contiguous() for tensor in weight.tensors)
    stated = parts.scheme
    assert stated is not None and stated.kind == weight.kind
    assert weight.activations == stated.activations
    assert (weight.input_scale is not None) == (weight.activations == "fp8-static")


@pytest.mark.parametrize("name", FORMATS)
def test_outlines_have_the_form_of_the_matrix(name: str) -> None:
    parts, _ = written(name, 24, 64)
    real = read_matrix(parts)
    metas = {
        leaf: tensor if leaf == "weight_shape" else tensor.to("meta")
        for leaf, tensor in parts.tensors.items()
    }
    outline = read_matrix(Parts(parts.name, parts.source, metas, parts.quantisation))
    assert outline.device.type == "meta" and outline.nbytes == real.nbytes
    kinds = [[(tensor.shape, tensor.dtype) for tensor in w.tensors] for w in (outline, real)]
    assert kinds[0] == kinds[1]


def test_zero_points_count_even_where_the_config_denies_them() -> None:
    parts, numbers = written("gptq zeros", 24, 64)
    said = parse_quantisation({"quantization_config": FORMATS["gptq zeros"].config | {"sym": True}})
    parts = Parts(parts.name, parts.source, parts.tensors, said)
    assert parts.scheme is not None and parts.scheme.symmetric
    assert torch.equal(read_matrix(parts).dequantise(), numbers)


def test_rows_of_any_number_may_have_zero_points() -> None:
    fields, numbers = packed_integers(4, 32, False)(np.random.default_rng(5), 13, 32)
    weight = read_matrix(Parts("a.weight", "a folder", tensors_of(fields)))
    assert torch.equal(weight.dequantise(), torch.from_numpy(numbers))


@pytest.mark.parametrize("name", FORMATS)
def test_every_stored_tensor_is_needed_and_checked(name: str) -> None:
    """Without one of them, or with another shape or type of it, there is a sentence."""
    parts, numbers = written(name, 24, 64)
    optional = {"input_scale", "g_idx", "weight_g_idx", "weight_zero_point", "qzeros"}
    for leaf, tensor in parts.tensors.items():
        others = {other: t for other, t in parts.tensors.items() if other != leaf}
        spoilt = [others | {leaf: tensor.to(torch.complex64)}]
        if leaf not in ("weight", "weight_packed", "qweight"):  # whose shapes slots check
            if tensor.dim() == 2 and min(tensor.shape) > 2:
                spoilt += [others | {leaf: tensor[:-1]}, others | {leaf: tensor[:, :-1]}]
            if leaf not in optional:
                spoilt.append(others)
        for tensors in spoilt:
            changed = Parts(parts.name, parts.source, tensors, parts.quantisation)
            with pytest.raises(ModelLoadError, match="tensor model.q_proj.weight of a folder"):
                read_matrix(changed)
                pytest.fail(f"{leaf} was not checked")
    assert numbers.isfinite().all()


def test_groups_of_other_sizes_are_refused() -> None:
    fields, _ = packed_integers(4, 8)(np.random.default_rng(5), 4, 64)
    with pytest.raises(ModelLoadError, match="8 scales for 64 columns, but supported groups have"):
        read_matrix(Parts("a.weight", "a folder", tensors_of(fields)))


def test_an_order_with_unequal_groups_is_refused() -> None:
    parts, _ = written("gptq order", 8, 64)
    parts.tensors["g_idx"] = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ModelLoadError, match="g_idx whose groups do not have 32 columns each"):
        read_matrix(parts)


def test_a_qweight_needs_a_config() -> None:
    parts, _ = written("gptq", 8, 32)
    with pytest.raises(ModelLoadError, match="quant_method is not awq or gptq"):
        read_matrix(Parts(parts.name, parts.source, parts.tensors))


def test_names_group_what_belongs_together() -> None:
    found = group_names(
        ["a.q.weight", "a.q.weight_scale", "a.q.input_scale", "a.q.bias", "a.k.weight"]
        + ["a.k.input_scale", "a.v.qweight", "a.v.qzeros", "a.v.scales", "a.v.bias", "a.k_scale"]
        + ["a.v.v_scale", "norm.weight", "b.weight_scale", "table"]
    )
    assert found.names == [
        *("a.q.weight", "a.q.bias", "a.k.weight", "a.v.weight", "a.v.bias", "norm.weight"),
        *("b.weight_scale", "table"),
    ]
    assert found.quantised["a.q.weight"] == {
        leaf: f"a.q.{leaf}" for leaf in ("weight", "weight_scale", "input_scale")
    }
    assert found.spare == {"a.v.bias"} and found.cache_scales == ["a.k_scale", "a.v.v_scale"]


EXACT = {"int8 channel", "int4 groups", "int4 channel", "int8 groups", "gptq", "gptq channel"}


@pytest.mark.parametrize("name", FORMATS)
def test_native_kernels_take_what_they_can_hold(name: str) -> None:
    parts, numbers = written(name, 24, 96)
    weight = read_matrix(parts)
    rows = stored_rows_of(weight)
    assert (rows is not None) == (name in EXACT)
    if rows is not None:
        assert torch.equal(values_of(rows), numbers)
        if available():
            assert torch.equal(QuantizedWeight.pack(rows).dequantize(), numbers)


def test_zero_points_become_minima_only_if_exact() -> None:
    values, zeros = torch.arange(32, dtype=torch.uint8).view(2, 16), torch.tensor([[3], [5]])

    def weight(scale: float) -> PackedWeight:
        scales = torch.full((2, 1), scale)
        return PackedWeight("int4", values, scales, 32, 32, zeros=zeros.to(torch.uint8))

    rows = stored_rows_of(weight(0.25))
    assert rows is not None and rows.type.name == "Q4_1"
    assert torch.equal(values_of(rows), weight(0.25).dequantise())
    assert stored_rows_of(weight(float(torch.tensor(0.1).half()))) is None
