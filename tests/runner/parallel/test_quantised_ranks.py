"""Ranks hold their parts of quantised matrices in the stored format, and read no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from slipstream.configs.schema import ModelConfig
from slipstream.kernels.cpu import weight
from slipstream.kernels.cpu.formats import WEIGHT_TYPES, StoredRows
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.kernels.quant.part import columns_of, rows_of, with_empty_rows
from slipstream.runner.loading import file_reader
from slipstream.runner.loading.gguf_weights import GGUFFile
from slipstream.runner.loading.matching import slots_of_one_form
from slipstream.runner.loading.quantised.parts import Parts
from slipstream.runner.loading.quantised.read import read_matrix
from slipstream.runner.loading.safetensors_weights import SafetensorsCheckpoint
from slipstream.runner.loading.weights import (
    ResolvedModel,
    load_weights,
    resolve_model,
    stated_quantisation,
)
from slipstream.runner.models.formats.expert_stack import ExpertStack
from slipstream.runner.models.formats.weight_format import (
    WeightFormat,
    resolve_format,
    split_format,
)
from slipstream.runner.models.layers import Linear
from slipstream.runner.models.registry import build_model
from slipstream.runner.parallel.ranks import Cut, Ranks

from ...cases import some
from ..loading.quantised.quantised_folder import quantise
from ..loading.quantised.stored_formats import FORMATS, tensors_of
from ..loading.test_gguf_weights import EXPERTS as GGUF_EXPERTS
from ..loading.test_gguf_weights import make_oracle, write_gguf
from ..model_harness import CPU, Sequences
from ..models.test_qwen3_5 import SHAPE as DELTA_SHAPE
from .threads import on_ranks

SHAPE: dict[str, Any] = dict(
    vocab_size=97, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    tie_word_embeddings=False,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen3": {},
    "Gemma3": {"tie_word_embeddings": True},
    "Phi3": {"pad_token_id": None},
    "DeepseekV3": dict(
        moe_intermediate_size=64, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, head_dim=8, v_head_dim=16, n_group=2, topk_group=1,
    ),
    "Qwen3_5": DELTA_SHAPE | {"vocab_size": 97, "intermediate_size": 128},
}  # fmt: skip
CASES = [(family, name) for name in FORMATS for family in FAMILIES]
FEW = [
    *(("Llama", name) for name in ("fp8 blocks", "int4 zeros", "gptq order", "nvfp4")),
    *(("Qwen3", name) for name in ("fp8 channel", "awq")),
    *(("Gemma3", name) for name in ("int4 groups",)),
    *(("Phi3", name) for name in ("gptq",)),
    *(("DeepseekV3", name) for name in ("fp8 blocks, ModelOpt", "mxfp4")),
    ("Qwen3_5", "int8 groups"),
]


def make(folder: Path, family: str, name: str, form: str = "stacked") -> ResolvedModel:
    """A random model with matrices of this format; `form` is that of its experts."""
    kind = "TextConfig" if family in ("Gemma3", "Qwen3_5") else "Config"
    config = getattr(transformers, family + kind)(**{**SHAPE, **FAMILIES[family]})
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(folder)
    slots = build_model(
        config, WeightFormat(torch.device("meta"), torch.float32)
    ).checkpoint_slots()
    given = [key for key, slot in slots.items() if slot.form and slot.form[1] == form]
    slots = slots_of_one_form(slots, given)
    stored = {}
    for key, slot in slots.items():
        if not slot.optional:
            generator = torch.Generator().manual_seed(crc32(key.encode()))
            stored[key] = torch.randn(slot.shape, generator=generator) * 0.3
    save_file(stored, folder / "model.safetensors")
    quantise(folder, name)
    return resolve_model(ModelConfig(model=str(folder)))


def build(resolved: ResolvedModel, ranks: Ranks | None, dtype: str = "float32") -> Any:
    fmt = resolve_format(dtype, CPU, None)
    fmt = split_format(replace(fmt, packed=dtype == "float32", pack_fp16=False), ranks)
    kinds = {"native": fmt.native, "packed": fmt.packed}
    return build_model(resolved.hf_config, WeightFormat(CPU, fmt.dtype, ranks=ranks, **kinds))


def counted(checkpoint: Any, read: dict[int, int], rank: int) -> Any:
    """The checkpoint, which adds the bytes that are read to `read`."""
    tensors = checkpoint.tensors

    def count(name: str, num_bytes: int) -> None:
        read[rank] += num_bytes

    checkpoint.tensors = lambda *args: tensors(count)
    return checkpoint


def logits_of(model: Any) -> torch.Tensor:
    sequences = Sequences(model, 2, 16, block_size=8)
    steps = [[(0, [5, 9, 33, 2, 41]), (1, [7, 7])], [(0, [3]), (1, [60, 12])]]
    return torch.cat([rows for step in steps for rows in sequences.step(step)[0]])


@pytest.mark.parametrize(("family", "name"), some(CASES, FEW), ids=str)
def test_two_ranks_compute_what_one_computes_from_packed_parts(
    family: str, name: str, tmp_path: Path
) -> None:
    resolved = make(tmp_path, family, name)
    whole = build(resolved, None)
    load_weights(whole, resolved)
    expected, read = logits_of(whole), {0: 0, 1: 0}

    def run(ranks: Ranks) -> tuple[torch.Tensor, dict[str, Any]]:
        model = build(resolved, ranks)
        checkpoint = SafetensorsCheckpoint(tmp_path, resolved.quantisation)
        load_weights(model, replace(resolved, opened=counted(checkpoint, read, ranks.rank)))
        linears = {p: m for p, m in model.named_modules() if isinstance(m, Linear)}
        return logits_of(model), linears

    (logits, linears), (other, _) = on_ranks(2, run)
    assert torch.equal(logits, other)
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=3e-4)
    kept = {path for path, m in linears.items() if m.packed is not None}
    were = {p for p, m in whole.named_modules() if isinstance(m, Linear) and m.packed is not None}
    by_inputs = ("o_proj", "out_proj", "down_proj")
    lost = {path for path in were - kept if "order" in name and path.endswith(by_inputs)}
    assert kept == were - lost and kept
    if lost:  # whose groups are of features of both ranks
        return
    total = (tmp_path / "model.safetensors").stat().st_size
    shared = total if family == "DeepseekV3" else 0.75 * total  # many small whole tensors
    assert all(size < shared for size in read.values()), (read, total)
    for path, module in linears.items():
        if path in kept and path.endswith(("mlp.gate_up_proj", "mlp.down_proj")):
            both = whole.get_submodule(path)
            halves = sum(part.nbytes for part in module.packed.parts)
            assert halves < 0.6 * sum(part.nbytes for part in both.packed.parts), path


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("name", some(("fp8 blocks", "int4 zeros", "nvfp4"), ("fp8 blocks",)))
def test_ranks_keep_their_parts_of_quantised_experts(
    name: str, by_expert: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    monkeypatch.setitem(FAMILIES, "Qwen3Moe", experts)
    resolved = make(tmp_path, "Qwen3Moe", name, "matrices")
    whole = build(resolved, None)
    load_weights(whole, resolved)
    expected = logits_of(whole)

    def run(ranks: Ranks) -> tuple[torch.Tensor, list[int]]:
        model = build(resolved, replace(ranks, by_expert=by_expert))
        load_weights(model, resolved)
        return logits_of(model), sizes_of(model)

    def sizes_of(model: Any) -> list[int]:
        stacks = [part for part in model.modules() if isinstance(part, ExpertStack)]
        return [part.packed.weight.nbytes for part in stacks if part.packed is not None]

    (logits, sizes), (other, _) = on_ranks(2, run)
    assert torch.equal(logits, other)
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=3e-4)
    assert len(sizes) == 4  # of a stack, a rank holds half, and scales of blocks that it cuts
    assert all(2 * own <= 1.3 * both for own, both in zip(sizes, sizes_of(whole), strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_every_format_are_read_alone(
    name: str, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both readers, and with the same numbers as a part of the whole matrix."""
    monkeypatch.setattr(file_reader, "_MIN_ROW_BYTES", 1)
    made, shape = FORMATS[name], (256, 512)
    fields, numbers = made.write(np.random.default_rng(0), *shape)
    save_file(
        {f"m.{leaf}": field for leaf, field in tensors_of(fields).items()},
        tmp_path / "model.safetensors",
    )
    quantisation = stated_quantisation({"quantization_config": made.config}, "test")
    total = (256, 512)[dim]
    for start, stop in ((0, total // 2), (total // 2, total)):
        wanted = torch.from_numpy(np.ascontiguousarray(numbers)).narrow(dim, start, stop - start)
        for device in (None, CPU):
            checkpoint = SafetensorsCheckpoint(tmp_path, quantisation, device)
            whole = sum(checkpoint.sizes().values())
            checkpoint.keep_parts({"m.weight": (shape, Cut(dim, start, stop))})
            read = [0]

            def count(name: str, num_bytes: int, read: list[int] = read) -> None:
                read[0] += num_bytes

            found = checkpoint.tensors(count) if device is None else checkpoint._read(CPU, count)
            ((_, got),) = found
            assert isinstance(got, PackedWeight)
            if dim and "order" in name:  # a part is taken when the order is known
                assert got.shape == shape and columns_of(got, start, stop) is None
                continue
            assert got.shape == wanted.shape
            torch.testing.assert_close(got.dequantise(), wanted, rtol=1e-6, atol=1e-7)
            assert read[0] <= 0.5 * whole + 4 * sum(shape), (read, whole)


@pytest.mark.parametrize("group", [32, 128])
def test_larger_groups_are_split_where_a_part_ends(group: int) -> None:
    made = FORMATS["int4 zeros" if group == 32 else "fp8 blocks"]
    fields, _ = made.write(np.random.default_rng(1), 192, 512)
    quantisation = stated_quantisation({"quantization_config": made.config}, "test")
    weight = read_matrix(Parts("m.weight", "test", tensors_of(fields), quantisation))
    numbers, border = weight.dequantise(), 256 + group // 2
    for start, stop in ((0, border), (border, 512)):
        part = columns_of(weight, start, stop)
        assert part is not None and part.group == group // 2
        assert torch.equal(part.dequantise(), numbers[:, start:stop])
    assert columns_of(weight, 3, 512) is None
    rows = rows_of(weight, [(0, 50), (100, 192)])
    assert torch.equal(rows.dequantise(), torch.cat((numbers[:50], numbers[100:])))
    filled = with_empty_rows(rows, 150).dequantise()
    assert torch.equal(filled[:142], rows.dequantise()) and not filled[142:].any()


def checkpoint_size(file: GGUFFile) -> int:
    """The bytes of what a rank wants, of which progress is a share."""
    return sum(file.sizes().values())


@pytest.mark.skipif(not weight.available(), reason="no native CPU kernels on this machine")
@pytest.mark.parametrize("tied", [True, False])
def test_native_cpu_kernels_multiply_parts_of_a_gguf_file(tied: bool, tmp_path: Path) -> None:
    oracle = make_oracle("Llama", tie_word_embeddings=tied)
    path, read = tmp_path / "model.gguf", {0: 0, 1: 0}
    write_gguf(path, "llama", oracle, ["Q8_0", "F16", "Q4_0", "Q4_1", "BF16", "Q5_0", "Q5_1"])
    resolved = resolve_model(ModelConfig(model=str(path)))
    whole = build(resolved, None, "auto")
    load_weights(whole, resolved)
    expected = logits_of(whole)

    def run(ranks: Ranks) -> tuple[torch.Tensor, int]:
        model = build(resolved, ranks, "auto")
        file = counted(GGUFFile(path), read, ranks.rank)
        load_weights(model, replace(resolved, opened=file))
        assert all(m.matrix is not None for m in model.modules() if isinstance(m, Linear))
        assert checkpoint_size(file) < 0.6 * path.stat().st_size
        linears = [m for m in model.modules() if isinstance(m, Linear)]
        return logits_of(model), sum(m.matrix.nbytes for m in linears)

    (logits, size), (other, _) = on_ranks(2, run)
    assert torch.equal(logits, other)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
    everything = sum(m.matrix.nbytes for m in whole.modules() if isinstance(m, Linear))
    assert size < 0.7 * everything
    assert all(size < 0.6 * path.stat().st_size for size in read.values())


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_ranks_share_the_experts_of_a_gguf_file(
    dtype: str, by_expert: bool, tmp_path: Path
) -> None:
    oracle = make_oracle("Qwen3Moe", **GGUF_EXPERTS, head_dim=32, norm_topk_prob=True)
    path, read = tmp_path / "model.gguf", {0: 0, 1: 0}
    write_gguf(path, "qwen3moe", oracle, ["Q8_0", "Q4_0"])
    resolved = resolve_model(ModelConfig(model=str(path)))
    whole = build(resolved, None, dtype)
    load_weights(whole, resolved)
    expected = logits_of(whole)

    def run(ranks: Ranks) -> torch.Tensor:
        model = build(resolved, replace(ranks, by_expert=by_expert), dtype)
        file = counted(GGUFFile(path), read, ranks.rank)
        load_weights(model, replace(resolved, opened=file))
        return logits_of(model)

    logits, other = on_ranks(2, run)
    assert torch.equal(logits, other)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
    assert all(size < 0.75 * path.stat().st_size for size in read.values())


def test_stored_rows_are_cut_between_blocks() -> None:
    from slipstream.kernels.cpu.formats import columns_of as stored_columns
    from slipstream.kernels.cpu.formats import rows_of as stored_rows
    from slipstream.runner.loading.gguf_values import values_of

    rng = np.random.default_rng(0)
    data = rng.integers(0, 100, (6, 2 * 144), dtype=np.uint8)
    rows = StoredRows(WEIGHT_TYPES["Q4_K"], data, 512, np.array([3, 1, 0, 5, 4, 2]))
    numbers = values_of(rows)
    assert stored_columns(rows, 0, 128) is None
    half = stored_columns(rows, 256, 512)
    assert half is not None and torch.equal(values_of(half), numbers[:, 256:])
    both = stored_rows(rows, [(1, 2), (4, 6)])
    assert torch.equal(values_of(both), numbers[[1, 4, 5]])


@pytest.mark.parametrize("by_expert", [True, False])
def test_nothing_is_read_of_the_experts_of_other_ranks(by_expert: bool, tmp_path: Path) -> None:
    resolved = make(tmp_path, "DeepseekV3", "fp8 blocks", "matrices")
    whole = build(resolved, None)
    load_weights(whole, resolved)

    def run(ranks: Ranks) -> tuple[torch.Tensor, dict[str, int]]:
        model, read = build(resolved, replace(ranks, by_expert=by_expert)), Counter[str]()
        checkpoint = SafetensorsCheckpoint(tmp_path, resolved.quantisation)
        tensors = checkpoint.tensors

        def count(name: str, num_bytes: int) -> None:
            if ".experts." in name and num_bytes:
                read[name.split(".experts.")[1]] += num_bytes

        checkpoint.tensors = lambda *args: tensors(count)  # type: ignore[method-assign]
        load_weights(model, replace(resolved, opened=checkpoint))
        return logits_of(model), read

    (logits, first), (_, second) = on_ranks(2, run)
    torch.testing.assert_close(logits, logits_of(whole), atol=3e-4, rtol=3e-4)
    experts = [{int(name.split(".")[0]) for name in read} for read in (first, second)]
    assert experts == ([{0, 1}, {2, 3}] if by_expert else [{0, 1, 2, 3}] * 2)
    each = {first["0.gate_proj.weight"], first["0.down_proj.weight"]}
    size = 64 * 64 if by_expert else 64 * 32
    assert all(size < one < size + 64 for one in each)
