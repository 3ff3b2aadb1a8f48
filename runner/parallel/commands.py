"""What the first rank tells the others, and what they answer: plain data, in msgpack.

A step is one command of a few hundred bytes. The other ranks answer each step with a digest of its
tokens, which proves that all ranks draw the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import msgspec

from ..scheduling.plan import RowResult, StepPlan

if TYPE_CHECKING:
    import numpy


class Execute(msgspec.Struct, tag=True):
    """Run a whole step."""

    plan: StepPlan


class Forward(msgspec.Struct, tag=True):
    """Run a step up to its logits; `Sample` follows."""

    plan: StepPlan


class Sample(msgspec.Struct, tag=True):
    """Run the rest of the step that was forwarded, under its grammars' masks."""

    num_rows: int  # of the mask, which is [num_rows, ...] int32; 0 = no mask
    mask: bytes = b""


class FillTokens(msgspec.Struct, tag=True):
    """See `ModelRunner.fill_tokens`."""

    num_slots: int
    num_drafts: int


class Do(msgspec.Struct, tag=True):
    """Call a method of the model runner that takes nothing: one of `NAMES`."""

    name: str


class LoadDrafter(msgspec.Struct, tag=True):
    """Load another drafter beside the running one, in a thread; `DrafterLoaded` follows."""

    number: int
    model: str


class SwapDrafter(msgspec.Struct, tag=True):
    """Swap the weights of the running drafter and the loaded one before the next step."""


class DropDrafter(msgspec.Struct, tag=True):
    """Forget the drafter that is loaded or being loaded."""


class Stop(msgspec.Struct, tag=True):
    """Finish the steps in flight, then exit."""


Command = (
    Execute | Forward | Sample | FillTokens | Do | LoadDrafter | SwapDrafter | DropDrafter | Stop
)
NAMES = ("warm_up", "capture", "synchronize")


class StepDigest(msgspec.Struct, tag=True):
    rank: int
    step_id: int
    digest: int


class DrafterLoaded(msgspec.Struct, tag=True):
    """A rank's answer to `LoadDrafter`; `fault` says in a sentence why it failed, if it did."""

    rank: int
    number: int
    fault: str


class RankFault(msgspec.Struct, tag=True):
    """Why a rank ends: one sentence."""

    rank: int
    message: str


Answer = StepDigest | DrafterLoaded | RankFault

encoder = msgspec.msgpack.Encoder()
command_decoder = msgspec.msgpack.Decoder(Command)
answer_decoder = msgspec.msgpack.Decoder(Answer)


def plan_digest(plan: StepPlan) -> int:
    """The part of a step's digest that says what the step does: ranks that run different steps
    would still draw the same tokens, because each contributes a part of the logits."""
    return crc32(encoder.encode(plan))


def digest_of(results: Sequence[RowResult], plan: int) -> int:
    """A number of 32 bits that two ranks share, as good as surely, only if their results do.

    `plan` is the `plan_digest` of their step.
    """
    told = [(r.token_ids, r.num_draft_tokens, r.has_nan) for r in results]
    return crc32(encoder.encode(told), plan)


class Digests:
    """Compares the ranks' digests of each step, in whatever order they come."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._found: dict[int, dict[int, int]] = {}  # step id -> rank -> digest

    def note(self, rank: int, step_id: int, digest: int) -> str | None:
        """Note a rank's digest; returns a sentence if the ranks computed different tokens."""
        with self._lock:
            found = self._found.setdefault(step_id, {})
            found[rank] = digest
            if len(found) < self._size:
                return None
            del self._found[step_id]
        odd = sorted(other for other in found if found[other] != found[0])
        if not odd:
            return None
        return f"tensor-parallel rank {', '.join(map(str, odd))} computed other tokens than rank 0"


def packed_mask(mask: numpy.ndarray | None) -> Sample:
    """The command with a grammar's mask [L, W] int32."""
    return Sample(0) if mask is None else Sample(len(mask), mask.astype("int32").tobytes())


def unpacked_mask(sample: Sample) -> numpy.ndarray | None:
    """The mask of a command, [L, W] int32."""
    if not sample.num_rows:
        return None
    import numpy

    return numpy.frombuffer(sample.mask, numpy.int32).reshape(sample.num_rows, -1)
