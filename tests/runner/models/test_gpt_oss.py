"""gpt-oss equals transformers on tiny random models, with experts as matrices and as MXFP4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.configs.schema import ModelConfig
from slipstream.kernels.cpu import weight as native
from slipstream.kernels.packed import experts as packed_experts
from slipstream.kernels.quant.tiled import TiledWeight
from slipstream.runner.attention.choice import UnusableBackend, choose_backend
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.model_check import outline_model, weight_bytes
from slipstream.runner.loading.safetensors_weights import SafetensorsCheckpoint
from slipstream.runner.loading.weights import load_weights, resolve_model
from slipstream.runner.models.formats import expert_stack
from slipstream.runner.models.formats.expert_stack import ExpertStack
from slipstream.runner.models.formats.weight_format import WeightFormat, resolve_format
from slipstream.runner.models.registry import build_model
from slipstream.runner.models.rotary import inverse_frequencies, rope_parameters
from slipstream.runner.parallel.collectives import Collectives
from slipstream.runner.parallel.expert_loads import find_loads
from slipstream.runner.parallel.experts import ExpertRanks, RowExchange, padded_counts
from slipstream.runner.parallel.ranks import Ranks

from ...cases import some
from ..model_harness import CPU, Sequences, assert_equals_transformers, load
from ..parallel.gloo import on_gloo
from ..parallel.threads import on_ranks

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=6,
    max_position_embeddings=512,
    rope_parameters=YARN,
)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def make_oracle(folder: Path, mxfp4: bool = False) -> Any:
    """A random model, saved to `folder`; with `mxfp4` its experts are such numbers exactly."""
    torch.manual_seed(1)
    config = transformers.GptOssConfig(**SHAPE)
    config._attn_implementation = "eager"
    oracle = transformers.GptOssForCausalLM(config).eval()
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            scale = 2.0 if name.endswith(("sinks", "_bias")) else 0.1  # some gates reach the clamp
            parameter.add_(torch.randn_like(parameter) * scale)
            parameter.copy_(parameter.half())  # a CPU keeps these weights as fp16
            if mxfp4 and name.endswith(("gate_up_proj", "down_proj")):
                experts, columns, rows = parameter.shape
                blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
                scales = torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8)
                parameter.copy_(written_out(blocks, scales).transpose(1, 2))
                stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    oracle.save_pretrained(folder)
    if mxfp4:
        path = folder / "model.safetensors"
        kept = {n: t for n, t in load_file(path).items() if f"{n}_blocks" not in stored}
        save_file(kept | stored, path, {"format": "pt"})
        state_quantisation(folder)
    return oracle


def state_quantisation(folder: Path) -> None:
    """Add what the released configs say about their numbers."""
    raw = json.loads((folder / "config.json").read_text())
    left_out = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens")
    raw["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*left_out, "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(raw))


def written_out(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of MXFP4 blocks, one byte after the other."""
    numbers = []
    for row, scale in zip(blocks.reshape(-1, 16).tolist(), scales.flatten().tolist(), strict=True):
        for byte in row:
            for code in (byte % 16, byte // 16):
                sign = -1 if code >= 8 else 1
                numbers.append(sign * E2M1[code % 8] * 2.0 ** (scale - 127))
    return torch.tensor(numbers).view(*scales.shape[:2], -1)


@pytest.mark.parametrize("mxfp4", [False, True])
def test_logits_equal_transformers(mxfp4: bool, tmp_path: Path) -> None:
    oracle = make_oracle(tmp_path, mxfp4)
    assert_equals_transformers(load(tmp_path), oracle)


@pytest.mark.skipif(not native.available(), reason="no native CPU kernels on this machine")
def test_native_weights_beside_experts(tmp_path: Path) -> None:
    oracle = make_oracle(tmp_path)
    assert_equals_transformers(load(tmp_path, "auto"), oracle)


@pytest.mark.parametrize(
    ("narrow", "size"), some([(False, 32), (True, 64), (True, 32)], [(True, 64), (True, 32)])
)
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about overflow
def test_experts_that_stay_packed(
    narrow: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of MXFP4, interpreted, behind the loader; torch computes the rest. The kernels for
    Hopper know no 32 features, for which both stacks have the form for the other kernel."""
    from slipstream.kernels.packed.triton import packed_experts as kernels

    monkeypatch.setattr(expert_stack, "NARROW", narrow)
    monkeypatch.setitem(SHAPE, "intermediate_size", size)
    make_oracle(tmp_path, mxfp4=True)
    rows = [(0, [5, 9, 33]), (1, [71])]
    expected = Sequences(load(tmp_path), 2, 8).step(rows)[0]
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")  # codes become words
    resolved = resolve_model(ModelConfig(model=str(tmp_path)))
    model = build_model(resolved.hf_config, WeightFormat(CPU, torch.float32, packed=True))
    load_weights(model, resolved)
    experts = model.layers[0].mlp.experts
    for stack in (experts.gate_up, experts.down):
        assert isinstance(stack.packed.weight, TiledWeight)
        assert (stack.packed.weight.factors is not None) == (narrow and size == 64)
        assert sum(tensor.nbytes for tensor in stack.buffers()) == stack.expected_bytes
    monkeypatch.setenv("SLIPSTREAM_TRITON", "0")
    monkeypatch.setattr(packed_experts, "_has_kernels", lambda x, experts: True)
    monkeypatch.setattr(kernels, "_FEW_PROGRAMS", 0)  # larger tiles, which are fewer to interpret
    got = Sequences(model, 2, 8).step(rows)[0]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("size", [64, 96])
def test_ranks_keep_their_parts_of_mxfp4(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 96 features, a rank's part ends inside a block, so that both stacks are widened."""
    monkeypatch.setitem(SHAPE, "intermediate_size", size)
    make_oracle(tmp_path, mxfp4=True)
    rows = [(0, [5, 9, 33]), (1, [71])]
    expected = Sequences(load(tmp_path), 2, 8).step(rows)[0]
    resolved = resolve_model(ModelConfig(model=str(tmp_path)))

    def run(ranks: Ranks) -> tuple[list[Tensor], bool]:
        model = build_model(
            resolved.hf_config, WeightFormat(CPU, torch.float32, packed=True, ranks=ranks)
        )
        load_weights(model, resolved)
        logits = Sequences(model, 2, 8).step(rows)[0]
        return logits, model.layers[0].mlp.experts.down.packed is not None

    for logits, is_packed in on_ranks(2, run):
        assert is_packed == (size == 64)
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mxfp4", [False, True])
def test_ranks_read_and_hold_whole_experts(mxfp4: bool, tmp_path: Path) -> None:
    """With `--enable-expert-parallel`, of stacks and biases each rank reads its experts' half."""
    make_oracle(tmp_path, mxfp4)
    rows = [(0, [5, 9, 33]), (1, [71])]
    expected = Sequences(load(tmp_path), 2, 8).step(rows)[0]
    resolved = resolve_model(ModelConfig(model=str(tmp_path)))
    stored = load_file(tmp_path / "model.safetensors").items()
    total = sum(tensor.nbytes for name, tensor in stored if ".experts." in name)

    def run(ranks: Ranks) -> tuple[list[Tensor], int, bool, int]:
        ranks = replace(ranks, by_expert=True)
        model = build_model(
            resolved.hf_config, WeightFormat(CPU, torch.float32, packed=True, ranks=ranks)
        )
        checkpoint, read = SafetensorsCheckpoint(tmp_path, None), 0
        tensors = checkpoint.tensors

        def counted(*args: Any) -> Iterator[tuple[str, Any]]:
            nonlocal read
            for name, tensor in tensors(*args):
                read += tensor.nbytes if ".experts." in name else 0
                yield name, tensor

        checkpoint.tensors = counted  # type: ignore[method-assign]
        load_weights(model, replace(resolved, opened=checkpoint))
        experts = model.layers[0].mlp.experts
        is_packed = experts.gate_up.packed is not None and experts.down.packed is not None
        return Sequences(model, 2, 8).step(rows)[0], read, is_packed, experts.down_bias.shape[0]

    for logits, read, is_packed, count in on_ranks(2, run):
        assert (read, is_packed, count) == (total // 2, mxfp4, 2)
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("all_to_all", [False, True])
def test_engines_share_experts_in_mxfp4(all_to_all: bool, tmp_path: Path) -> None:
    """Two engines with different numbers of rows, and the loads of the experts of each."""
    make_oracle(tmp_path, mxfp4=True)
    rows = [[(0, [5, 9, 33]), (1, [71])], [(0, [12])]]  # of each engine
    whole = load(tmp_path)
    expected = [Sequences(whole, 2, 8).step(own)[0] for own in rows]
    resolved = resolve_model(ModelConfig(model=str(tmp_path)))

    def run(rank: int, collectives: Collectives) -> tuple[list[Tensor], list[Tensor]]:
        exchange = RowExchange(collectives, 2, CPU, all_to_all)
        experts = ExpertRanks(rank, 2, exchange, rank)
        model = build_model(
            resolved.hf_config, WeightFormat(CPU, torch.float32, packed=True, experts=experts)
        )
        load_weights(model, resolved)
        exchange.begin_step(4, 4, padded_counts([4, 1], [4, 1]), has_graphs=False)
        logits = Sequences(model, 2, 8).step(rows[rank])[0]
        found = find_loads(model)
        assert found is not None
        return logits, found._layers

    (first, own), (second, others) = on_gloo([range(2)], run)
    for ours, theirs in zip((*first, *second), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    for one, other in zip(own, others, strict=True):  # two of four experts for each of five rows
        assert one[0] == other[1:].sum() and other[0] == one[1:].sum() and one.sum() == 2 * 5


def test_windows_alternate_and_every_layer_has_sinks(tmp_path: Path) -> None:
    make_oracle(tmp_path)
    layers = load(tmp_path).attention_layers()
    assert [layer.sliding_window for layer in layers] == [6, None, 6]
    stored = load_file(tmp_path / "model.safetensors")
    for index, layer in enumerate(layers):
        assert layer.sinks is not None
        assert torch.equal(layer.sinks, stored[f"model.layers.{index}.self_attn.sinks"].float())


@pytest.mark.parametrize("name", ["flashinfer", "flash_mla"])
def test_attention_without_sinks_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make_oracle(tmp_path)
    layers = load(tmp_path).attention_layers()
    with pytest.raises(UnusableBackend, match=f"--attention-backend {name} cannot be used"):
        choose_backend(name, layers, CPU)
    if name == "flashinfer":
        with pytest.raises(UnusableBackend, match="does not support attention sinks; use triton"):
            choose_backend(name, layers, CPU)


def test_yarn_of_the_released_models_does_not_round_its_range() -> None:
    """Frequencies and temperature for heads of 64, written out from the paper's formulas."""
    rope = rope_parameters(transformers.GptOssConfig())
    frequencies, factor = inverse_frequencies(rope, 64)
    assert factor == pytest.approx(0.1 * torch.tensor(32.0).log().item() + 1)
    base = torch.log(torch.tensor(150000.0)).item()

    def dim_of(turns: float) -> float:
        return 64 * torch.log(torch.tensor(4096 / (turns * 2 * torch.pi))).item() / (2 * base)

    low, high = dim_of(32), dim_of(1)
    assert low % 1 and high % 1
    for index in range(32):
        plain = 150000.0 ** (-2 * index / 64)
        share = min(max((index - low) / (high - low), 0), 1)
        expected = plain * (1 - share) + plain / 32 * share
        assert frequencies[index].item() == pytest.approx(expected, rel=1e-5)


def test_half_of_the_experts_is_refused(tmp_path: Path) -> None:
    make_oracle(tmp_path, mxfp4=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.down_proj_scales"
    save_file({n: t for n, t in tensors.items() if n != name}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"lacks tensors: {name}"):
        load(tmp_path)


def test_sizes_that_are_no_blocks_are_refused(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(**{**SHAPE, "intermediate_size": 40})
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="must be multiples of 32"):
        load(tmp_path, load_format="dummy")


def test_random_weights_from_a_config_alone(tmp_path: Path) -> None:
    make_oracle(tmp_path, mxfp4=True)
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, load_format="dummy")
    experts = model.layers[0].mlp.experts
    assert experts.gate_up.weight.std() > 0 and not experts.gate_up_bias.any()
    assert Sequences(model, 1, 8).step([(0, [4, 5])])[0][0].isfinite().all()


def test_random_weights_have_the_formats_of_the_config(tmp_path: Path) -> None:
    """Experts in MXFP4, and all that the config leaves out in 16 bits."""
    make_oracle(tmp_path, mxfp4=True)
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, packed=True, load_format="dummy")
    for layer in model.layers:
        assert layer.self_attn.qkv_proj.packed is None and layer.self_attn.o_proj.packed is None
        experts = layer.mlp.experts
        stacks = (experts.gate_up, experts.down)
        assert [stack.packed.weight.kind for stack in stacks] == ["fp4", "fp4"]
        numbers = experts.down.packed.weight.dequantise(torch.float32)
        assert 0.01 < float(numbers.std()) < 0.04
    assert Sequences(model, 1, 8).step([(0, [4, 5])])[0][0].isfinite().all()
    resolved = resolve_model(ModelConfig(model=str(tmp_path), load_format="dummy"))
    fmt = replace(resolve_format("float32", CPU, None), packed=True)
    held = sum(tensor.nbytes for tensor in {id(b): b for b in model.buffers()}.values())
    stacks = [part for part in model.modules() if isinstance(part, ExpertStack)]
    packed = sum(tensor.nbytes for stack in stacks for tensor in stack.buffers())
    padded = sum(stack.expected_bytes or 0 for stack in stacks)  # as a GPU's kernels read them
    counted = weight_bytes(outline_model(resolved, fmt, 512), resolved, fmt)
    assert counted == held - packed + padded
