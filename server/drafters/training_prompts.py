"""Provides prompts to train and measure drafters: from a JSONL file, or the package's own.

A prompt is a chat, a text or token ids; `tokenize_prompts` converts all of them to token ids.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..chat_templates.chat_template import ChatTemplate, ChatTemplateError
from ..text.tokenizer import Tokenizer

_MOST_HELD_OUT = 80
_FOLDER = Path(__file__).parent / "prompt_sets"
_SLOT = re.compile(r"\{(\w+)\}")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class PromptError(Exception):
    """Prompts cannot be used; the text is one sentence that says where and why."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: the messages of a chat, a text, or token ids."""

    messages: tuple[dict[str, Any], ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()  # of the target's tokenizer, as --capture-traffic writes them
    domain: str = ""
    is_heldout: bool = False  # not used for training
    where: str = ""  # file and line, for errors


def user_prompt(text: str, domain: str, is_heldout: bool = False) -> Prompt:
    return Prompt(({"role": "user", "content": text},), domain=domain, is_heldout=is_heldout)


# --- files ----------------------------------------------------------------------------------------


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a JSONL file; raises PromptError, which names the first invalid line.

    A line is `{"messages": [...]}` (a chat in OpenAI's format), `{"prompt": "..."}`,
    `{"text": "..."}` or `{"token_ids": [...]}`, each with an optional `"domain"` and `"split"`
    ("train" or "heldout"). The assistant's messages at the end of a chat are removed, because the
    target generates its own reply.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PromptError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise PromptError(f"{path} is not UTF-8 text") from None
    prompts = [
        _read_line(f"{path}, line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"{path} contains no prompt")
    return prompts


def _read_line(where: str, line: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: must be a JSON object")
    kinds = [key for key in ("messages", "prompt", "text", "token_ids") if key in entry]
    if len(kinds) != 1:
        names = '"messages", "prompt", "text" and "token_ids"'
        raise PromptError(f"{where}: must contain exactly one of {names}")
    domain, split = entry.get("domain", ""), entry.get("split", "train")
    if not isinstance(domain, str):
        raise PromptError(f'{where}: "domain" must be text')
    if split not in ("train", "heldout"):
        raise PromptError(f'{where}: "split" must be "train" or "heldout", not {split!r}')
    shared: dict[str, Any] = {
        "domain": domain,
        "is_heldout": split == "heldout",
        "where": where,
    }
    if kinds == ["messages"]:
        return Prompt(messages=_messages(where, entry["messages"]), **shared)
    if kinds == ["token_ids"]:
        ids = entry["token_ids"]
        if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
            raise PromptError(f'{where}: "token_ids" must be a non-empty list of token ids')
        return Prompt(token_ids=tuple(ids), **shared)
    text = entry[kinds[0]]
    if not isinstance(text, str) or not text:
        raise PromptError(f'{where}: "{kinds[0]}" must be a non-empty text')
    return Prompt(text=text, **shared)


def _messages(where: str, value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise PromptError(f'{where}: "messages" must be a non-empty list')
    for index, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise PromptError(
                f'{where}: message {index} needs a "role" that is one of {", ".join(_ROLES)}'
            )
        if not isinstance(message.get("content"), str):
            raise PromptError(f'{where}: message {index} needs a "content" that is text')
    while value and value[-1]["role"] == "assistant":
        value = value[:-1]
    if not value:
        raise PromptError(f"{where}: the chat has nothing before the assistant's message")
    return tuple(value)


def hold_out(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Mark a random 5 % of the prompts, from 1 to 80, as held out, unless some are marked.

    Raises PromptError if there are fewer than two prompts."""
    if any(prompt.is_heldout for prompt in prompts):
        return list(prompts)
    if len(prompts) < 2:
        raise PromptError("training needs at least two prompts, because one is held out")
    count = min(max(1, len(prompts) // 20), _MOST_HELD_OUT)
    chosen = set(random.Random(seed).sample(range(len(prompts)), count))
    return [dataclasses.replace(prompt, is_heldout=i in chosen) for i, prompt in enumerate(prompts)]


# --- built in -------------------------------------------------------------------------------------


def heldout_prompts() -> list[Prompt]:
    """The built-in prompts on which drafters are measured: 80 chats of eight domains."""
    sets: dict[str, list[str]] = yaml.safe_load((_FOLDER / "heldout.yaml").read_text())
    return [user_prompt(text, domain, True) for domain, texts in sets.items() for text in texts]


def training_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Up to `count` distinct chats made from the built-in templates, evenly from all domains."""
    content = yaml.safe_load((_FOLDER / "training.yaml").read_text())
    slots: dict[str, list[str]] = content["slots"]
    draws = {
        domain: _draw(templates, slots, random.Random(f"{seed} {domain}"))
        for domain, templates in content["templates"].items()
    }
    prompts: list[Prompt] = []
    while draws and len(prompts) < count:
        for domain in list(draws):
            text = next(draws[domain], None)
            if text is None:
                del draws[domain]
            elif len(prompts) < count:
                prompts.append(user_prompt(text, domain))
    return prompts


def _draw(
    templates: Sequence[str], slots: Mapping[str, Sequence[str]], rng: random.Random
) -> Iterator[str]:
    """Yield distinct filled templates, until 200 draws in a row repeat earlier ones."""
    seen: set[str] = set()
    misses = 0
    while misses < 200:
        text = _fill(rng.choice(templates), slots, rng)
        misses = misses + 1 if text in seen else 0
        if text not in seen:
            seen.add(text)
            yield text


def _fill(template: str, slots: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Fill the slots of a template with random words; a slot that occurs twice gets two words."""
    names = _SLOT.findall(template)
    words = {name: rng.sample(slots[name], names.count(name)) for name in sorted(set(names))}
    text = _SLOT.sub(lambda match: words[match[1]].pop(), template)
    return text[0].upper() + text[1:]


# --- tokens ---------------------------------------------------------------------------------------


def tokenize_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, template: ChatTemplate
) -> list[list[int]]:
    """The token ids of each prompt.

    Raises PromptError if the chat template rejects a chat or the model lacks a token id."""
    rendered: list[str] = []
    for prompt in prompts:
        try:
            has_chat = bool(prompt.messages)
            text = template.render_chat(prompt.messages).text if has_chat else prompt.text
            rendered.append(text)
        except ChatTemplateError as error:
            where = f"{prompt.where}: " if prompt.where else ""
            raise PromptError(f"{where}{str(error).rstrip('.')}") from None
    chats = [i for i, prompt in enumerate(prompts) if prompt.messages]
    texts = [i for i, prompt in enumerate(prompts) if prompt.text]
    ids = [list(prompt.token_ids) for prompt in prompts]
    for found, prompt in zip(ids, prompts, strict=True):
        if found and max(found) >= tokenizer.vocab_size:
            raise PromptError(f"{prompt.where}: the model has no token {max(found)}")
    for members, adds_special in ((chats, False), (texts, True)):
        batch = tokenizer.encode_batch([rendered[i] for i in members], adds_special)
        for index, encoded in zip(members, batch, strict=True):
            ids[index] = encoded
    return ids


def user_frame(tokenizer: Tokenizer, template: ChatTemplate) -> tuple[list[int], list[int]]:
    """The token ids of a chat before and after the user's first message.

    Raises PromptError if nothing follows the message, so that the model could not end one."""
    mark = "<<words>>"
    text = template.render_chat([{"role": "user", "content": mark}]).text
    before, _, after = text.partition(mark)
    if not after:
        raise PromptError(
            "no prompts can be invented, because the chat template has nothing after the user's "
            "message"
        )
    return tokenizer.encode(before, False), tokenizer.encode(after, False)
