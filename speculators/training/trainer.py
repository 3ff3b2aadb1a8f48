"""The training loop: AdamW on fp32 weights, warm-up and cosine, checkpoints, early stopping.

It knows neither the engine nor files of prompts: a `HiddenSource` runs the target.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ...configs.training import TrainingConfig
from .checkpoint import ProgressLog, load_checkpoint, save_checkpoint
from .dataset import BatchOrder, HiddenSource, TrainingSequence, digest, pack
from .head import HeadGeometry, TrainingHead
from .objective import Measured, measure, walk
from .vocabulary import DraftVocabulary


@dataclass
class Evaluation:
    """The result of speculative decoding of held-out greedy replies."""

    acceptance_length: float  # tokens per verify step, the target's own included
    acceptance: list[float]  # [K] by position; not conditional on earlier drafts
    loss: float


@dataclass
class State:
    """The trainer's state in a checkpoint, besides weights and optimiser."""

    step: int = 0  # optimiser steps done
    seconds: float = 0.0
    best: float = 0.0  # held-out acceptance length
    best_step: int = 0
    bad_evaluations: int = 0
    done: bool = False
    best_weights: dict[str, Tensor] = field(default_factory=dict)


class Trainer:
    """Trains one head, with its checkpoint and log in `folder`."""

    def __init__(
        self,
        head: TrainingHead,
        vocabulary: DraftVocabulary,
        source: HiddenSource,
        training: Sequence[TrainingSequence],
        heldout: Sequence[TrainingSequence],
        options: TrainingConfig,
        folder: Path,
        device: torch.device,
    ) -> None:
        if not training or not heldout:
            raise ValueError("training needs both training and held-out sequences.")
        self.head, self.options, self.device = head.to(device), options, device
        self._source, self._training, self._heldout = source, training, heldout
        self._to_target = vocabulary.target_ids.to(device)
        self._has_draft_id = vocabulary.t2d().to(device)
        lengths = [len(sequence.token_ids) for sequence in training]
        self._order = BatchOrder(lengths, options.batch_tokens, options.train_seed)
        self.total_steps = options.max_steps or max(1, self._steps_of(options.epochs))
        self._optimizer = torch.optim.AdamW(
            _groups(self.head, options.weight_decay),
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
        )
        self._path = folder / "checkpoint.pt"
        self.log = ProgressLog(folder / "training.jsonl")
        self.state = State()
        self._fingerprint = _fingerprint(head.geometry, options, vocabulary, training, heldout)
        self._stopping = False
        by_device = "bfloat16" if device.type == "cuda" else "float32"
        dtype = by_device if options.train_dtype == "auto" else options.train_dtype
        self._in_bfloat16 = dtype == "bfloat16"

    def stop(self) -> None:
        """End `run` after the current step, with a checkpoint. Safe in a signal handler."""
        self._stopping = True

    def resume(self) -> bool:
        """Resume from the folder's checkpoint; False if there is none.

        Raises ValueError if it belongs to other data, another shape or other options.
        """
        saved = load_checkpoint(self._path, self._fingerprint, self.device)
        if saved is None:
            self.log.cut(-1)
            return False
        self.head.load_state_dict(saved["head"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.state = State(**saved["state"])
        self.log.cut(self.state.step)
        return True

    def run(self, report: Callable[[Evaluation], None] | None = None) -> None:
        """Train to the end or until `stop`. Calls `report` with every evaluation."""
        began = time.monotonic() - self.state.seconds
        with tqdm(
            total=self.total_steps, initial=self.state.step, desc="train", disable=None
        ) as bar:
            while not self.state.done and not self._stopping:
                self.state.seconds = time.monotonic() - began
                done_share = self._train_step(bar)
                if self._due(self.options.eval_every) or done_share >= 1:
                    evaluation = self._evaluate_and_judge()
                    bar.set_postfix_str(f"held-out length {evaluation.acceptance_length:.2f}")
                    if report is not None:
                        report(evaluation)
                self.state.done |= done_share >= 1
                if self._due(self.options.checkpoint_every) or self.state.done:
                    self.save()
        self.save()

    def save(self) -> None:
        save_checkpoint(
            self._path,
            {
                "fingerprint": self._fingerprint,
                "head": self.head.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "state": dict(vars(self.state)),
            },
        )

    def evaluate(self) -> Evaluation:
        """Measure the head on the held-out sequences."""
        lengths = [len(sequence.token_ids) for sequence in self._heldout]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        drafted = [0] * self.options.num_speculative_tokens
        accepted = [0] * self.options.num_speculative_tokens
        loss = batches = 0.0
        for indices in pack(order, lengths, self.options.batch_tokens):
            sequences = [self._heldout[i] for i in indices]
            with torch.no_grad():
                measured = self._measure(sequences, keep_matches=True)
            assert measured.matched is not None
            more = walk(
                measured.matched,
                [len(sequence.token_ids) for sequence in sequences],
                [sequence.prompt_length for sequence in sequences],
            )
            drafted = [a + b for a, b in zip(drafted, more[0], strict=True)]
            accepted = [a + b for a, b in zip(accepted, more[1], strict=True)]
            loss += float(measured.loss.detach())
            batches += 1
        shares = [a / max(d, 1) for a, d in zip(accepted, drafted, strict=True)]
        return Evaluation(1 + sum(shares), shares, loss / batches)

    # --- parts of a step --------------------------------------------------------------------------

    def _train_step(self, bar: tqdm[Any]) -> float:
        """Do one optimiser step; return the fraction of the run done after it."""
        options, state = self.options, self.state
        rate = options.learning_rate * self._schedule(self._progress(state.step))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        sequences = [self._training[i] for i in self._order.batch(state.step)]
        measured = self._measure(sequences)
        self._optimizer.zero_grad(set_to_none=True)
        measured.loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), options.clip)
        self._optimizer.step()
        state.step += 1
        bar.update()
        if self._due(options.log_every) or state.step == 1:
            loss = float(measured.loss.detach())
            agreement = (measured.agreed / measured.counted.clamp(min=1)).tolist()
            self.log.write(
                step=state.step,
                loss=loss,
                agreement=agreement,
                learning_rate=rate,
                gradient_norm=float(norm),
                seconds=round(state.seconds, 2),
            )
            bar.set_description_str(f"train (loss {loss:.3f})")
        return self._progress(state.step)

    def _measure(
        self, sequences: Sequence[TrainingSequence], keep_matches: bool = False
    ) -> Measured:
        batch = self._source.read(sequences, self._to_target)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._in_bfloat16):
            return measure(
                self.head,
                batch,
                self._to_target,
                self._has_draft_id,
                self.options.num_speculative_tokens,
                self.options.loss_decay,
                keep_matches,
            )

    def _evaluate_and_judge(self) -> Evaluation:
        evaluation, state = self.evaluate(), self.state
        self.log.write(
            step=state.step,
            heldout_loss=evaluation.loss,
            heldout_acceptance=evaluation.acceptance,
            heldout_length=evaluation.acceptance_length,
            seconds=round(state.seconds, 2),
        )
        if evaluation.acceptance_length > state.best:
            state.best, state.best_step, state.bad_evaluations = (
                evaluation.acceptance_length,
                state.step,
                0,
            )
            state.best_weights = {
                name: tensor.detach().cpu().clone()
                for name, tensor in self.head.state_dict().items()
            }
        else:
            state.bad_evaluations += 1
            patience = self.options.patience
            state.done |= 0 < patience <= state.bad_evaluations
        return evaluation

    # --- schedule ---------------------------------------------------------------------------------

    def _steps_of(self, epochs: float) -> int:
        whole = math.ceil(epochs)
        return round(self._order.num_batches(whole) * epochs / whole)

    def _progress(self, step: int) -> float:
        """The fraction of the run done after `step` steps: of its steps or its time limit, the
        larger."""
        share = step / self.total_steps
        limit = self.options.max_train_minutes
        return share if limit is None else max(share, self.state.seconds / (60 * limit))

    def _schedule(self, progress: float) -> float:
        """The factor on the learning rate: linear warm-up, then half a cosine down to a tenth."""
        warmup = max(self.options.warmup, 1 / self.total_steps)
        if progress < warmup:
            return (progress + 1 / self.total_steps) / (warmup + 1 / self.total_steps)
        share = min(1.0, (progress - warmup) / max(1e-9, 1 - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * share))

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0


def _groups(head: TrainingHead, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of the optimiser: weight decay applies to matrices, not to norms."""
    matrices = [p for p in head.parameters() if p.ndim > 1]
    vectors = [p for p in head.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _fingerprint(
    geometry: HeadGeometry,
    options: TrainingConfig,
    vocabulary: DraftVocabulary,
    training: Sequence[TrainingSequence],
    heldout: Sequence[TrainingSequence],
) -> dict[str, Any]:
    """What must be equal for a run to resume from a checkpoint."""
    return {
        "head": geometry.as_dict(),
        "options": asdict(options),
        "vocabulary": int((vocabulary.target_ids * torch.arange(vocabulary.size)).sum()),
        "training": digest(training),
        "heldout": digest(heldout),
    }
