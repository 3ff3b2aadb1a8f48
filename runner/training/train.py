"""The training process: loads the target, generates replies, trains a head on them and exports it.

Run as `python -m slipstream.runner.training.train JOB`, where the file JOB holds a `TrainJob`.
Every part stores its results in the job's folder, so the same command resumes an interrupted run.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from tqdm import tqdm

from ...configs.logs import share_bars_between_threads
from ...configs.training import TrainJob
from ...speculators.training.dataset import TrainingSequence
from ...speculators.training.export import Verifier, save_head
from ...speculators.training.head import HeadGeometry, TrainingHead, check_taps, default_taps
from ...speculators.training.model_card import Facts, write_model_card
from ...speculators.training.plot import plot_training
from ...speculators.training.trainer import Evaluation, Trainer
from ...speculators.training.vocabulary import (
    DraftVocabulary,
    choose_draft_vocabulary,
    count_tokens,
)
from ..engine.worker import sentence
from ..errors import RunnerError
from .data import TargetReader, TrainingEngine, build_training_engine, head_geometry
from .text import ReplyFile, ReplyOptions, TrainingPrompt, invent_prompts, write_replies

STOPPED = 130  # exit status after a signal


class TrainingRun:
    """One training job, from prompts to the exported head."""

    def __init__(self, job: TrainJob) -> None:
        self.job = job
        self.folder = Path(job.folder)
        self.work = self.folder / "work"
        self.is_stopping = False
        self._trainer: Trainer | None = None

    def stop(self) -> None:
        """Ask `run` to return soon; all results so far stay on disk. Safe in a signal handler."""
        self.is_stopping = True
        if self._trainer is not None:
            self._trainer.stop()

    def run(self) -> int:
        """Run the job and return the exit status."""
        target = self._load_target()
        try:
            prompts = self._prompts(target)
            heldout, training = self._replies(target, prompts)
            if self.is_stopping:
                return self._stopped()
            trainer, vocabulary = self._prepare(target, training, heldout)
            began = trainer.resume()
            if began:
                _say(f"resuming at step {trainer.state.step} of {trainer.total_steps}")
            trainer.run(lambda evaluation: self._report(trainer, vocabulary, evaluation))
            if not trainer.state.done:
                return self._stopped()
            self._finish(trainer, vocabulary, training, heldout)
            return 0
        finally:
            target.engine.shutdown()

    # --- parts ------------------------------------------------------------------------------------

    def _load_target(self) -> TrainingEngine:
        _say(f"loading {self.job.target_name}")
        target = build_training_engine(self.job.config, lambda _: None)
        layers = int(target.target_config.num_hidden_layers)
        self._taps = self.job.head.aux_hidden_state_boundaries or default_taps(layers)
        check_taps(self._taps, layers)
        architectures = getattr(target.target_config, "architectures", None) or ()
        self._verifier = Verifier(self.job.target_name, tuple(architectures))
        # The number of requests in flight: enough to fill every step.
        self._window = 2 * target.engine.ready.max_num_seqs
        return target

    def _reply_options(self, target: TrainingEngine) -> ReplyOptions:
        reply = self.job.reply
        ready = target.engine.ready
        return ReplyOptions(
            reply.max_reply_tokens,
            reply.temperatures,
            tuple({*self.job.stop_token_ids, *ready.eos_token_ids}),
            self.job.training.train_seed,
            min(reply.max_sequence_tokens, ready.max_model_len),
        )

    def _prompts(self, target: TrainingEngine) -> list[TrainingPrompt]:
        """The job's prompts, followed by those that the target invents."""
        prompts = _read_prompts(self.work / "prompts.jsonl")
        count = self.job.reply.invent_prompts
        if not count:
            return prompts
        path = self.work / "invented.jsonl"
        if not path.exists():
            invented = invent_prompts(
                target.engine,
                self.job.user_prefix,
                self.job.user_suffix,
                count,
                self._reply_options(target),
                frozenset(self.job.control_ids),
                self._window,
            )
            found = list(tqdm(invented, desc="invent prompts", total=count, disable=None))
            write_prompts(path, found)
        return prompts + _read_prompts(path)

    def _replies(
        self, target: TrainingEngine, prompts: list[TrainingPrompt]
    ) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
        """Generate replies; return (held-out, training) sequences that are long enough for a
        draft."""
        file = ReplyFile(self.work / "replies.jsonl")
        limit = self.job.reply.max_generate_minutes
        began = time.monotonic()
        tokens, done = 0, len(file.sequences)
        with tqdm(total=len(prompts), initial=done, desc="replies", disable=None) as bar:

            def on_reply(length: int) -> None:
                nonlocal tokens
                tokens += length
                bar.update()
                bar.set_postfix_str(f"{tokens / (time.monotonic() - began):.0f} tokens/s")

            def should_stop() -> bool:
                late = limit is not None and time.monotonic() - began > 60 * limit
                return self.is_stopping or late

            options = self._reply_options(target)
            write_replies(
                target.engine, prompts, options, file, self._window, on_reply, should_stop
            )
        usable = {
            i: s
            for i, s in sorted(file.sequences.items())
            if len(s.token_ids) >= s.prompt_length + 3
        }
        heldout = [s for i, s in usable.items() if prompts[i].is_heldout]
        training = [s for i, s in usable.items() if not prompts[i].is_heldout]
        if not self.is_stopping and not (heldout and training):
            raise RunnerError(
                f"training needs replies of at least 3 tokens to learn from and held-out ones, but "
                f"there are {len(training)} and {len(heldout)}"
            )
        return heldout, training

    def _prepare(
        self,
        target: TrainingEngine,
        training: list[TrainingSequence],
        heldout: list[TrainingSequence],
    ) -> tuple[Trainer, DraftVocabulary]:
        head, config = self.job.head, self.job.training
        geometry = head_geometry(
            target.target_config,
            head.draft_vocab_size,
            head.head_intermediate_size,
            self._taps,
            target.engine.ready.max_model_len,
        )
        replies = (s.token_ids[s.prompt_length :] for s in training)
        counts = count_tokens(replies, geometry.vocab_size)
        vocabulary = choose_draft_vocabulary(counts, geometry.draft_vocab_size)
        reader = TargetReader(target.parts, self._taps)
        learner = TrainingHead(geometry, config.train_seed)
        learner.start_from(*reader.starting_head(vocabulary.target_ids))
        _say(
            f"{len(training)} replies ({sum(int(c) for c in counts)} tokens), {len(heldout)} held "
            f"out; head of {geometry.num_parameters() / 1e6:.2f} M parameters, draft vocabulary "
            f"{vocabulary.size} of {vocabulary.vocab_size} ({vocabulary.coverage:.1%} of the text)"
        )
        device = torch.device(target.engine.ready.device)
        self._trainer = Trainer(
            learner, vocabulary, reader, training, heldout, config, self.work, device
        )
        if self.is_stopping:
            self._trainer.stop()
        return self._trainer, vocabulary

    def _report(
        self, trainer: Trainer, vocabulary: DraftVocabulary, evaluation: Evaluation
    ) -> None:
        """Export the head if it is the best so far, and plot the run."""
        if trainer.state.best_step == trainer.state.step:
            self._export(trainer.head.geometry, trainer, vocabulary)
        plot_training(trainer.log, self.folder / "training.png")

    def _export(
        self, geometry: HeadGeometry, trainer: Trainer, vocabulary: DraftVocabulary
    ) -> None:
        save_head(
            self.folder,
            trainer.state.best_weights,
            geometry,
            vocabulary,
            self._verifier,
            self.job.training.num_speculative_tokens,
            self.job.head.export_format,
        )

    def _finish(
        self,
        trainer: Trainer,
        vocabulary: DraftVocabulary,
        training: list[TrainingSequence],
        heldout: list[TrainingSequence],
    ) -> None:
        geometry = trainer.head.geometry
        self._export(geometry, trainer, vocabulary)
        plot_training(trainer.log, self.folder / "training.png")
        length, step = trainer.state.best, trainer.state.best_step
        write_model_card(
            self.folder,
            Facts(
                self.job, geometry, vocabulary, training, heldout, length, step, trainer.state.step
            ),
        )
        _say(
            f"wrote {self.folder}: held-out acceptance length {length:.2f} at temperature 0 "
            f"(step {step} of {trainer.state.step})"
        )

    def _stopped(self) -> int:
        _say("stopped; run the same command again to resume")
        return STOPPED


def _read_prompts(path: Path) -> list[TrainingPrompt]:
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        ids, domain, is_heldout = json.loads(line)
        prompts.append(TrainingPrompt(tuple(ids), domain, is_heldout))
    return prompts


def write_prompts(path: Path, prompts: list[TrainingPrompt]) -> None:
    """Write one [ids, domain, is held out] per line, the format that the parent process uses,
    too."""
    rows = ([list(p.token_ids), p.domain, p.is_heldout] for p in prompts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)


def main(argv: list[str], run: Callable[[TrainingRun], int] = TrainingRun.run) -> int:
    """Entry point of the process. Expected errors become one sentence and exit status 1."""
    job = msgspec.json.decode(Path(argv[1]).read_bytes(), type=TrainJob)
    training = TrainingRun(job)
    share_bars_between_threads()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: training.stop())
    try:
        return run(training)
    except (RunnerError, ValueError, OSError, torch.OutOfMemoryError) as error:
        print(f"slipstream train: error: {sentence(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
