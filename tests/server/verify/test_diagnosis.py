"""Each cause of low acceptance is planted and named; the head that ships here has none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream.server.drafters.acceptance import Tally
from slipstream.server.verify.diagnosis import causes as diagnosis
from slipstream.server.verify.diagnosis.causes import HeadFiles, read_head

SHIPPED = Path(__file__).parents[3] / "configs/presets/smollm2-135m-eagle3"
VOCAB = 200


def trained(shape: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """A matrix with rows and columns of different size, as training leaves them."""
    draw = np.random.default_rng(seed)
    scale = np.exp(draw.normal(0, 0.3, (shape[0], 1)) + draw.normal(0, 0.3, (1, shape[1])))
    return (draw.normal(0, 0.02, shape) * scale).astype(np.float32)


def head(folder: Path, **changes: Any) -> HeadFiles:
    """A sound head with 50 draft tokens, and the given tensors or config keys in place of its."""
    ids = np.arange(0, VOCAB, 4)
    mask = np.zeros(VOCAB, dtype=bool)
    mask[ids] = True
    tensors: dict[str, Any] = {
        "d2t": ids - np.arange(len(ids)),
        "t2d": mask,
        "fc.weight": trained((64, 192), 1),
        "midlayer.mlp.up_proj.weight": trained((96, 64), 2),
        "norm.weight": np.ones(64, dtype=np.float32),
    }
    config = {"vocab_size": VOCAB, "rope_theta": 10000.0, "max_position_embeddings": 512}
    for name, value in changes.items():
        (tensors if isinstance(value, np.ndarray) else config)[name] = value
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    found = read_head(folder)
    assert found is not None
    return found


def rate(accepted: int, drafted: int = 200) -> Tally:
    return Tally(num_verify_steps=drafted, drafted=[drafted], accepted=[accepted])


def test_the_shipped_head_and_a_sound_one_have_no_fault(tmp_path: Path) -> None:
    shipped = read_head(SHIPPED)
    assert shipped is not None
    assert diagnosis.weights(shipped) == []
    assert diagnosis.vocabulary(shipped, 49152, {}) == []
    sound = head(tmp_path)
    emitted = Counter(range(0, VOCAB, 4))
    assert diagnosis.vocabulary(sound, VOCAB, emitted) == diagnosis.weights(sound) == []
    assert diagnosis.config(sound, {"rope_theta": 10000.0}) == []


IDS = np.arange(0, VOCAB, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d2t": IDS}, "point outside the 200 tokens of the model; it seems to hold token ids"),
        ({"d2t": np.zeros(50, dtype=np.int64) - np.arange(50)}, "to a token that another one has"),
        ({"d2t": IDS + 1 - np.arange(50)}, "d2t and t2d of the head name different tokens"),
    ],
)
def test_a_wrong_vocabulary_map_is_named(tmp_path: Path, changes: Any, words: str) -> None:
    found = diagnosis.vocabulary(head(tmp_path, **changes), VOCAB, {})
    assert found and words in " ".join(found)


def test_a_vocabulary_of_other_texts_is_named(tmp_path: Path) -> None:
    emitted = Counter({1: 60, 4: 40})
    found = diagnosis.vocabulary(head(tmp_path), VOCAB, emitted)
    assert "only 40 % of the tokens that the model emits" in found[0]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (np.random.default_rng(0).normal(0, 0.02, (64, 192)), "fc.weight looks randomly init"),
        (np.random.default_rng(0).uniform(-0.1, 0.1, (64, 192)), "fc.weight looks randomly init"),
        (np.zeros((64, 192)), "fc.weight is all zeros"),
        (np.full((64, 192), np.nan), "fc.weight holds NaN"),
    ],
)
def test_untrained_tensors_are_named(
    tmp_path: Path, tensor: np.ndarray[Any, Any], words: str
) -> None:
    found = diagnosis.weights(head(tmp_path, **{"fc.weight": tensor.astype(np.float32)}))
    assert len(found) == 1 and words in found[0]


def test_another_rope_is_named(tmp_path: Path) -> None:
    found = diagnosis.config(head(tmp_path), {"rope_theta": 500000.0})
    assert "the head's rope_theta is 10000.0 and the model's is 500000.0" in found[0]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, ""),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "the model's is 500000"),
        (
            {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}},
            "the head's rope_scaling is None and the model's is {'yarn': {'factor': 4.0}}",
        ),
    ],
)
def test_rope_is_compared_in_the_format_of_transformers_5(
    tmp_path: Path, target: dict[str, Any], words: str
) -> None:
    found = " ".join(diagnosis.config(head(tmp_path, rope_scaling=None), target))
    assert words in found and bool(words) == bool(found)


def test_a_fall_with_the_length_of_the_text_is_named(tmp_path: Path) -> None:
    found = diagnosis.context(rate(120), rate(20), 1500, head(tmp_path))
    assert "after about 1500 tokens, 10 % of the first drafts" in found[0]
    assert "the head was made for 512 tokens" in found[0]
    assert diagnosis.context(rate(120), rate(115), 1500, None) == []


def test_another_chat_template_is_named() -> None:
    found = diagnosis.template(rate(30), rate(110))
    assert "15 % of the first drafts are accepted after chats and 55 %" in found[0]
    assert diagnosis.template(rate(30), rate(36)) == []


def test_wrong_auxiliary_layers_are_named() -> None:
    measured = {(1, 7, 13): rate(30), (2, 8, 14): rate(130), (0, 6, 12): rate(20)}
    found = diagnosis.boundaries((1, 7, 13), measured)
    assert "with aux_hidden_state_boundaries [2, 8, 14], 65 %" in found[0]
    assert diagnosis.boundaries((2, 8, 14), measured) == []
    assert diagnosis.other_boundaries((1, 7, 12), 16) == [
        (0, 6, 11), (2, 8, 13), (3, 9, 14)
    ]  # fmt: skip


def test_a_quantised_target_is_named() -> None:
    assert "quantised (int4)" in diagnosis.precision("int4")[0]
    assert diagnosis.precision("") == []


def test_what_is_no_checkpoint_is_not_read(tmp_path: Path) -> None:
    assert read_head(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8)
    assert read_head(tmp_path) is None
