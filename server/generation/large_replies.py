"""Encodes large replies piece by piece, so that no call holds Python's global lock for long.

Running the encoder in a thread is not enough: it is C code that holds the lock until it is done,
and the event loop waits for the lock.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..off_loop import off_loop
from ..openai_types.replies import ChatTokenLogprob, encode

PIECE_VALUES = 2_000  # values per call of the encoder, which then takes about 1 ms
_CHARACTERS = 50  # characters of text that count as one value


async def encode_reply(reply: msgspec.Struct) -> bytes:
    """The reply as JSON; a large reply is encoded off the event loop."""
    if _num_values(reply) <= PIECE_VALUES:
        return encode(reply)
    return await off_loop(encode_in_pieces, reply)


def encode_in_pieces(reply: msgspec.Struct) -> bytes:
    """The same bytes as `encode`, from many calls of about 1 ms each and a final copy."""
    return encode(_with_pieces(reply))


def _with_pieces(value: Any) -> Any:
    """The value with its long lists replaced by their encoded bytes."""
    if isinstance(value, msgspec.Struct):
        found = {name: getattr(value, name) for name in value.__struct_fields__}
        pieces = {name: _with_pieces(item) for name, item in found.items()}
        changed = {name: item for name, item in pieces.items() if item is not found[name]}
        return msgspec.structs.replace(value, **changed) if changed else value
    if not isinstance(value, list) or (values := _num_values(value)) <= PIECE_VALUES:
        return value
    count = max(1, PIECE_VALUES * len(value) // values)
    if count == 1:
        parts = [encode(_with_pieces(item)) for item in value]
    else:
        parts = [encode(value[at : at + count])[1:-1] for at in range(0, len(value), count)]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _num_values(value: Any) -> int:
    """An estimate of the number of values; in a list, the last entry is taken as typical."""
    if isinstance(value, ChatTokenLogprob):
        return 3 * len(value.top_logprobs) + 1
    if isinstance(value, msgspec.Struct):
        return sum(_num_values(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, str):
        return 1 + len(value) // _CHARACTERS
    if not isinstance(value, list | dict) or not value:
        return 1
    if isinstance(value, dict):
        return len(value)
    last = value[-1]
    if isinstance(last, msgspec.Struct) and not isinstance(last, ChatTokenLogprob):
        return sum(map(_num_values, value))  # choices
    return len(value) * _num_values(last)
