"""Compares replayed CUDA graphs with eager steps at a real model's widths, by text and likelihood.

Run `python tests/lab/replay_text.py MODEL [--back-end NAME] [--requests N] [--tokens N]
[--kv-cache-dtype fp8] [--drafts K]` with a folder from `shapes.py`; the weights are random, and the
same in both engines. Each engine runs in a process of its own, so that they need the memory of one.
Requests have prompts of different lengths, long ones too. The last line is JSON: how many texts are
equal; where the others part, how far apart the eager engine saw the two tokens (a near-tie is a few
hundredths); and the largest difference of a token's log probability before that. `drafted` compares
the replays with K drafts of the module for multi-token prediction in the same way. The status is 1
if a text parts at more than --tie.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
from dataclasses import dataclass
from typing import Any

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    GraphConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.runner.engine.engine import build_engine
from slipstream.runner.messages import AddRequest, SamplingParams, TokenLogprobs

_RANKS = 20  # of the likeliest tokens, to find the other engine's token among


@dataclass
class Text:
    """One request's tokens, their log probabilities, and those of the likeliest at each place."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]

    def at(self, index: int, token: int) -> float:
        """The log probability of a token at a place; -inf if it is not among the likeliest."""
        found = self.logprobs[index]
        pairs = zip(found.top_ids, found.top_logprobs, strict=True)
        return dict(pairs).get(token, float("-inf"))


def main() -> int:
    """Run the engines one after the other and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--back-end", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--tie", type=float, default=0.25)
    parser.add_argument("--overrides", default=None, help="of the config, as JSON")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    eager = _in_process(args, enforce_eager=True, drafts=0)
    found = {"replayed": _compare(eager, _in_process(args, enforce_eager=False, drafts=0))}
    if args.drafts:
        texts = _in_process(args, enforce_eager=False, drafts=args.drafts)
        found["drafted"] = _compare(eager, texts)
    print(json.dumps(found))
    return int(any(one["largest_gap"] > args.tie for one in found.values()))


def _in_process(args: argparse.Namespace, enforce_eager: bool, drafts: int) -> list[Text]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_texts, (args, enforce_eager, drafts))


def _texts(args: argparse.Namespace, enforce_eager: bool, drafts: int) -> list[Text]:
    speculative = SpeculativeConfig()
    if drafts:
        speculative = SpeculativeConfig(
            method="mtp", num_speculative_tokens=drafts, load_format="dummy", watchdog=False
        )
    engine = build_engine(
        Config(
            model=ModelConfig(
                model=args.model, load_format="dummy", device=args.device, max_model_len=8192,
                hf_overrides=args.overrides,
            ),
            scheduler=SchedulerConfig(max_num_seqs=args.requests, max_num_batched_tokens=4096),
            cache=CacheConfig(
                kv_cache_memory_bytes=4 << 30 if args.device == "cuda" else 200 << 20,
                kv_cache_dtype=args.kv_cache_dtype,
            ),
            speculative=speculative,
            graph=GraphConfig(attention_backend=args.back_end, enforce_eager=enforce_eager),
        ),
        lambda _: None,
    )  # fmt: skip
    rng = random.Random(0)
    lengths = [rng.choice((7, 130, 600, args.longest)) for _ in range(args.requests)]
    vocab = 1000  # ids that every shape has
    sampling: dict[str, Any] = {"temperature": 0.0, "logprobs": _RANKS}
    engine.handle(
        [
            AddRequest(
                str(index),
                [rng.randrange(vocab) for _ in range(length)],
                SamplingParams(seed=0, max_tokens=args.tokens, **sampling),
            )
            for index, length in enumerate(lengths)
        ]
    )
    texts = [Text([], []) for _ in lengths]
    while engine.has_work():
        for step in engine.step():
            for output in step.outputs:
                assert output.error is None, output.error
                text = texts[int(output.request_id)]
                text.tokens.extend(output.token_ids)
                text.logprobs.extend(output.logprobs or [])
    engine.shutdown()
    return texts


def _compare(eager: list[Text], other: list[Text]) -> dict[str, float]:
    equal, gaps, differences = 0, [0.0], [0.0]
    for mine, theirs in zip(eager, other, strict=True):
        assert len(mine.tokens) == len(theirs.tokens)
        pairs = enumerate(zip(mine.tokens, theirs.tokens, strict=True))
        part = next((index for index, (a, b) in pairs if a != b), None)
        equal += part is None
        for index, token in enumerate(mine.tokens[:part]):
            differences.append(abs(mine.at(index, token) - theirs.at(index, token)))
        if part is not None:
            best, second = (text.tokens[part] for text in (mine, theirs))
            gaps.append(mine.at(part, best) - mine.at(part, second))
    return {
        "texts": len(eager),
        "equal": equal,
        "largest_gap": round(max(gaps), 4),
        "largest_difference": round(max(differences), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
