"""The training loop: resuming, early stopping, batches, the schedule and its measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import image

from slipstream.configs.training import TrainingConfig
from slipstream.speculators.training.dataset import BatchOrder, TrainingSequence, pack
from slipstream.speculators.training.head import TrainingHead
from slipstream.speculators.training.objective import measure, walk
from slipstream.speculators.training.plot import plot_training
from slipstream.speculators.training.trainer import Trainer
from slipstream.speculators.training.vocabulary import choose_draft_vocabulary

from ..random_hidden_states import GEOMETRY, RandomTarget, random_sequences

OPTIONS = TrainingConfig(
    num_speculative_tokens=3, max_steps=14, batch_tokens=60, eval_every=4, log_every=1, patience=0,
    checkpoint_every=1000,
)  # fmt: skip
VOCABULARY = choose_draft_vocabulary(torch.ones(61, dtype=torch.int64), 24)


def trainer(folder: Path, **changes: Any) -> Trainer:
    made = Trainer(
        TrainingHead(GEOMETRY, seed=1), VOCABULARY, RandomTarget(), random_sequences(20),
        random_sequences(6, seed=9), replace(OPTIONS, **changes), folder, torch.device("cpu"),
    )  # fmt: skip
    made.resume()
    return made


def lines(made: Trainer) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in made.log.lines()]


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.run()
    cut = trainer(tmp_path / "cut")
    cut.run(lambda _: cut.stop() if cut.state.step == 8 else None)
    assert (cut.state.step, cut.state.done) == (8, False)
    with (tmp_path / "cut" / "training.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')  # lines of steps that were lost
    resumed = trainer(tmp_path / "cut")
    assert resumed.state.step == 8
    resumed.run()
    assert resumed.state.step == whole.state.step == 14 and whole.state.done and resumed.state.done
    for name, weight in whole.head.state_dict().items():
        assert torch.equal(weight, resumed.head.state_dict()[name]), name
        assert torch.equal(whole.state.best_weights[name], resumed.state.best_weights[name]), name
    assert whole.state.best == resumed.state.best
    assert lines(whole) == lines(resumed) and len(lines(whole)) == 14 + 4


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.run()
    again = trainer(tmp_path)
    assert again.state.done
    again.run()
    assert lines(again) == lines(first)


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).save()
    with pytest.raises(ValueError, match="different options"):
        trainer(tmp_path, learning_rate=0.5)
    (tmp_path / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is not a training checkpoint"):
        trainer(tmp_path)


def test_ends_early_without_progress_and_keeps_the_best(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=400, learning_rate=1e-9, patience=2)
    lengths: list[float] = []
    made.run(lambda evaluation: lengths.append(evaluation.acceptance_length))
    assert made.state.step < 400 and made.state.done
    length, step = made.state.best, made.state.best_step
    assert length == max(lengths) and made.state.step == step + 2 * OPTIONS.eval_every


def test_time_limit_ends_the_run(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=100_000, max_train_minutes=0.005)
    made.run()
    assert made.state.done and made.state.step < 100_000


def test_loss_falls_and_the_gradient_is_clipped(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=60, learning_rate=1e-2, eval_every=60, batch_tokens=200)
    made.run()
    found = [line for line in made.log.lines() if "loss" in line]
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]
    assert len(found[0]["agreement"]) == 3
    rates = [line["learning_rate"] for line in found]
    assert max(rates) == pytest.approx(1e-2, rel=0.02)
    assert rates[0] < rates[1] and rates[-1] < 0.2 * max(rates)
    plot_training(made.log, tmp_path / "training.png")
    pixels = (image.imread(tmp_path / "training.png") * 255).astype(np.uint8).view(np.uint32)
    assert len(np.unique(pixels)) > 100  # curves of several colours, not an empty page


def test_needs_something_to_learn_and_something_held_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="held-out"):
        Trainer(
            TrainingHead(GEOMETRY), VOCABULARY, RandomTarget(), random_sequences(2), [], OPTIONS,
            tmp_path, torch.device("cpu"),
        )  # fmt: skip


def test_each_epoch_reads_every_sequence_once_in_its_own_order() -> None:
    lengths = [5 + (i * 7) % 30 for i in range(50)]
    order = BatchOrder(lengths, 100, seed=3)
    per_epoch = order.num_batches(1)
    epochs = [[order.batch(n) for n in range(start, start + per_epoch)] for start in (0, per_epoch)]
    for batches in epochs:
        assert sorted(i for batch in batches for i in batch) == list(range(50))
        assert all(max(lengths[i] for i in b) * len(b) <= 100 for b in batches)
    assert epochs[0] != epochs[1]
    again = BatchOrder(lengths, 100, seed=3)
    assert again.batch(per_epoch + 1) == epochs[1][1]  # from anywhere, as after a resume
    assert again.batch(0) == epochs[0][0]
    assert pack([0, 1], [500, 3], 100) == [[0], [1]]  # one that is too long goes alone


def test_only_replies_and_draftable_tokens_count() -> None:
    target, head = RandomTarget(), TrainingHead(GEOMETRY, seed=1)
    vocabulary = choose_draft_vocabulary(torch.ones(61, dtype=torch.int64), 24)
    sequence = TrainingSequence(tuple(range(10)), 6)
    batch = target.read([sequence, TrainingSequence((1, 2, 3), 1)], vocabulary.target_ids)
    measured = measure(
        head, batch, vocabulary.target_ids, vocabulary.t2d(), 3, 0.8, keep_matches=True
    )
    # chains start at the last prompt token; the first has 4 reply tokens, the second 2
    assert measured.counted.tolist() == [3 + 1, 2, 1]
    assert measured.matched is not None and not measured.matched[0, :5].any()
    nothing = measure(head, batch, vocabulary.target_ids, torch.zeros(61, dtype=torch.bool), 3, 0.8)
    assert float(nothing.loss.detach()) == 0.0


def test_walk_is_speculative_decoding() -> None:
    matched = torch.zeros(1, 12, 3, dtype=torch.bool)
    matched[0, 3] = torch.tensor([True, True, False])  # accepts 2, goes on from row 6
    matched[0, 4] = True  # never visited
    matched[0, 6] = torch.tensor([False, True, True])  # accepts none, on to row 7
    matched[0, 7] = True  # accepts all 3 that are within the text
    assert walk(matched, [12], [4]) == ([3, 3, 3], [2, 2, 1])
    # At row 7 of 11 tokens only 2 drafts lie within the text.
    matched[0, 7, 2] = False
    assert walk(matched, [11], [4]) == ([3, 3, 2], [2, 2, 0])
