"""The frozen sections of a drafter's training, of which `slipstream train` makes its flags."""

from __future__ import annotations

from dataclasses import dataclass, field

from .schema import Config, option


@dataclass(frozen=True)
class ReplyConfig:
    """The target's replies, from which the head learns."""

    max_reply_tokens: int = option(256, "longest reply that the target writes")
    max_sequence_tokens: int = option(1024, "longest prompt and reply together")
    temperatures: tuple[float, ...] = option(
        (0.0, 0.7, 1.0), "temperatures of the replies, prompt by prompt in turn"
    )
    invent_prompts: int = option(0, "prompts that the target makes up itself, beside --data's")
    max_generate_minutes: float | None = option(
        None, "begin no new reply after so many minutes; train on what there is"
    )


@dataclass(frozen=True)
class HeadConfig:
    """The head's shape; what is not given is the target's."""

    draft_vocab_size: int | None = option(
        None, "tokens that the head can draft, the target's most frequent; default: at most 32000"
    )
    head_intermediate_size: int | None = option(None, "width of the head's MLP")
    aux_hidden_state_boundaries: tuple[int, ...] | None = option(
        None, "three taps as boundaries 0..n (stream after b layers); default: 2, n/2, n-3"
    )
    export_format: str = option(
        "specforge",
        "the checkpoint's form; both can be served here and by vLLM, SGLang reads the first",
        choices=("specforge", "speculators"),
    )


@dataclass(frozen=True)
class TrainingConfig:
    """The training run."""

    num_speculative_tokens: int = option(4, "drafts that training unrolls (K)")
    epochs: float = option(4.0, "passes over the replies")
    max_steps: int | None = option(None, "optimizer steps, in place of --epochs")
    max_train_minutes: float | None = option(
        None, "length of training; the learning rate's schedule ends with it"
    )
    batch_tokens: int = option(8192, "tokens in a batch, padding included")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    warmup: float = option(0.02, "share of the run in which the learning rate rises")
    weight_decay: float = option(0.01, "weight decay of the matrices")
    clip: float = option(0.5, "largest norm of the gradient")
    loss_decay: float = option(0.8, "weight of draft k in the loss: this to the power of k")
    train_dtype: str = option(
        "auto",
        "of the forward pass: auto is bfloat16 on a GPU; weights and optimizer stay in float32",
        choices=("auto", "float32", "bfloat16"),
    )
    train_seed: int = option(0, "seed of weights, replies and the order of batches")
    eval_every: int = option(200, "steps between evaluations on the held-out replies")
    patience: int = option(8, "evaluations without progress before training ends; 0 = never")
    log_every: int = option(10, "steps between lines in the log")
    checkpoint_every: int = option(200, "steps between checkpoints")


@dataclass(frozen=True)
class TrainJob:
    """Everything that the training process is told; in token space, since it never sees text."""

    config: Config  # of the target, without a drafter
    folder: str  # where the head goes; `work/` in it holds prompts, replies and checkpoint
    target_name: str
    command: str  # for the model card
    stop_token_ids: tuple[int, ...] = ()
    user_prefix: tuple[int, ...] = ()  # of a chat, before a user's words; for invented prompts
    user_suffix: tuple[int, ...] = ()  # behind them
    control_ids: tuple[int, ...] = ()  # that no invented prompt may hold
    reply: ReplyConfig = field(default_factory=ReplyConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


def check_training(job: TrainJob) -> str | None:
    """What is wrong with a job, as one sentence, or None."""
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
        return f"--warmup must be from 0 to below 1, not {training.warmup}"
    if training.patience < 0 or training.weight_decay < 0 or reply.invent_prompts < 0:
        return "--patience, --weight-decay and --invent-prompts must not be negative"
    return None
