"""The trained head equals the served head: unrolled forward, exported files, vocabulary maps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.drafters.heads import load_head
from slipstream.runner.loading.inspection import Progress
from slipstream.runner.models.layers import WeightFormat
from slipstream.speculators.training.export import FORMATS, Verifier, save_head
from slipstream.speculators.training.head import (
    HeadGeometry,
    TrainingHead,
    check_taps,
    default_taps,
)
from slipstream.speculators.training.vocabulary import choose_draft_vocabulary, count_tokens

from ...runner.model_harness import Sequences
from ..random_hidden_states import GEOMETRY

CPU = torch.device("cpu")
VERIFIER = Verifier("tiny", ("LlamaForCausalLM",))
VOCABULARY = choose_draft_vocabulary(
    torch.arange(GEOMETRY.vocab_size).remainder(7), GEOMETRY.draft_vocab_size
)


def random_head(seed: int = 3) -> TrainingHead:
    head = TrainingHead(GEOMETRY, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(parameter + noise if parameter.ndim == 1 else noise)
    return head


def load(
    folder: Path, embeddings: Tensor, dtype: torch.dtype, loading: Progress | None = None
) -> Any:
    """The head as the runner loads it, with a target that has only embeddings."""
    config = SimpleNamespace(
        model_type="llama",
        hidden_size=GEOMETRY.hidden_size,
        num_hidden_layers=8,
        vocab_size=GEOMETRY.vocab_size,
    )
    target = SimpleNamespace(
        config=config, format=WeightFormat(CPU, dtype), embed=lambda ids: embeddings[ids.long()]
    )
    host: Any = SimpleNamespace(
        device=CPU, max_model_len=128, target_model=target, target_resolved=None, loading=loading
    )
    return load_head("eagle3", SpeculativeConfig("eagle3", str(folder)), host, 8)


def save(
    folder: Path,
    head: TrainingHead,
    dtype: torch.dtype,
    form: str = "specforge",
    geometry: HeadGeometry = GEOMETRY,
) -> Path:
    save_head(folder, dict(head.named_parameters()), geometry, VOCABULARY, VERIFIER, 4, form, dtype)
    return folder


def test_the_bytes_of_a_head_are_counted_while_it_is_loaded(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    embeddings = torch.randn(GEOMETRY.vocab_size, GEOMETRY.hidden_size)
    folder = save(tmp_path, random_head(), torch.float32)
    load(folder, embeddings, torch.float32, lambda done, total: seen.append((done, total)))
    size = sum(parameter.nbytes for parameter in random_head().parameters())
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] >= size and len(seen) > 3


@torch.no_grad()
def test_unrolled_forward_equals_drafting_token_by_token(tmp_path: Path) -> None:
    head, num_steps, length = random_head(), 4, 11
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(GEOMETRY.vocab_size, (length,), generator=generator)
    taps = torch.randn(length, 3 * GEOMETRY.hidden_size, generator=generator)
    table = torch.randn(GEOMETRY.vocab_size, GEOMETRY.hidden_size, generator=generator)
    unrolled = list(head.unroll(taps[None], table[ids][None], num_steps))
    served = load(save(tmp_path, head, torch.float32), table, torch.float32)
    last = length - 1 - num_steps
    sequences = Sequences(served, last + 1, 32)
    for row in range(last + 1):  # a chain that starts at each row, in a KV cache of its own
        following, hidden = ids[1 : row + 2], served.combine(taps[: row + 1])
        for step in range(num_steps):
            attention, positions = sequences.attention([row], [len(following)])
            normed, stream = served(following.int(), positions, hidden, attention)
            sequences.lengths[row] += len(following)
            torch.testing.assert_close(
                served.compute_logits(normed[-1:]),
                unrolled[step][0, row : row + 1],
                atol=2e-5,
                rtol=2e-5,
            )
            following, hidden = ids[row + 2 + step : row + 3 + step], stream[-1:]


def test_a_draft_sees_no_later_token_and_no_other_chain() -> None:
    head, num_steps, length, changed = random_head(), 3, 9, 5
    taps = torch.randn(1, length, 3 * GEOMETRY.hidden_size)
    embeddings = torch.randn(1, length, GEOMETRY.hidden_size)
    before = list(head.unroll(taps, embeddings, num_steps))
    taps[0, changed] += 1
    embeddings[0, changed] += 1
    after = list(head.unroll(taps, embeddings, num_steps))
    for step in range(num_steps):
        same = (before[step] == after[step]).all(-1)[0].tolist()
        # the chain from row t has read token t + 1 + step
        first = changed - 1 - step
        assert same == [row < first for row in range(length)]


def test_users_who_may_read_the_folder_may_read_the_weights(tmp_path: Path) -> None:
    folder = save(tmp_path, random_head(), torch.bfloat16, FORMATS[0])
    modes = {path.stat().st_mode for path in Path(folder).iterdir()}
    assert len(modes) == 1, "config.json and model.safetensors differ"


@pytest.mark.parametrize("form", FORMATS)
def test_exported_head_reloads_bit_equal(tmp_path: Path, form: str) -> None:
    head = random_head()
    served = load(save(tmp_path, head, torch.bfloat16, form), torch.zeros(61, 32), torch.bfloat16)
    exact = {name: p.detach().to(torch.bfloat16) for name, p in head.named_parameters()}
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    pairs = {
        "fc": [exact["fc.weight"]],
        "layers.0.self_attn.qkv_proj": [exact[f"{attention}{n}_proj.weight"] for n in "qkv"],
        "layers.0.self_attn.o_proj": [exact[f"{attention}o_proj.weight"]],
        "layers.0.mlp.gate_up_proj": [exact[f"{mlp}{n}_proj.weight"] for n in ("gate", "up")],
        "layers.0.mlp.down_proj": [exact[f"{mlp}down_proj.weight"]],
        "layers.0.hidden_norm": [exact["midlayer.hidden_norm.weight"]],
        "layers.0.input_layernorm": [exact["midlayer.input_layernorm.weight"]],
        "layers.0.post_attention_layernorm": [exact["midlayer.post_attention_layernorm.weight"]],
        "norm": [exact["norm.weight"]],
        "lm_head": [exact["lm_head.weight"]],
    }
    assert sum(len(parts) for parts in pairs.values()) == len(exact)
    for name, parts in pairs.items():
        assert torch.equal(served.get_submodule(name).weight, torch.cat(parts)), name
    assert torch.equal(served.draft_to_target, VOCABULARY.target_ids)
    assert served.aux_boundaries == GEOMETRY.taps
    assert not hasattr(served, "embed_tokens")


def test_files_have_the_names_that_other_engines_read(tmp_path: Path) -> None:
    flat = save(tmp_path / "flat", random_head(), torch.bfloat16)
    nested = save(tmp_path / "nested", random_head(), torch.bfloat16, "speculators")
    tensors = load_file(flat / "model.safetensors")
    layer = {
        *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
        *(f"midlayer.{n}.weight" for n in ("hidden_norm", "input_layernorm")),
        "midlayer.post_attention_layernorm.weight",
    }
    assert tensors.keys() == layer | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    renamed = {name.replace("midlayer.", "layers.0.") for name in tensors}
    assert load_file(nested / "model.safetensors").keys() == renamed

    config = json.loads((flat / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama" and config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == 24 and config["target_hidden_size"] == 32
    # vLLM: inputs of layers, at the top. SGLang: outputs, one less, below `eagle_config`.
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]

    config = json.loads((nested / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    method = config["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    # vLLM would take a missing one for true
    assert config["norm_before_residual"] is False
    assert config["transformer_layer_config"]["hidden_size"] == 32


def test_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = count_tokens([[5, 5, 5, 2], [2, 9, 5], [0]], 12)
    assert counts.tolist() == [1, 0, 2, 0, 0, 4, 0, 0, 0, 1, 0, 0]
    vocabulary = choose_draft_vocabulary(counts, 3)
    assert vocabulary.target_ids.tolist() == [0, 2, 5]  # 0 before 9: ties go to lower ids
    assert vocabulary.coverage == 7 / 8
    d2t, t2d = vocabulary.d2t(), vocabulary.t2d()
    assert (torch.arange(3) + d2t).tolist() == [0, 2, 5]
    assert t2d.nonzero().flatten().tolist() == [0, 2, 5]
    assert choose_draft_vocabulary(counts, 12).is_whole
    for size in (0, 13):
        with pytest.raises(ValueError, match=f"draft vocabulary of {size} tokens"):
            choose_draft_vocabulary(counts, size)


def test_taps_are_those_of_other_engines_where_the_target_has_them() -> None:
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(32) == (2, 16, 29)
    for layers in range(2, 80):
        check_taps(default_taps(layers), layers)
    for taps in ((2, 1, 5), (1, 2), (1, 2, 9)):
        with pytest.raises(ValueError, match="3 ascending boundaries"):
            check_taps(taps, 8)


def test_size_of_the_recipe_for_the_default_model() -> None:
    shape = replace(
        GEOMETRY, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3,
        head_dim=64, vocab_size=49152, draft_vocab_size=4096,
    )  # fmt: skip
    counted = sum(p.numel() for p in TrainingHead(shape).parameters())
    assert counted == shape.num_parameters()
    assert 2 * counted + 8 * shape.draft_vocab_size + shape.vocab_size < 15_000_000


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("taps", [(0, 1, 2), (1, 2, 3), (2, 4, 5)])
def test_taps_survive_the_file(tmp_path: Path, form: str, taps: tuple[int, ...]) -> None:
    geometry = replace(GEOMETRY, taps=taps)
    folder = save(tmp_path, random_head(), torch.float32, form, geometry)
    assert load(folder, torch.zeros(61, 32), torch.float32).aux_boundaries == taps
