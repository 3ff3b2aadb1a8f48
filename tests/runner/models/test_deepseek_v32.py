"""DeepSeek V3.2 equals transformers on tiny random models whose indexer has a choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from slipstream.configs.schema import ModelConfig
from slipstream.kernels.attention.paged_rows import Fp8Cache
from slipstream.kernels.quant.e4m3 import pack_latent, unpack_latent
from slipstream.runner.attention.fp8_layers import with_fp8_cache
from slipstream.runner.attention.triton import TritonBackend
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.weights import load_weights, resolve_model
from slipstream.runner.models.families import deepseek_v32
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model
from slipstream.runner.parallel.ranks import Ranks

from ..model_harness import CPU, Sequences, assert_equals_transformers, load
from ..parallel.threads import on_ranks
from ..tiny_v32 import TOP_K, VOCAB, make_v32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v32")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make_v32(folder)


def expected_logits(oracle: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([ids])).logits[0]
    return logits


def some_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
    return ids


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_logits_equal_transformers(folder: Path, oracle: Any) -> None:
    assert_equals_transformers(load(folder), oracle)


@pytest.mark.parametrize("count", range(TOP_K - 2, TOP_K + 3))
def test_prompts_of_every_length_around_the_first_choice(
    folder: Path, oracle: Any, count: int
) -> None:
    """Up to `index_topk` tokens every token is read; from then on the indexer chooses."""
    ids, sequences = some_ids(count + 4), Sequences(load(folder), 1, 32)
    got = sequences.step([(0, ids[:count])])[0]
    got += [sequences.step([(0, [token])])[0][0] for token in ids[count:]]
    close(torch.cat(got), expected_logits(oracle, ids))


def test_rejected_drafts_leave_nothing_behind(folder: Path, oracle: Any) -> None:
    """At every offset in a block, wrong tokens are computed and then replaced."""
    ids, sequences = some_ids(40, seed=4), Sequences(load(folder), 1, 64)
    got = [sequences.step([(0, ids[:13])])[0][0]]
    for at in range(13, len(ids)):
        wrong = [(token + 1) % VOCAB for token in ids[at + 1 : at + 2 + at % 4]]
        got.append(sequences.step([(0, [ids[at], *wrong])])[0][0][:1])
        sequences.lengths[0] = at + 1
    close(torch.cat(got), expected_logits(oracle, ids))


def test_without_a_choice_it_is_deepseek_v3(folder: Path, oracle: Any, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"index_topk": 64}
    plain = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    tensors = load_file(folder / "model.safetensors")
    logits = []
    for name, changes in (("v32", {}), ("v3", plain)):
        own = tmp_path / name
        own.mkdir()
        kept = {n: t for n, t in tensors.items() if name == "v32" or ".indexer." not in n}
        (own / "config.json").write_text(json.dumps(config | changes))
        save_file(kept, own / "model.safetensors", {"format": "pt"})
        logits.append(Sequences(load(own), 1, 64).step([(0, some_ids(40))])[0][0])
    close(*logits)


def test_ranks_share_the_heads(folder: Path, oracle: Any) -> None:
    ids = some_ids(24)

    def of_rank(ranks: Ranks) -> Tensor:
        resolved = resolve_model(ModelConfig(model=str(folder), dtype="float32"))
        model = build_model(resolved.hf_config, WeightFormat(CPU, torch.float32, ranks=ranks))
        load_weights(model, resolved)
        assert [layer.num_heads for layer in model.attention_layers()[:2]] == [2, 1]
        return Sequences(model, 1, 32).step([(0, ids)])[0][0]

    for logits in on_ranks(2, of_rank):
        close(logits, expected_logits(oracle, ids))


def test_blocks_of_fp8(folder: Path, oracle: Any, tmp_path: Path) -> None:
    """The checkpoint as DeepSeek stores it: matrices in blocks of 128 x 128, but not those of the
    heads' weights in the indexer."""
    stored, plain = {}, load_file(folder / "model.safetensors")
    for name, tensor in list(plain.items()):
        linear = tensor.dim() == 2 and ".layers." in name and "gate.weight" not in name
        if not linear or "weights_proj" in name:
            stored[name] = tensor
            continue
        scales = torch.stack(
            [
                torch.stack([block.abs().max() / 448 for block in rows.split(128, 1)])
                for rows in tensor.split(128, 0)
            ]
        )
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        spread = spread[: tensor.shape[0], : tensor.shape[1]]
        stored[name] = (tensor / spread).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        plain[name] = stored[name].float() * spread
    config = json.loads((folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    logits = []
    for name, tensors, more in (
        ("fp8", stored, {"quantization_config": fp8}),
        ("plain", plain, {}),
    ):
        own = tmp_path / name
        own.mkdir()
        (own / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, own / "model.safetensors", {"format": "pt"})
        logits.append(Sequences(load(own), 1, 32).step([(0, some_ids(20))])[0][0])
    close(*logits)


def test_a_cache_of_fp8_holds_rounded_rows(
    folder: Path, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and keys in FlashMLA's format give the logits of rows that were rounded before."""
    ids, model = some_ids(30), load(folder)
    layers = with_fp8_cache(model.attention_layers(), torch.float32, {})
    assert [layer.cache_row(layer.head_dim) for layer in layers[:2]] == [32 + 4 + 2 * 16, 32 + 4]
    with monkeypatch.context() as patch:
        patch.setattr(model, "attention_layers", lambda: layers)
        packed = Sequences(model, 1, 32)
    got = [packed.step([(0, part)])[0][0] for part in (ids[:17], ids[17:29], ids[29:])]
    store = deepseek_v32.store_kv

    def rounded(key: Tensor, value: None, cache: Tensor, slots: Tensor, fp8: Fp8Cache) -> None:
        key = unpack_latent(pack_latent(key, 32), 32, torch.float32)
        store(key, value, cache, slots, fp8)

    monkeypatch.setattr(deepseek_v32, "store_kv", rounded)
    close(torch.cat(got), Sequences(model, 1, 32).step([(0, ids)])[0][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_head_dim": 8}, "index_head_dim of DeepSeek V3.2 is 8, but its first 16"),
        ({"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types says otherwise"),
        ({"index_topk": 0}, "index_topk of DeepSeek V3.2 must be a positive integer"),
        ({"layer_types": ["full_attention"] * 3}, "only supported with an indexer in every layer"),
    ],
)
def test_what_is_not_supported_is_named(
    folder: Path, oracle: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, load_format="dummy")


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
def test_both_names_of_layers_with_an_indexer_are_read(kind: str) -> None:
    """Transformers 5.17 writes the second one."""
    config = AutoConfig.for_model("deepseek_v32")
    config.layer_types = [kind] * config.num_hidden_layers
    deepseek_v32.check_v32(config)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf
def test_the_triton_kernels_of_a_whole_model(
    folder: Path, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, a decode and rows as in verification, interpreted, give the oracle's logits."""
    model, ids = load(folder), some_ids(22)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    sequences = Sequences(model, 1, 32, backend=TritonBackend())
    cuts = ((0, 10), (10, 11), (11, 14), (14, 22))
    got = [sequences.step([(0, ids[start:end])])[0][0] for start, end in cuts]
    close(torch.cat(got), expected_logits(oracle, ids))
