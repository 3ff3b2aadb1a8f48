"""Chooses an engine for each request: of the least loaded, that with most of its prompt cached.

The server cannot see the engines' caches, so it remembers the prompts that it sent to each. Pure
Python that knows no processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_TOKENS = 64  # of a block of a prompt that is remembered
_MOST_BLOCKS = 1 << 16  # remembered for each engine: four million tokens
_SLACK_SHARE = 8  # an engine with up to 1 / 8 more open requests counts as least loaded, too


class Router:
    """Remembers prompts by engine. An engine that has restarted must be `forget`ten."""

    def __init__(self, count: int) -> None:
        # hash of a prompt up to the end of a block, by engine; the most recently sent last
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
        self._turn = 0  # the engine that is preferred if all else is equal

    def choose(
        self, prompt: Sequence[int], salt: str, num_open: Sequence[int | None]
    ) -> int | None:
        """The engine for a prompt; None if none is ready. Remembers that it gets this prompt.

        `num_open`: the open requests of each engine, None for those that are not ready.
        """
        loads = [load for load in num_open if load is not None]
        if not loads:
            return None
        most = min(loads) + max(1, min(loads) // _SLACK_SHARE)
        blocks = _blocks(prompt, salt)
        best, chosen = (-1, 0, 0), 0
        for engine, load in enumerate(num_open):
            if load is None or load > most:
                continue
            turn = (engine - self._turn) % len(num_open)
            rank = (self._num_known(engine, blocks), -load, -turn)
            if rank > best or best[0] < 0:
                best, chosen = rank, engine
        self._turn = (chosen + 1) % len(num_open)
        self._remember(chosen, blocks)
        return chosen

    def forget(self, engine: int) -> None:
        """Forget the prompts of an engine whose cache is empty."""
        self._sent[engine].clear()

    def _num_known(self, engine: int, blocks: Sequence[int]) -> int:
        sent = self._sent[engine]
        return next((i for i, block in enumerate(blocks) if block not in sent), len(blocks))

    def _remember(self, engine: int, blocks: Sequence[int]) -> None:
        sent = self._sent[engine]
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > _MOST_BLOCKS:
            sent.popitem(last=False)


def _blocks(prompt: Sequence[int], salt: str) -> list[int]:
    """The hashes of the prompt up to the end of each whole block."""
    found, last = [], hash(salt)
    for start in range(0, len(prompt) - _TOKENS + 1, _TOKENS):
        last = hash((last, *prompt[start : start + _TOKENS]))
        found.append(last)
    return found
