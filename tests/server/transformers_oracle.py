"""What transformers makes of texts and chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from slipstream.server.text import tokenizer_convert


def tokenize(source: str, texts: list[str], single_digits: bool) -> dict[str, Any]:
    path = Path(source)
    if path.is_file():
        architecture, tokens, config = get_gguf_tokenizer(source)
        backend, _ = convert_gguf_tokenizer(architecture, tokens)
        if single_digits:
            digits = Digits(individual_digits=True)
            backend.pre_tokenizer = Sequence([digits, backend.pre_tokenizer])
        named = {key: value for key, value in config.items() if key.endswith("_token")}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [tokenizer.encode(text) for text in texts]
    return {
        "ids": ids,
        "plain": [tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "texts": [tokenizer.decode(row) for row in ids],
        "shown": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
        "eos": tokenizer.eos_token_id,
        "bos": tokenizer.bos_token_id,
    }


def render(template: str, special_tokens: dict[str, str], arguments: dict[str, Any]) -> str | None:
    backend = Tokenizer(models.WordLevel({"x": 0}, "x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)
    try:
        chat = arguments.pop("messages")
        return str(
            tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **arguments)
        )
    except Exception:
        return None


def answers(request: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a request.

    `tokenize` maps a source to texts, `single_digits` lists the sources whose tokenizer.json takes
    digits one by one, which the reader of GGUF files passes over, `render` is a list of (template,
    special tokens, keyword arguments), and `convert` maps sources to the folders that the server's
    own converter fills, which needs transformers, too.
    """
    for source, folder in request["convert"].items():
        tokenizer_convert.main(source, folder)
    return {
        "tokenize": {
            source: tokenize(source, texts, source in request["single_digits"])
            for source, texts in request["tokenize"].items()
        },
        "render": [render(*case) for case in request["render"]],
    }
