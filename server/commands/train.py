"""`slipstream train`: train a drafter for a model on the model's own replies.

This process reads, renders and tokenizes the prompts. A child process, which has torch, generates
the replies and trains; it resumes what an earlier run of the same command left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...configs.load import add_flag, load_config, read_flag
from ...configs.options import ConfigError, all_options, section_options
from ...configs.training import HeadConfig, ReplyConfig, TrainingConfig, TrainJob, check_training

if TYPE_CHECKING:
    from ..drafters.training_prompts import Prompt

SUMMARY = "train a drafter for a model on the model's own replies"
METHODS = ("eagle3",)
_BUILT_IN = "builtin"
_BUILT_IN_COUNT = 12000
_TARGET = (
    *("model", "tokenizer", "revision", "dtype", "load_format", "max_model_len", "device"),
    *("hf_overrides", "block_size", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    *("max_num_seqs", "max_num_batched_tokens", "cudagraph_mode", "enforce_eager"),
    *("attention_backend", "chat_template", "log_level"),
)
_SECTIONS = {"reply": ReplyConfig, "head": HeadConfig, "training": TrainingConfig}
# Defaults that differ from serving's: training the head needs GPU memory, too.
_DEFAULTS = {"gpu_memory_utilization": "0.5", "max_num_seqs": "64"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        metavar="FILE",
        default=_BUILT_IN,
        help="JSONL file of prompts (chats or texts), or builtin for the package's own (default)",
    )
    parser.add_argument(
        "--num-prompts",
        metavar="INT",
        help=f"number of built-in prompts to use (default: {_BUILT_IN_COUNT})",
    )
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="folder to write the drafter to"
    )
    parser.add_argument(
        "--method",
        metavar="{eagle3}",
        default="eagle3",
        help="drafting method to train for (default: eagle3)",
    )
    parser.add_argument(
        "--prepare-only",
        action="store_true",
        help="only write DIR/work/job.json, for `python -m slipstream.runner.training.train`",
    )
    target = parser.add_argument_group("target", "The model, as for `slipstream serve`.")
    for name in _TARGET:
        option = all_options()[name]
        add_flag(target, dataclasses.replace(option, default=_DEFAULTS.get(name, option.default)))
    for section, cls in _SECTIONS.items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        for option in section_options(section, cls):
            add_flag(group, option)


def run(args: argparse.Namespace) -> int:
    """Prepare the job, then train in a child process; returns the exit status."""
    given = vars(args)
    if args.method not in METHODS:
        raise ConfigError(f"--method must be one of {', '.join(METHODS)}, not {args.method!r}")
    job = _job(given)
    if problem := check_training(job):
        raise ConfigError(problem)
    from ..chat_templates.chat_template import ChatTemplateError
    from ..drafters.training_prompts import PromptError
    from ..text.tokenizer import TokenizerLoadError

    try:
        path = _prepare(job, given)
    except (PromptError, TokenizerLoadError, ChatTemplateError) as error:
        raise ConfigError(str(error).rstrip(".")) from None
    except OSError as error:
        raise ConfigError(f"--output {args.output}: {error.strerror or error}") from None
    if args.prepare_only:
        print(f"wrote {path}")
        return 0
    return _train(path)


def _job(given: dict[str, Any]) -> TrainJob:
    """The job as the flags describe it; `_prepare` adds what depends on the tokenizer."""
    flags: dict[str, Any] = dict(_DEFAULTS)
    flags |= {name: given[name] for name in _TARGET if name in given}
    flags |= {"speculative_config": "off", "enable_prefix_caching": False}
    config = load_config(flags)
    sections: dict[str, Any] = {}
    for section, cls in _SECTIONS.items():
        sections[section] = cls(
            **{
                option.name: read_flag(option, given[option.name])
                for option in section_options(section, cls)
                if option.name in given
            }
        )
    return TrainJob(
        config=config,
        folder=str(Path(given["output"]).absolute()),
        target_name=str(given.get("model", config.server.served_model_name[0])),
        command=shlex.join(["slipstream", *sys.argv[1:]]),
        **sections,
    )


def _prepare(job: TrainJob, given: dict[str, Any]) -> Path:
    """Tokenize the prompts and write them and the job to the output folder.

    Returns the path of the job's file. Raises PromptError, TokenizerLoadError, ChatTemplateError or
    OSError."""
    from ..drafters.training_prompts import tokenize_prompts, user_frame
    from ..text.tokenizer import Tokenizer

    prompts = _read(given, job.training.train_seed)
    model = job.config.model
    tokenizer = Tokenizer.load(model.tokenizer or model.model, model.revision)
    template = tokenizer.load_template(job.config.server.chat_template)
    ids = tokenize_prompts(prompts, tokenizer, template)
    prefix: list[int] = []
    suffix: list[int] = []
    if job.reply.invent_prompts:
        prefix, suffix = user_frame(tokenizer, template)
    job = dataclasses.replace(
        job,
        stop_token_ids=tuple(sorted(tokenizer.eos_ids)),
        user_prefix=tuple(prefix),
        user_suffix=tuple(suffix),
        control_ids=tuple(sorted(tokenizer.special_ids | tokenizer.eos_ids)),
    )
    rows = zip(ids, prompts, strict=True)
    lines = [json.dumps([found, p.domain, p.is_heldout]) + "\n" for found, p in rows if found]
    return _write(job, "".join(lines))


def _read(given: dict[str, Any], seed: int) -> list[Prompt]:
    from ..drafters.training_prompts import (
        heldout_prompts,
        hold_out,
        read_prompts,
        training_prompts,
    )

    data, count = given["data"], given["num_prompts"]
    if data != _BUILT_IN:
        if count is not None:
            raise ConfigError("--num-prompts applies only to --data builtin")
        return hold_out(read_prompts(Path(data)), seed)
    number = _BUILT_IN_COUNT
    if count is not None:
        number = int(count) if count.isascii() and count.isdigit() else 0
        if number < 1:
            raise ConfigError(f"--num-prompts must be a positive integer, not {count!r}")
    return heldout_prompts() + training_prompts(number, seed)


def _write(job: TrainJob, prompts: str) -> Path:
    """Write the job and its prompts to the output folder; returns the path of the job's file.

    Raises ConfigError if the folder holds a run with another model, other prompts or replies."""
    import msgspec

    work = Path(job.folder) / "work"
    work.mkdir(parents=True, exist_ok=True)
    path = work / "job.json"
    if (work / "replies.jsonl").exists() or (work / "invented.jsonl").exists():
        earlier = msgspec.json.decode(path.read_bytes(), type=TrainJob)
        same = (work / "prompts.jsonl").read_text(encoding="utf-8") == prompts
        # A time limit changes the number of replies, not the replies.
        theirs, ours = (
            dataclasses.replace(j.reply, max_generate_minutes=None) for j in (earlier, job)
        )
        if not same or theirs != ours or earlier.config.model != job.config.model:
            raise ConfigError(
                f"--output {job.folder} contains a run with another model, other prompts or other "
                "reply settings; choose another folder, or remove its work/"
            )
    (work / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    path.write_bytes(msgspec.json.encode(job))
    return path


def _train(job: Path) -> int:
    """Run the training process; returns its exit status, or 128 + N if signal N killed it.

    SIGINT and SIGTERM do not end this process, but the child, which first saves a checkpoint."""
    package = __package__.partition(".")[0]
    paths = [str(Path(sys.modules[package].__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", f"{package}.runner.training.train", str(job)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    # Ctrl-C reaches both processes; SIGTERM reaches only this one, so it is passed on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = child.wait()
    return status if status >= 0 else 128 - status
