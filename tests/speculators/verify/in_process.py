"""A tiny engine that runs in the test's own process, behind the interface that `verify` uses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import AbortRequests, AddRequest, RequestOutput

from ..eagle_oracle import head_weights, save_head
from ..tiny_engine import TinyEngine, save_llama

V = 24


class InProcess:
    """Submits requests to a `TinyEngine`, which steps whenever a stream is empty."""

    def __init__(self, engine: TinyEngine) -> None:
        self.tiny = engine
        self._streams: dict[str, deque[RequestOutput]] = {}

    def submit(self, request: AddRequest) -> _Stream:
        """Queue a request."""
        self._streams[request.request_id] = queue = deque[RequestOutput]()
        self.tiny.engine.handle([request])
        return _Stream(self, queue)

    def abort(self, request_id: str) -> None:
        """Forget a request."""
        if self._streams.pop(request_id, None) is not None:
            self.tiny.engine.handle([AbortRequests([request_id])])

    def step(self) -> None:
        """Run one step."""
        for outputs in self.tiny.engine.step():
            for output in outputs.outputs:
                if (queue := self._streams.get(output.request_id)) is not None:
                    queue.append(output)


class _Stream:
    def __init__(self, engine: InProcess, queue: deque[RequestOutput]) -> None:
        self._engine, self._queue = engine, queue

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            await asyncio.sleep(0)
            while not self._queue:
                self._engine.step()
                await asyncio.sleep(0)
            output = self._queue.popleft()
            yield output
            if output.finish_reason is not None:
                return

    def drain(self) -> list[RequestOutput]:
        """Part of the protocol; not used here."""
        raise NotImplementedError

    async def follow(self, take: Callable[[list[RequestOutput]], bool]) -> None:
        """Part of the protocol; not used here."""
        raise NotImplementedError


def save_pair(folder: Path, rare: bool = False) -> tuple[Path, Path]:
    """A target with two layers and 24 tokens, and a random EAGLE-3 head that drafts some of them.

    With `rare` these are six tokens that the target hardly ever likes."""
    target = save_llama(folder / "target", layers=2, std=0.15, vocab_size=V)
    ids = torch.arange(3, V, 4 if rare else 2)
    weights = head_weights(eagle3=True, vocab_size=V, draft_vocab_size=len(ids))
    weights["lm_head.weight"] *= 0.3
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    head = save_head(
        folder / "head", weights, True, vocab_size=V, draft_vocab_size=len(ids),
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )  # fmt: skip
    if rare:
        model = LlamaForCausalLM.from_pretrained(target)
        with torch.no_grad():
            model.lm_head.weight *= 2.4
            model.lm_head.weight[ids] = 0.0
        model.save_pretrained(target)
    return target, head


def start(target: Path, method: str, drafter: Path | None, **changes: Any) -> InProcess:
    """An engine with many slots and greedy drafts."""
    options: dict[str, Any] = {"num_speculative_tokens": 2, "draft_sampling": "greedy"}
    options |= {"watchdog": False} | changes
    config = SpeculativeConfig(method, None if drafter is None else str(drafter), **options)
    scheduler = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    cache = {"num_gpu_blocks_override": 4000}
    return InProcess(TinyEngine(target, config, scheduler=scheduler, cache=cache))
