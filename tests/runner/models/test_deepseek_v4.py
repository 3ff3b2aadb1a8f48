"""DeepSeek V4 equals transformers on tiny random models with every kind of layer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.configs.schema import ModelConfig
from slipstream.kernels.attention.compressed.pages import Pages
from slipstream.kernels.cpu import weight as native
from slipstream.kernels.quant.latent_pages import pack_row, unpack_row
from slipstream.runner.attention.fp8_layers import with_fp8_cache
from slipstream.runner.attention.triton import TritonBackend
from slipstream.runner.batch.kv_cache import KVLayout, StepLoad, fitting_block_size
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.weights import load_weights, resolve_model
from slipstream.runner.models.deepseek_v4 import attention
from slipstream.runner.models.deepseek_v4.model import plain_name
from slipstream.runner.models.deepseek_v4.moe import Gate
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model
from slipstream.runner.models.short_model import short_blocks
from slipstream.runner.parallel.ranks import Ranks

from ..model_harness import CPU, Sequences, assert_equals_transformers, load
from ..parallel.threads import on_ranks
from ..tiny_v4 import INDEXED, PLAIN, RAW, SHAPE, VOCAB, make_v4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v4")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make_v4(folder)


def expected_logits(oracle: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([ids])).logits[0]
    return logits


def test_logits_equal_transformers(folder: Path, oracle: Any) -> None:
    assert_equals_transformers(load(folder), oracle, block_size=8)


def test_chunks_that_end_at_every_place_in_a_window(folder: Path, oracle: Any) -> None:
    """Prompts far beyond the sliding window, cut at random; the last tokens come one by one."""
    model = load(folder)
    lengths = [41, 42, 43, 44, 45, 46, 47, 48]
    ids = torch.randint(0, VOCAB, (8, 48), generator=torch.Generator().manual_seed(3)).tolist()
    expected = [expected_logits(oracle, row[:n]) for row, n in zip(ids, lengths, strict=True)]
    sequences = Sequences(model, len(ids), 64, block_size=8)
    got: list[list[Tensor]] = [[] for _ in ids]
    rng = random.Random(0)
    left = dict(enumerate(lengths))
    while left:
        counts = {
            req: min(n, 1 if n < 6 else rng.choice([1, 2, 3, 5, 9, 14])) for req, n in left.items()
        }
        step = []
        for req, count in counts.items():
            at = lengths[req] - left[req]
            step.append((req, ids[req][at : at + count]))
        for (req, _), logits in zip(step, sequences.step(step)[0], strict=True):
            got[req].append(logits)
        left = {req: n - counts[req] for req, n in left.items() if n > counts[req]}
    for parts, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), reference, atol=1e-4, rtol=1e-4)


def test_rejected_drafts_leave_nothing_behind(folder: Path, oracle: Any) -> None:
    """At every offset in the windows, wrong tokens are computed and then replaced."""
    model = load(folder)
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = expected_logits(oracle, ids)
    sequences = Sequences(model, 1, 64, block_size=8)
    got = [sequences.step([(0, ids[:13])])[0][0]]
    for at in range(13, len(ids)):
        wrong = [(token + 1) % VOCAB for token in ids[at + 1 : at + 1 + at % 4 + 1]]
        got.append(sequences.step([(0, [ids[at], *wrong])])[0][0][:1])
        sequences.lengths[0] = at + 1
    torch.testing.assert_close(torch.cat(got), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"scoring_func": "sigmoid", "mlp_layer_types": ["moe"] * 4},
        {"layer_types": [RAW] * 4, "rope_parameters": None},
        {"compress_rates": {INDEXED: 2, PLAIN: 16}, "hc_mult": 2, "hc_sinkhorn_iters": 3},
    ],
    ids=["sigmoid", "raw", "ratios"],
)
def test_other_shapes(changes: dict[str, Any], tmp_path: Path) -> None:
    oracle = make_v4(tmp_path, **changes)
    assert_equals_transformers(load(tmp_path), oracle, block_size=16)


def test_the_names_of_transformers(folder: Path, oracle: Any, tmp_path: Path) -> None:
    """Its own names, in which experts are stacked, give the same model."""
    tensors = {name: t.clone().contiguous() for name, t in oracle.state_dict().items()}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    ids = list(range(20))
    got, expected = (
        Sequences(load(path), 1, 32, block_size=8).step([(0, ids)])[0][0]
        for path in (tmp_path, folder)
    )
    assert torch.equal(got, expected)
    del tensors["model.layers.1.mlp.experts.down_proj"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lacks tensors: layers\.1\.ffn\.experts\.down_proj"):
        load(tmp_path)


E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantised(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix as DeepSeek stores it, and its numbers: experts in 4 bits, others as fp8 blocks."""
    rows, columns = weight.shape
    module = name.removesuffix(".weight")
    if ".experts." in name:
        scales = (weight.view(rows, -1, min(32, columns)).abs().amax(-1) / 6).log2().ceil().exp2()
        spread = scales.repeat_interleave(min(32, columns), 1)
        codes = (weight / spread)[..., None].sub(E2M1).abs().argmin(-1)
        stored = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
        numbers = E2M1[codes] * spread
    else:
        assert columns <= 128
        most = torch.stack([block.abs().max() for block in weight.split(128)])
        scales = (most / 448).log2().ceil().exp2().unsqueeze(1)
        spread = scales.repeat_interleave(128, 0)[:rows]
        stored = (weight / spread).to(torch.float8_e4m3fn)
        numbers = stored.float() * spread
    return {name: stored, f"{module}.scale": scales.to(torch.float8_e8m0fnu)}, numbers


def test_the_checkpoint_as_deepseek_stores_it(folder: Path, oracle: Any, tmp_path: Path) -> None:
    plain = {
        plain_name(name): tensor.clone()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    stored: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        is_dense = ".attn." in name and tensor.dim() == 2 and "wgate" not in name
        skipped = ("ape", "compressor.wkv.weight", "weights_proj.weight")
        if ".experts." in name or (is_dense and not name.endswith(skipped)):
            parts, plain[name] = quantised(name, tensor)
            stored |= parts
        else:
            stored[name] = tensor
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    logits = []
    for index, (tensors, more) in enumerate(
        ((stored, {"quantization_config": settings, "expert_dtype": "fp4"}), (plain, {}))
    ):
        own = tmp_path / str(index)
        own.mkdir()
        (own / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, own / "model.safetensors")
        model = load(own)
        logits.append(Sequences(model, 1, 32, block_size=8).step([(0, list(range(20)))])[0][0])
    assert torch.equal(*logits)

    def of_rank(ranks: Ranks) -> Tensor:
        resolved = resolve_model(ModelConfig(model=str(tmp_path / "0"), dtype="float32"))
        model = build_model(resolved.hf_config, WeightFormat(CPU, torch.float32, ranks=ranks))
        load_weights(model, resolved)
        return Sequences(model, 1, 32, block_size=8).step([(0, list(range(20)))])[0][0]

    for shared in on_ranks(2, of_rank):
        torch.testing.assert_close(shared, logits[1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "not supported with attention_bias"),
        ({"scoring_func": "relu"}, "scoring_func other than sqrtsoftplus, sigmoid, softmax"),
        ({"n_shared_experts": 2}, "n_shared_experts other than 1"),
        ({"num_experts_per_tok": 99}, "each token has 99 experts of"),
    ],
)
def test_what_is_not_supported_is_named(
    folder: Path, oracle: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, load_format="dummy")


def test_experts_of_token_ids_that_do_not_exist_are_refused(folder: Path, oracle: Any) -> None:
    model = load(folder)
    gate = next(m for m in model.modules() if isinstance(m, Gate) and m.tid2eid is not None)
    for expert in (-1, gate.weight.shape[0]):
        with pytest.raises(ModelLoadError, match=f"tid2eid names expert {expert}, but the layer"):
            gate._load_table(torch.full_like(gate.tid2eid, expert))


def test_a_short_pass_runs_one_block_of_each_kind_after_each_kind() -> None:
    kinds = [RAW, RAW, RAW, RAW, *[INDEXED, PLAIN] * 3]
    changes = {"num_hidden_layers": 10, "layer_types": kinds}
    experts = {"mlp_layer_types": ["hash_moe", *["moe"] * 9]}
    config = transformers.DeepseekV4Config(**SHAPE | changes | experts)
    model: Any = build_model(config, WeightFormat(torch.device("meta"), torch.bfloat16))
    left = [block is not model.skipped for block in short_blocks(model)]
    assert left == [True] * 3 + [False] + [True] * 3 + [False] * 3


@pytest.mark.skipif(not native.available(), reason="no native CPU kernels on this machine")
def test_native_weights(folder: Path, oracle: Any) -> None:
    model = load(folder, dtype="auto")
    assert model.format.native
    ids = [(7 * i + 3) % VOCAB for i in range(26)]
    states = Sequences(model, 1, 64, block_size=8)
    logits = [states.step([(0, part)])[0][0] for part in (ids[:14], ids[14:25], ids[25:])]
    torch.testing.assert_close(
        torch.cat(logits).float(), expected_logits(oracle, ids), atol=0.02, rtol=0
    )


def test_a_cache_of_fp8_holds_rounded_rows(
    folder: Path, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw rows and entries in FlashMLA's format give the logits of rows that were rounded before;
    keys and pending rows stay as they are."""
    model, ids = load(folder), [(7 * n + 3) % VOCAB for n in range(40)]
    layers = with_fp8_cache(model.attention_layers(), torch.float32, {})
    kinds = {(layer.head_dim, layer.attends, layer.fp8 is not None) for layer in layers}
    assert kinds == {
        (32, True, True), (32, False, True), (16, False, False), (64, False, False),
        (4 * (32 + 16), False, False),
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(model, "attention_layers", lambda: layers)
        packed = Sequences(model, 1, 64, block_size=8)
    got = [packed.step([(0, part)])[0][0] for part in (ids[:17], ids[17:39], ids[39:])]
    write, store = Pages.write, attention.store_rows

    def rounded(rows: Tensor) -> Tensor:
        return unpack_row(*pack_row(rows, 24), 24, torch.float32)

    def write_rounded(pages: Pages, slots: Tensor, rows: Tensor) -> None:
        write(pages, slots, rounded(rows) if rows.shape[1] == 32 else rows)

    def store_rounded(rows: Tensor, pages: Pages) -> None:
        store(rounded(rows.squeeze(1)).unsqueeze(1), pages)

    monkeypatch.setattr(Pages, "write", write_rounded)
    monkeypatch.setattr(attention, "store_rows", store_rounded)
    expected = Sequences(model, 1, 64, block_size=8).step([(0, ids)])[0][0]
    torch.testing.assert_close(torch.cat(got), expected, atol=1e-4, rtol=1e-4)
    assert (expected - expected_logits(oracle, ids)).abs().max() > 1e-3


def test_the_caches_hold_what_their_layers_need(folder: Path, oracle: Any) -> None:
    model = load(folder)
    groups = Sequences(model, 1, 32, block_size=8).groups
    kinds = {(g.head_dim, g.sliding_window, g.entry_tokens): len(g.layers) for g in groups}
    assert kinds == {
        (32, 10, 1): 4,  # raw rows of all layers
        (32, None, 4): 2,
        (16, None, 4): 2,
        (4 * (32 + 16), 8, 1): 2,  # two windows of the indexed layers
        (32, None, 8): 1,
        (64, 8, 1): 1,
    }
    assert fitting_block_size(3, groups) == 8 and fitting_block_size(16, groups) == 16
    layout = KVLayout(groups, 16, torch.float32, StepLoad(2, 16))
    assert layout.counts(1000) == [2 * (2 * 3 + 2) + 1, 1000, 1000, 2 * (2 * 3 + 4) + 1, 1000, 21]
    for memory in (100_000, 1_000_000, 3_000_000):
        count = layout.blocks_in(memory)
        assert layout.bytes_of(count) <= memory < layout.bytes_of(count + 1)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf
def test_the_triton_kernels_of_a_whole_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Chunks, a decode and rows as in verification, interpreted, give the oracle's logits."""
    oracle = make_v4(tmp_path, qk_rope_head_dim=16)
    model, ids = load(tmp_path), [(7 * n + 3) % VOCAB for n in range(26)]
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    sequences = Sequences(model, 1, 64, block_size=8, backend=TritonBackend())
    cuts = ((0, 14), (14, 15), (15, 18), (18, 26))
    got = [sequences.step([(0, ids[start:end])])[0][0] for start, end in cuts]
    torch.testing.assert_close(torch.cat(got), expected_logits(oracle, ids), atol=1e-4, rtol=1e-4)
