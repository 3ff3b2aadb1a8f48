"""Writes the README of a trained head: its target, its training and its measured acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...configs.training import TrainJob
from .dataset import TrainingSequence
from .head import HeadGeometry
from .vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Facts:
    job: TrainJob
    geometry: HeadGeometry
    vocabulary: DraftVocabulary
    training: Sequence[TrainingSequence]
    heldout: Sequence[TrainingSequence]
    acceptance_length: float  # on held-out greedy replies, at the step that was kept
    best_step: int
    num_steps: int


def write_model_card(folder: Path, facts: Facts) -> None:
    """Write README.md in `folder`, which holds model.safetensors."""
    (folder / "README.md").write_text(_card(folder, facts), encoding="utf-8")


def _card(folder: Path, facts: Facts) -> str:
    job, geometry, vocabulary = facts.job, facts.geometry, facts.vocabulary
    size = (folder / "model.safetensors").stat().st_size / 1e6
    reply, training = job.reply, job.training
    temperatures = ", ".join(f"{t:g}" for t in reply.temperatures)
    return f"""# EAGLE-3 head for {job.target_name}

A drafter for speculative decoding: it proposes tokens, and the target verifies them. It cannot be
used alone, and it does not change the target's output.

    slipstream serve MODEL -sc '{{"method":"eagle3","model":"{folder.name}"}}'

## Shape

One decoder layer, hidden size {geometry.hidden_size}, MLP {geometry.intermediate_size},
{geometry.num_heads} heads of {geometry.head_dim} ({geometry.num_kv_heads} for keys and values),
draft vocabulary {vocabulary.size} of {vocabulary.vocab_size} tokens,
auxiliary hidden states after layers
{", ".join(map(str, geometry.taps))}. {geometry.num_parameters() / 1e6:.2f} M parameters,
{size:.1f} MB in bfloat16. The embeddings are the target's and are not stored.

## Data

The target's own replies to {len(facts.training)} prompts ({_domains(facts.training)}), written by
this project's engine at temperatures {temperatures}, at most {reply.max_reply_tokens} tokens each.
The draft vocabulary covers {vocabulary.coverage:.2%} of the tokens in them.
Held out: greedy replies to {len(facts.heldout)} prompts ({_domains(facts.heldout)}).

## Training

Training-time test over {training.num_speculative_tokens} drafts, soft cross-entropy against the
target, AdamW at {training.learning_rate:g} with warm-up and cosine, batches of
{training.batch_tokens} tokens. The weights of step {facts.best_step} of {facts.num_steps} were
kept, which were best on the held-out replies.

    {job.command}

## Acceptance

During training, teacher-forced on the held-out replies at temperature 0 with
{training.num_speculative_tokens} drafts: **{facts.acceptance_length:.2f}** tokens per verify step,
including the target's own. `slipstream bench acceptance` measures it in the engine.
`training.png` plots the run.
"""


def _domains(sequences: Sequence[TrainingSequence]) -> str:
    counts = Counter(sequence.domain or "unnamed" for sequence in sequences)
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
