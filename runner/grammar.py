"""Structured output: compiles grammars off the loop and says which tokens each logits row may have.

The model side sees only bitmasks: bit t of a line is set if token t is allowed, and a padded
vocabulary's extra ids never are. xgrammar is imported late; another library would be another
`GrammarBackend`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from .errors import first_line
from .messages import GrammarSpec

ALL_ALLOWED = -1  # an int32 with every bit set
MAX_WHITESPACE = 12  # between JSON tokens: room for indentation, no endless blanks
MAX_GRAMMAR_CHARS = 1 << 17  # longer ones can take minutes to compile, and that cannot be stopped
CACHE_BYTES = 512 << 20  # of compiled grammars
_LESS_PRIORITY = 5  # nice: a busy core is shared 1 to 3 with the engine
NUM_COMPILING = 4  # grammars at once, so that a slow one does not hold up the others


class GrammarMatcher(Protocol):
    """Where one request stands in its grammar."""

    @property
    def is_terminated(self) -> bool:
        """Whether the grammar has been left through a stop token: nothing more may follow."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, without a change, if the grammar forbids it.

        Raises ValueError for an id that is none (-1 is a placeholder, not a token).
        """

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    def fill(self, line: np.ndarray) -> None:
        """Write the mask of the next token into `line`, [ceil(V / 32)] int32."""


class GrammarBackend(ABC):
    """Compiles grammars."""

    @abstractmethod
    def prepare(self) -> None:
        """Begin with what the first grammar will need. Returns at once."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Future[GrammarMatcher]:
        """A matcher at the start of the grammar, later; the future raises ValueError if invalid."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop compiling."""


def fill_rows(matcher: GrammarMatcher, draft_ids: Sequence[int], lines: np.ndarray) -> int:
    """Fill one request's mask lines [drafts + 1, ceil(V / 32)]; the matcher ends where it began.

    Line j holds what may follow drafts 0 .. j-1. From the first draft that the grammar forbids, or
    that is none (-1), the drafts are cut: the line there masks it, so the sampler rejects it, and
    the lines behind, never reached, repeat it. Returns how many real drafts are cut.
    """
    num_accepted = 0
    for index in range(len(lines)):
        matcher.fill(lines[index])
        if index >= len(draft_ids) or not is_allowed(lines[index], draft_ids[index]):
            break
        if not matcher.accept(draft_ids[index]):
            break
        num_accepted += 1
        if matcher.is_terminated:
            break  # the request ends with this draft
    lines[index + 1 :] = lines[index]
    if num_accepted:
        matcher.rollback(num_accepted)
    num_real = sum(draft_id >= 0 for draft_id in draft_ids)
    return num_real - num_accepted


def is_allowed(line: np.ndarray, token_id: int) -> bool:
    """Whether a mask line allows a token; an id that is none (-1) is never allowed."""
    in_range = 0 <= token_id < 32 * len(line)
    return in_range and bool(int(line[token_id // 32]) >> (token_id % 32) & 1)


class XGrammarBackend(GrammarBackend):
    """Grammars by xgrammar, which caches compiled ones, so a repeated schema costs nothing.

    Everything runs on threads of its own and mostly without the GIL. `make_compiler` (seconds with
    the library's import) runs once, when the first grammar comes or `prepare` is called.
    """

    def __init__(
        self, make_compiler: Callable[[], Any], eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._make_compiler = make_compiler
        self._eos_ids = list(eos_ids)
        self._vocab_size = vocab_size
        # At full priority: it runs Python for long, and waiting with the GIL would stop the engine.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._lock = threading.Lock()
        self._compiler: Future[Any] | None = None
        self._pool = ThreadPoolExecutor(
            NUM_COMPILING, thread_name_prefix="grammar", initializer=yield_to_others
        )

    def prepare(self) -> None:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._maker.submit(self._make_compiler)

    def compile(self, spec: GrammarSpec) -> Future[GrammarMatcher]:
        self.prepare()
        return self._pool.submit(self._matcher, spec)

    def shutdown(self) -> None:
        self._maker.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, spec: GrammarSpec) -> GrammarMatcher:
        if len(spec.value) > MAX_GRAMMAR_CHARS:
            raise ValueError(f"it is longer than {MAX_GRAMMAR_CHARS} characters")
        compiled = self._compile(spec)
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._eos_ids)
        found = XGrammarMatcher(matcher, self._vocab_size)
        line = np.empty(-(-self._vocab_size // 32), dtype=np.int32)
        found.fill(line)
        if not line.any():
            raise ValueError("no text satisfies it")
        return found

    def _compile(self, spec: GrammarSpec) -> Any:
        assert self._compiler is not None
        compiler = self._compiler.result()
        try:
            match spec.kind:
                case "json_schema":
                    return self._json(compiler, spec.value)
                case "json_object":
                    return self._json(compiler, '{"type": "object"}')
                case "regex":
                    return compiler.compile_regex(spec.value)
                case "choice":
                    return compiler.compile_grammar(choice_grammar(json.loads(spec.value)))
                case "grammar" if is_lark(spec.value):
                    return compiler.compile_lark(spec.value)
                case "grammar":
                    return compiler.compile_grammar(spec.value)
                case "structural_tag":
                    return compiler.compile_structural_tag(spec.value)
        except Exception as error:  # the library raises RuntimeError and errors of its own
            raise ValueError(_reason(error)) from error
        raise ValueError(f"unknown kind of grammar {spec.kind!r}")

    @staticmethod
    def _json(compiler: Any, schema: str) -> Any:
        return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)


class XGrammarMatcher:
    """One request's position, checked at the door."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def is_terminated(self) -> bool:
        """See `GrammarMatcher`."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """See `GrammarMatcher`."""
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"{token_id} is not a token id: a placeholder reached the grammar")
        if self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher`."""
        self._matcher.rollback(num_tokens)

    def fill(self, line: np.ndarray) -> None:
        """See `GrammarMatcher`."""
        # Without a need to mask the library leaves the line as it is.
        line.fill(ALL_ALLOWED)
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(line.reshape(1, -1), 0)


def build_grammar_backend(
    vocab: Sequence[bytes | str],
    vocab_type: str,
    eos_ids: Sequence[int],
    vocab_size: int,
) -> GrammarBackend:
    """A backend for a vocabulary in id order. Control tokens must be empty: they spell no text.

    `vocab_type` says how pieces spell bytes: "raw" (they are the bytes), "byte_fallback" (<0x0A>
    and a metaspace, as sentencepiece has it) or "byte_level" (GPT-2's alphabet). `vocab_size` is
    the width of the logits, which may be padded beyond the vocabulary. Returns at once.
    """
    assert vocab_type in ("raw", "byte_fallback", "byte_level")

    def make_compiler() -> Any:
        import xgrammar

        facts = {
            "vocab_type": xgrammar.VocabType[vocab_type.upper()].value,
            "vocab_size": vocab_size,
            "add_prefix_space": False,
            "stop_token_ids": list(eos_ids),
        }
        # Unlike the constructor this releases the GIL: half a second for a large vocabulary.
        info = xgrammar.TokenizerInfo.from_vocab_and_metadata(
            list(vocab[:vocab_size]), json.dumps(facts)
        )
        threads = min(8, max(1, (os.cpu_count() or 1) // 4))
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=CACHE_BYTES)

    return XGrammarBackend(make_compiler, eos_ids, vocab_size)


def is_lark(grammar: str) -> bool:
    """Whether a grammar is written as Lark's (`start: …`), not as EBNF (`root ::= …`)."""
    return (
        "::=" not in grammar and re.search(r"^\s*[?!]?\w+\s*:", grammar, re.MULTILINE) is not None
    )


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar (EBNF) that allows exactly these strings."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("a choice needs at least one string, and none may be empty")
    return "root ::= " + " | ".join(json.dumps(choice) for choice in choices)


def yield_to_others() -> None:
    """Lower this thread's priority below the engine's, which computes on the same cores."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + _LESS_PRIORITY  # never less than it had
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def _reason(error: Exception) -> str:
    """The first line of an error's text, without the place in the library that wrote it."""
    return re.sub(r"\[[\d:]+\] /\S+:\d+: ", "", first_line(error))
