"""Compiles grammars with xgrammar, in a process that a grammar may crash (see `process`).

The worker never imports this file: the library is C++ that recurses over what clients write, and
neither compiling nor filling a mask can be interrupted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import first_line
from ..messages import GrammarSpec
from .grammar import ALL_ALLOWED, TOO_SLOW
from .text import is_lark, prepare_grammar

MAX_WHITESPACE = 12  # between JSON tokens: enough to indent, but a model cannot emit it endlessly
MAX_FIRST_MASK_SECONDS = 0.1  # a slower grammar would be stopped at its first token anyway
_MAX_THREADS = 8
VOCAB_TYPES = ("raw", "byte_fallback", "byte_level")  # the index is the library's number


class Compiler:
    """Compiles grammars for one vocabulary.

    `vocab` is in id order and has b"" for tokens without text. `vocab_size` is the width of the
    logits; tokens beyond it are ignored. See `build_grammar_backend` for `vocab_type`. Raises
    ImportError without xgrammar, and changes what this process can import: see `load_library`.

    The library needs a stop token. Without one in the vocabulary, it gets a token that no model can
    choose, and a text is complete where only that token may follow.
    """

    def __init__(
        self, vocab: Sequence[bytes], vocab_type: str, eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._library = load_library()
        self._vocab_size = vocab_size
        self._ends_with_text = not eos_ids
        self._eos_ids = list(eos_ids) or [vocab_size]
        self.line_length = -(-vocab_size // 32)  # length of a mask in int32s
        vocab = list(vocab[:vocab_size])
        if self._ends_with_text:
            vocab += [b""] * (vocab_size + 1 - len(vocab))
        facts = {
            "vocab_type": VOCAB_TYPES.index(vocab_type),
            "vocab_size": vocab_size + self._ends_with_text,
            "add_prefix_space": False,
            "stop_token_ids": self._eos_ids,
        }
        info = self._library.TokenizerInfo.from_vocab_and_metadata(vocab, json.dumps(facts))
        threads = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 4))
        # Processes forked from this one inherit the cache that `warm` fills.
        self._compiler = self._library.GrammarCompiler(info, threads, True, -1)

    def warm(self) -> None:
        """Fill the cache by compiling the grammar of any JSON object, parts of which most need."""
        self._compile(GrammarSpec("json_object"))

    def compile(self, spec: GrammarSpec) -> Any:
        """Compile a grammar, for `matcher`. Raises ValueError with a reason if it is invalid."""
        prepared = prepare_grammar(spec)
        try:
            return self._compile(prepared)
        except Exception as error:  # the library raises RuntimeError and its own classes
            raise ValueError(_reason(error)) from error

    def matcher(self, compiled: Any) -> XGrammarMatcher:
        made = self._library.GrammarMatcher(compiled, self._eos_ids, False, -1, None)
        return XGrammarMatcher(made, self._vocab_size, self._ends_with_text)

    def check_first_mask(self, compiled: Any) -> None:
        """Raise ValueError if no token may come first, or if finding out takes too long."""
        line = np.empty(self.line_length, dtype=np.int32)
        matcher, began = self.matcher(compiled), time.thread_time()
        matcher.fill(line)
        if not line.any():
            only_empty = self._ends_with_text and matcher.is_terminated
            raise ValueError(
                "only the empty text satisfies it" if only_empty else "no text satisfies it"
            )
        if time.thread_time() - began > MAX_FIRST_MASK_SECONDS:
            raise ValueError(TOO_SLOW)

    def _compile(self, spec: GrammarSpec) -> Any:
        match spec.kind:
            case "json_schema":
                return self._json(spec.value)
            case "json_object":
                return self._json('{"type": "object"}')
            case "regex":
                return self._compiler.compile_regex(spec.value)
            case "grammar" if is_lark(spec.value):
                return self._compiler.compile_lark(spec.value, [], [])
            case "grammar" | "choice":
                return self._compiler.compile_grammar_from_strings(spec.value, "root")
            case "structural_tag":
                return self._compiler.compile_structural_tag(spec.value)
        raise ValueError(f"unknown kind of grammar {spec.kind!r}")

    def _json(self, schema: str) -> Any:
        any_whitespace, strict_mode, any_order = True, True, False
        return self._compiler.compile_json_schema(
            schema, any_whitespace, None, None, strict_mode, MAX_WHITESPACE, any_order
        )


class XGrammarMatcher:
    """One request's position in a grammar: a `GrammarMatcher` around the library's."""

    def __init__(self, matcher: Any, vocab_size: int, ends_with_text: bool = False) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.ends_with_text = ends_with_text
        # [1, ceil((V + 1) / 32)] int32, with the stop token that no model can choose
        self._wide = np.empty((1, vocab_size // 32 + 1), dtype=np.int32)

    @property
    def is_terminated(self) -> bool:
        if not self.ends_with_text:
            return bool(self._matcher.is_terminated())
        if not self._matcher.is_completed():
            return False
        line = np.empty(-(-self._vocab_size // 32), dtype=np.int32)
        self.fill(line)
        return not line.any()

    def accept(self, token_id: int) -> bool:
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"{token_id} is not a valid token id")
        if self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token_id, False))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill(self, line: np.ndarray) -> None:
        if self.ends_with_text:
            self._wide.fill(ALL_ALLOWED)
            self._matcher.fill_next_token_bitmask(self._wide, 0, False)
            bits = self._wide.view(np.uint32)
            bits[0, self._vocab_size // 32] &= (1 << self._vocab_size % 32) - 1
            line[:] = self._wide[0, : len(line)]
            return
        # The library does not write to the line if every token is allowed.
        line.fill(ALL_ALLOWED)
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(line.reshape(1, -1), 0, False)


def load_library() -> Any:
    """Import xgrammar without torch, transformers and pydantic; returns its module of C++ classes.

    Its package imports those three, which would cost every compiling process seconds and 250 MB,
    only to accept arguments of their types. A stand-in module for the package lets Python find its
    submodules without running its `__init__`. From then on `import torch` fails in this process,
    unless torch was imported before. Raises ImportError if xgrammar is not installed.
    """
    found = importlib.util.find_spec("xgrammar")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("structured output needs the package xgrammar: pip install xgrammar")
    if "xgrammar" not in sys.modules:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # tvm_ffi works without it
        package = ModuleType("xgrammar")
        package.__path__ = list(found.submodule_search_locations)
        package.__spec__ = found
        sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.base")._core


def _reason(error: Exception) -> str:
    """The first line of an error's message, without the library's source position."""
    return re.sub(r"\[[\d:]+\] /\S+:\d+: ", "", first_line(error))
