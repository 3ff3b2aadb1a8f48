"""Defines the options of a drafter's training, which become the flags of `slipstream train`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .schema import Config, option


@dataclass(frozen=True)
class ReplyConfig:
    """The target's replies, from which the head learns."""

    max_reply_tokens: int = option(256, "longest reply, in tokens, that the target generates")
    max_sequence_tokens: int = option(1024, "longest prompt plus reply, in tokens")
    temperatures: tuple[float, ...] = option(
        (0.0, 0.7, 1.0), "temperatures at which the target replies, in turn from prompt to prompt"
    )
    invent_prompts: int = option(
        0, "number of prompts that the target invents, in addition to those of --data"
    )
    max_generate_minutes: float | None = option(
        None, "start no new reply after this many minutes, and train on the replies so far"
    )


@dataclass(frozen=True)
class HeadConfig:
    """The shape of the head."""

    draft_vocab_size: int | None = option(
        None,
        "number of tokens that the head can draft, the most frequent in the replies;"
        " default: at most 32000",
    )
    head_intermediate_size: int | None = option(
        None, "width of the head's MLP; default: the target's"
    )
    aux_hidden_state_boundaries: tuple[int, ...] | None = option(
        None,
        "take the three auxiliary hidden states after these numbers of layers (0: the embeddings);"
        " default: 2, n/2 and n-3 of n",
    )
    export_format: str = option(
        "specforge",
        "format of the checkpoint (Slipstream and vLLM serve both, SGLang only specforge)",
        choices=("specforge", "speculators"),
    )


@dataclass(frozen=True)
class TrainingConfig:
    """The training run."""

    num_speculative_tokens: int = option(4, "draft length K that training unrolls")
    epochs: float = option(4.0, "passes over the replies")
    max_steps: int | None = option(None, "number of optimizer steps, instead of --epochs")
    max_train_minutes: float | None = option(
        None, "end training after this many minutes; the learning rate decays to fit"
    )
    batch_tokens: int = option(8192, "tokens in a batch, including padding")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    warmup: float = option(0.02, "fraction of the run during which the learning rate rises")
    weight_decay: float = option(0.01, "weight decay of the weight matrices")
    clip: float = option(0.5, "norm above which the gradient is clipped")
    loss_decay: float = option(0.8, "base of the loss weights: draft k weighs this to the power k")
    train_dtype: str = option(
        "auto",
        "data type of the forward pass (auto: bfloat16 on a GPU); weights and optimizer state stay"
        " in float32",
        choices=("auto", "float32", "bfloat16"),
    )
    train_seed: int = option(0, "random seed of weights, replies and the order of batches")
    eval_every: int = option(200, "steps between evaluations on the held-out replies")
    patience: int = option(
        8, "stop training after this many evaluations without improvement; 0 = never"
    )
    log_every: int = option(10, "steps between log lines")
    checkpoint_every: int = option(200, "steps between checkpoints")


@dataclass(frozen=True)
class TrainJob:
    """Everything that the training process needs; in token ids, because it has no tokenizer."""

    config: Config  # the target's, with speculation off
    folder: str  # output folder of the head; its `work/` holds prompts, replies and checkpoint
    target_name: str
    command: str  # the command line, for the model card
    stop_token_ids: tuple[int, ...] = ()
    user_prefix: tuple[int, ...] = ()  # tokens before a user's message; starts invented prompts
    user_suffix: tuple[int, ...] = ()  # tokens after a user's message; ends invented prompts
    control_ids: tuple[int, ...] = ()  # tokens that an invented prompt may not contain
    reply: ReplyConfig = field(default_factory=ReplyConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


def check_training(job: TrainJob) -> str | None:
    """Return what is wrong with the job as one sentence without its full stop, or None."""
    reply, head, training = job.reply, job.head, job.training
    positive = {
        "--max-reply-tokens": reply.max_reply_tokens,
        "--num-speculative-tokens": training.num_speculative_tokens,
        "--epochs": training.epochs,
        "--batch-tokens": training.batch_tokens,
        "--learning-rate": training.learning_rate,
        "--clip": training.clip,
        "--loss-decay": training.loss_decay,
        "--eval-every": training.eval_every,
        "--log-every": training.log_every,
        "--checkpoint-every": training.checkpoint_every,
    }
    optional = {
        "--max-generate-minutes": reply.max_generate_minutes,
        "--draft-vocab-size": head.draft_vocab_size,
        "--head-intermediate-size": head.head_intermediate_size,
        "--max-steps": training.max_steps,
        "--max-train-minutes": training.max_train_minutes,
    }
    positive |= {flag: value for flag, value in optional.items() if value is not None}
    for flag, value in positive.items():
        if not value > 0:
            return f"{flag} must be above 0, not {value}"
    if training.num_speculative_tokens > 16:
        return f"--num-speculative-tokens must be at most 16, not {training.num_speculative_tokens}"
    if not reply.temperatures or any(not 0 <= t <= 2 for t in reply.temperatures):
        return "--temperatures must be numbers from 0 to 2"
    if not 0 <= training.warmup < 1:
        return f"--warmup must be at least 0 and below 1, not {training.warmup}"
    if training.patience < 0 or training.weight_decay < 0 or reply.invent_prompts < 0:
        return "--patience, --weight-decay and --invent-prompts must not be negative"
    return None
