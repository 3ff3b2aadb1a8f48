"""Converts text to token ids and back for one model; safe to call from several threads.

It wraps a `tokenizers.Tokenizer`, which releases the GIL only for batches. It must not know
requests, and must not import torch or transformers: a child process converts the sources that need
them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from ..chat_templates.chat_template import ChatTemplate
from ..chat_templates.deepseek import DeepSeekEncoder, find_encoder
from .bounded_encoding import TooManyTokens, check, encode, tail_start
from .detokenizer import ByteTable, IncrementalDetokenizer, byte_table
from .tokenizer_literal import LiteralEncoder
from .tokenizer_source import TokenizerLoadError, find_tokenizer_folder

__all__ = ["IncrementalDetokenizer", "Tokenizer", "TokenizerLoadError", "TooManyTokens"]

_NAMED = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
# DeepSeek's markers, such as those of turns, which its tokenizers list as plain tokens.
_MARKER = re.compile(r"<｜[^｜]+｜>|｜DSML｜")
_NO_LIMIT = 1 << 30  # a larger number, such as 1e30 in tokenizer_config.json, means no limit


class Tokenizer:
    """A model's tokenizer and what its files say about special tokens, templates and lengths.

    `special_tokens` maps bos_token, eos_token, … to their text, as chat templates expect.
    `chat_templates` maps names to templates, and `chat_template` is the one named "default" or
    None. `chat_encoder` writes the chats of a model whose maker publishes no template.
    """

    def __init__(self, backend: Backend, folder: Path | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        files = _Files(folder)
        self._add_missing_tokens(files.config)
        self.special_tokens = files.special_tokens()
        self._mark_special_tokens()
        self._update_post_processor(files.config)
        self.table: ByteTable | None = byte_table(backend)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = frozenset(t.content for t in added.values() if t.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = backend.token_to_id(self.special_tokens.get("bos_token", ""))
        self.eos_ids = files.eos_ids(backend.token_to_id(self.special_tokens.get("eos_token", "")))
        self.max_length = files.max_length()
        self.chat_templates = files.chat_templates()
        self.chat_encoder: DeepSeekEncoder | None = find_encoder(files.json("config.json"), folder)
        self._literal: LiteralEncoder | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> Tokenizer:
        """Load the tokenizer of a folder, hub id or .gguf file. Raises TokenizerLoadError.

        If the source has no tokenizer.json, the first call converts it, which can take seconds, and
        caches the result.
        """
        folder = find_tokenizer_folder(source, revision)
        try:
            return cls(Backend.from_file(str(folder / "tokenizer.json")), folder)
        except TokenizerLoadError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise TokenizerLoadError(f"{folder}/tokenizer.json is unusable: {error}.") from error

    def load_template(self, file: str | None) -> ChatTemplate:
        """The chat template in `file`, or else the model's own. Raises OSError."""
        sources = Path(file).read_text(encoding="utf-8") if file else self.chat_templates
        return ChatTemplate(sources, self.special_tokens, self.chat_encoder)

    @property
    def chat_template(self) -> str | None:
        """The default chat template, or None."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Don't add special tokens to a rendered chat, because it already contains them."""
        (ids,) = self.encode_batch([text], add_special_tokens)
        return ids

    def encode_batch(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        limit: int | None = None,
        last: int | None = None,
    ) -> list[list[int]]:
        """As `encode`, for several texts. Raises TooManyTokens if one has more than `limit` tokens.

        If `last` is given, only the last tokens of each text are needed: tokens at the start of a
        long text may be left out, and `limit` does not apply.
        """
        if last is None:
            return encode(self.backend, texts, add_special_tokens, limit)
        cut = [text[tail_start(self.backend, text, last) :] for text in texts]
        return encode(self.backend, cut, add_special_tokens, None)

    def encode_parts(
        self,
        parts: Sequence[str],
        add_special_tokens: bool = True,
        limit: int | None = None,
        last: int | None = None,
    ) -> list[int]:
        """The token ids of the parts joined, where the parts at odd indices are special tokens.

        The other parts are plain text, even if they spell special tokens. `limit` and `last` are
        as in `encode_batch`."""
        with self._lock:
            if self._literal is None:
                self._literal = LiteralEncoder(self.backend)
        if last is not None:
            parts = _after(parts, tail_start(self.backend, "".join(parts), last))
        elif limit is not None:
            check(self.backend, "".join(parts), limit)
        return self._literal.encode(parts, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; it equals the joined deltas of a detokenizer."""
        if self.table is None:
            detokenizer = self.detokenizer(skip_special_tokens)
            return detokenizer.push(ids) + detokenizer.flush()
        dropped = self.special_ids if skip_special_tokens else ()
        return self.table.decode(i for i in ids if i not in dropped)

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        keep: frozenset[int] = frozenset(),
        prompt_ids: Sequence[int] = (),
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self, skip_special_tokens, keep, prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, which may be part of a character."""
        if self.table is not None:
            return self.table[token_id]
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def vocabulary(self, spelled: frozenset[int] = frozenset()) -> list[bytes]:
        """The bytes of every token in id order, for grammars; empty for EOS and for special tokens
        that are not `spelled`."""
        silent = (self.special_ids - spelled) | self.eos_ids
        return [b"" if i in silent else self.token_bytes(i) for i in range(self.vocab_size)]

    def token_text(self, token_id: int) -> str:
        """The text of a single token, for logprobs; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token, or None for an id without a token."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling, or None."""
        return self.backend.token_to_id(token)

    def _mark_special_tokens(self) -> None:
        """Mark bos_token, eos_token and so on as special, even if the vocabulary does not.

        DeepSeek's markers become special as well: as plain tokens, a client could write them."""
        added = self.backend.get_added_tokens_decoder().values()
        known = {token.content for token in added}
        markers = [t for t in added if not t.special and _MARKER.fullmatch(t.content)]
        found = [
            AddedToken(token, normalized=False, special=True)
            for token in self.special_tokens.values()
            if token not in known and self.backend.token_to_id(token) is not None
        ]
        for token in markers:
            token.special = True
        self.backend.add_special_tokens([*found, *markers])

    def _add_missing_tokens(self, config: dict[str, Any]) -> None:
        """Add the tokens that only tokenizer_config.json lists.

        Raises TokenizerLoadError unless their ids directly follow the vocabulary."""
        listed = config.get("added_tokens_decoder") or {}
        for index, entry in sorted((int(i), entry) for i, entry in listed.items()):
            if self.backend.token_to_id(entry["content"]) is None:
                flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
                token = AddedToken(entry["content"], **{f: entry.get(f, False) for f in flags})
                self.backend.add_tokens([token])
                if self.backend.token_to_id(entry["content"]) != index:
                    raise TokenizerLoadError(
                        f"The token {entry['content']!r} should have the id {index}, but "
                        "tokenizer.json has no tokens for the ids before it."
                    )

    def _update_post_processor(self, config: dict[str, Any]) -> None:
        """Apply the config's add_bos_token and add_eos_token, which override tokenizer.json."""
        if "add_bos_token" not in config and "add_eos_token" not in config:
            return
        start = [self.special_tokens.get("bos_token")] if config.get("add_bos_token") else []
        end = [self.special_tokens.get("eos_token")] if config.get("add_eos_token") else []
        pieces = [*(f"{t}:0" for t in start if t), "$A:0", *(f"{t}:0" for t in end if t)]
        named = [(t, self.backend.token_to_id(t)) for t in (*start, *end) if t]
        special = [(token, index) for token, index in named if index is not None]
        self.backend.post_processor = TemplateProcessing(single=pieces, special_tokens=special)


def _after(parts: Sequence[str], start: int) -> list[str]:
    """The parts from character `start` on; special tokens stay whole and at odd indices."""
    for number, part in enumerate(parts):
        if start < len(part) and not number % 2:
            return [part[start:], *parts[number + 1 :]]
        start = max(start - len(part), 0)
    return [""]


class _Files:
    """The JSON files beside tokenizer.json."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.config = self.json("tokenizer_config.json")

    def json(self, name: str) -> dict[str, Any]:
        path = self.folder / name if self.folder else None
        if path is None or not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TokenizerLoadError(f"{path} is not valid JSON: {error}.") from error
        return value if isinstance(value, dict) else {}

    def special_tokens(self) -> dict[str, str]:
        tokens = {**self.json("special_tokens_map.json"), **self.config}
        plain = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in tokens.items()
            if name in _NAMED
        }
        return {name: token for name, token in plain.items() if isinstance(token, str)}

    def eos_ids(self, own: int | None) -> frozenset[int]:
        """The tokenizer's own EOS, and those in generation_config.json or else config.json."""
        found = self.json("generation_config.json").get("eos_token_id")
        if found is None:
            found = self.json("config.json").get("eos_token_id")
        listed = found if isinstance(found, list) else [found]
        return frozenset(i for i in [*listed, own] if isinstance(i, int))

    def max_length(self) -> int | None:
        """The longest sequence, in tokens, that the files allow; None if they state no limit."""
        config = self.json("config.json")
        text = config.get("text_config") or config
        limit = self.config.get("model_max_length")
        known = [text.get("max_position_embeddings"), limit]
        sane = [int(n) for n in known if isinstance(n, int | float) and 0 < n < _NO_LIMIT]
        return min(sane, default=None)

    def chat_templates(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for value in (
            self.json("chat_template.json").get("chat_template"),
            self.config.get("chat_template"),
        ):
            if isinstance(value, str):
                found["default"] = value
            elif isinstance(value, dict):
                found |= value
            elif isinstance(value, list):
                found |= {entry["name"]: entry["template"] for entry in value}
        if self.folder:
            single = self.folder / "chat_template.jinja"
            named = {p.stem: p for p in self.folder.glob("additional_chat_templates/*.jinja")}
            files = {**named, **({"default": single} if single.is_file() else {})}
            found |= {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return found
