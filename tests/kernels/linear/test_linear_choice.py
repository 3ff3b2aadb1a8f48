"""Choosing a linear kernel by shape and rows, and storing measured choices on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slipstream.kernels.linear import linear_tuned
from slipstream.kernels.linear.linear_choice import (
    BUCKETS,
    H100_WINNERS,
    ROLES,
    Choice,
    Gemv,
    Shape,
    Skinny,
    bucket_of,
    default_choice,
    fits,
    hopper_choice,
)
from slipstream.kernels.linear.linear_tuned import (
    LinearChooser,
    create_chooser,
    load_tuned,
    save_tuned,
)

from ...lab import linear_tune

QKV, HEAD = Shape("qkv", 6144, 4096), Shape("head", 128256, 4096)
FOUND: dict[tuple[Shape, int], Choice] = {
    (QKV, 1): Gemv(8, 512, 4, 0),
    (QKV, 16): Skinny(64, 64, 3, 4, 2, 16),
    (HEAD, 64): None,
}


def test_buckets_hold_their_rows() -> None:
    assert [bucket_of(n) for n in (1, 2, 16, 17, 64, 65, 256)] == [1, 16, 16, 32, 64, 128, 256]
    assert bucket_of(257) is None
    assert list(BUCKETS) == sorted(BUCKETS)


def test_every_built_in_winner_fits_its_shape() -> None:
    for (shape, bucket), choice in H100_WINNERS.items():
        assert fits(choice, shape, bucket), (shape, bucket, choice)
        if isinstance(choice, Skinny):
            assert 16 <= choice.block_m <= max(16, bucket)
            assert shape.inputs >= choice.split_k * choice.block_k, "an empty part"
    assert H100_WINNERS[QKV, 256] is None  # cuBLAS was quicker


@pytest.mark.parametrize("shape", [Shape("down", 4096, 14336), Shape("gate_up", 96, 40), HEAD])
def test_the_rule_for_other_shapes_fits_them(shape: Shape) -> None:
    for rows in (1, 2, 16, 40, 64):
        choice = default_choice(shape, rows)
        assert choice is not None and fits(choice, shape, rows)
    assert default_choice(shape, 65) is None


def test_what_no_kernel_computes_is_torchs() -> None:
    gemv, skinny = Gemv(4, 1024, 4), Skinny(64, 128, 3, 4, 1, 16)
    assert not fits(gemv, QKV, 2)  # one row only
    assert not fits(skinny, Shape("qkv", 6144, 4090), 2)  # rows of 16 bytes
    assert not fits(skinny, Shape("head", 262144, 8192), 2)  # 32-bit offsets
    assert not fits(Skinny(64, 128, 3, 4, 2, 16), HEAD, 2)  # no kernel would sum its parts
    chooser = LinearChooser({(QKV, 1): gemv, (QKV, 16): gemv})
    assert chooser.choose(QKV, 1) == gemv
    assert chooser.choose(QKV, 2) is None


def test_a_rule_chooses_where_nothing_was_measured() -> None:
    alone = LinearChooser(H100_WINNERS)
    hopper, triton = (LinearChooser(H100_WINNERS, rule) for rule in (hopper_choice, default_choice))
    other = Shape("qkv", 3072, 4096)  # half of Llama 8B's
    assert alone.choose(other, 4) is None and triton.choose(other, 4) is not None
    assert hopper.choose(other, 1) == Gemv(2, 1024, 4)
    assert hopper.choose(other, 4) == Skinny(64, 256, 3, 4, 4, 16)  # 48 tiles, four parts each
    assert hopper.choose(other, 65) is None
    for chooser in (alone, hopper, triton):
        assert chooser.choose(QKV, 4) == H100_WINNERS[QKV, 16]
        assert chooser.choose(QKV, 256) is None  # measured: torch
        assert chooser.choose(QKV, 300) is None


@pytest.mark.parametrize("rows", [1, 2, 16, 32, 64, 65])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("size", [(1024, 1024), (28672, 8192), (4096, 28672), (151936, 5120)])
def test_the_rule_names_kernels_that_can_compute_the_layer(
    role: str, size: tuple[int, int], rows: int
) -> None:
    shape = Shape(role, *size)
    choice = hopper_choice(shape, rows)
    assert fits(choice, shape, rows)
    if rows > 64 or role == "other":
        assert choice is None
    elif isinstance(choice, Skinny):
        assert rows <= choice.block_m and shape.inputs // choice.split_k >= 2 * choice.block_k
    assert hopper_choice(Shape(role, 960, 576), rows) is None  # smaller than any that was measured


def test_no_chooser_on_a_cpu() -> None:
    for mode in linear_tuned.MODES:
        assert create_chooser(mode, torch.device("cpu"), torch.bfloat16) is None


def test_measurements_survive_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    card, half = "NVIDIA H100 80GB HBM3 132", torch.bfloat16
    assert load_tuned(card, half) == {}
    path = save_tuned(card, half, FOUND)
    assert path is not None and path.parent == tmp_path / "slipstream" / "linear"
    assert load_tuned(card, half) == FOUND
    newer: Choice = Skinny(128, 64, 3, 4, 4, 16)
    save_tuned(card, half, {(QKV, 16): newer})
    assert load_tuned(card, half) == {**FOUND, (QKV, 16): newer}
    assert load_tuned(card, torch.float16) == load_tuned("another card", half) == {}
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no half-written file is left


def test_measurements_of_other_kernels_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_tuned("card", torch.bfloat16, FOUND)
    monkeypatch.setattr(linear_tuned, "_version", lambda: "of other sources")
    assert load_tuned("card", torch.bfloat16) == {}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"choices": {"what 1x2": {}}}', '{"choices": {"qkv 1x2": {"1": [7]}}}']
)
def test_a_damaged_file_counts_as_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = save_tuned("card", torch.bfloat16, FOUND)
    assert path is not None and json.loads(path.read_text())["card"] == "card"
    path.write_text(text)
    assert load_tuned("card", torch.bfloat16) == {}
    assert "cannot read the measured linear kernels" in caplog.text


def test_an_unwritable_place_is_only_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "slipstream").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert save_tuned("card", torch.bfloat16, FOUND) is None
    assert "cannot save the measured linear kernels" in caplog.text


def test_tuning_keeps_only_what_pays() -> None:
    quick, slow = Gemv(4, 1024, 4), Gemv(8, 512, 4)
    assert linear_tune.best_of([(10.0, quick), (11.0, None), (12.0, slow)]) == quick
    assert linear_tune.best_of([(10.9, quick), (11.0, None)]) is None  # noise
    assert linear_tune.best_of([(11.0, None), (12.0, slow)]) is None
    assert linear_tune.best_of([]) is None


def test_tuning_measures_right_candidates_and_drops_wrong_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the CPU torch computes all choices correctly; the test makes one of them wrong."""
    shape = Shape("gate_up", 96, 64)
    choices: list[Choice] = [None, *linear_tune.candidates(shape, 3)]
    assert len(choices) > 4 and len(set(choices)) == len(choices)
    assert all(fits(choice, shape, 3) for choice in choices)
    run, bad = linear_tune.layer_call, choices[2]

    def layer_call(
        shape: Shape, choice: Choice, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        out = run(shape, choice, x, weight)
        return torch.full_like(out, float("nan")) if choice is bad else out

    monkeypatch.setattr(linear_tune, "layer_call", layer_call)
    times = iter(range(100, 0, -1))
    cpu = torch.device("cpu")
    monkeypatch.setattr(linear_tune, "COLD_BYTES", 1 << 16)
    timed = linear_tune.measure(
        shape, 3, choices, cpu, torch.float32, lambda calls: calls[0]() is None or next(times)
    )
    assert [choice for _, choice in timed] == [c for c in reversed(choices) if c is not bad]
    assert "nan" in caplog.text
