"""Random texts that a compiled grammar allows, byte by byte."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import xgrammar as xgr

END = 0
_LONG = 120  # bytes; behind them a walk goes home
_HOME = (b'"}]', b":,0")


def byte_compiler() -> Any:
    """A compiler whose tokens are the bytes; token 0 ends the text."""
    vocabulary = [b"", *(bytes([byte]) for byte in range(1, 256))]
    info = xgr.TokenizerInfo(vocabulary, stop_token_ids=[END])  # type: ignore[arg-type]
    return xgr.GrammarCompiler(info, max_threads=1)


def compiled_schema(compiler: Any, schema: Any) -> Any:
    """The grammar of a schema, compiled as the worker does it."""
    return compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=12)


def walk(grammar: Any, rng: random.Random) -> str:
    """One text of the grammar. Halves of characters, which no tokenizer spells, are replaced."""
    matcher = xgr.GrammarMatcher(grammar)
    mask = np.empty((1, 8), dtype=np.int32)
    text = bytearray()
    while len(text) < 10 * _LONG:
        mask.fill(-1)
        matcher.fill_next_token_bitmask(mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = [int(byte) for byte in np.nonzero(bits)[0]]
        assert allowed, "the grammar leads nowhere"
        ends = END in allowed
        if ends and (len(allowed) == 1 or len(text) > _LONG or rng.random() < 0.5):
            return text.decode(errors="replace")
        byte = rng.choice(_preferred([byte for byte in allowed if byte], len(text), rng))
        assert matcher.accept_token(byte)
        text.append(byte)
    raise AssertionError("the walk does not end")


def _preferred(allowed: list[int], length: int, rng: random.Random) -> list[int]:
    if length > _LONG:
        wishes = [[byte for byte in allowed if byte in home] for home in _HOME]
        return next(filter(None, wishes), allowed)
    if rng.random() < 0.6:
        return [byte for byte in allowed if byte > 32 and byte < 128] or allowed
    return allowed
