"""Converts other tokenizer files (GGUF, sentencepiece) to tokenizer.json, in a child process.

Run as `python -m slipstream.server.text.tokenizer_convert SOURCE FOLDER`. Only here may code of
the server import transformers, which imports torch. The folder receives the files of a Hugging
Face tokenizer folder, so that the loader reads only that form.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from .gguf_metadata import read_gguf_metadata

# Byte-level vocabularies that use GPT-2's split pattern, and so can be converted without
# transformers.
_GPT2_SPLIT = {"gpt-2", "smollm"}
# Patterns that split a text, one after another, of tokenizers whose names GGUF headers have.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
# The cased letters that the tokenizers of DeepSeek LLM and V2 list, as code points.
_CASED = """
41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a
38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf
1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d
1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4
1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f
2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f
a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3
104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943
"""
_CASED_CLASS = "".join(
    "-".join(chr(int(end, 16)) for end in part.split("-")) for part in _CASED.split()
)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SPLITS = {
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_CLASS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN_AND_HANGUL,
        r"\p{N}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}"),
    "gpt-4o": (  # OpenAI's o200k
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
_SINGLE_DIGITS = {"smollm"}  # those that split digits one by one first
ORPHANED = 3  # exit status if the server has exited
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
# A GGUF file names a single EOS, but chat models also stop at the token that ends a turn.
_END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot|>"),
    *("<|end_of_text|>", "<|endoftext|>", "<|return|>", "<|call|>", "<EOT>"),
    "<｜end▁of▁sentence｜>",
)


def byte_level_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer, as GPT-2's, that a GGUF header describes."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""
    )
    tokenizer = Tokenizer(model)
    patterns = _SPLITS.get(metadata.get("tokenizer.ggml.pre", ""), ())
    steps: list[Any] = [pre_tokenizers.Split(Regex(own), "isolated") for own in patterns]
    if metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    user = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in user])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _is_token(index: Any, tokens: list[str]) -> bool:
    return type(index) is int and 0 <= index < len(tokens)


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The header's tokenizer settings as the content of a tokenizer_config.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {}
    for name, key in (
        *(("bos_token", "bos"), ("eos_token", "eos")),
        *(("unk_token", "unknown"), ("pad_token", "padding")),
    ):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if _is_token(index, tokens):
            config[name] = tokens[index]
    architecture = metadata.get("general.architecture", "")
    if length := metadata.get(f"{architecture}.context_length"):
        config["model_max_length"] = length
    default = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates") or []
    if names and default is not None:
        named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in names}
        templates = {"default": default, **named}
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    elif default is not None:
        config["chat_template"] = default
    return config


def gguf_eos_ids(metadata: dict[str, Any]) -> list[int]:
    """The ids of EOS and of the control tokens that end a turn in the model's chat template."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    template = metadata.get("tokenizer.chat_template") or ""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = [index for index in named if index is not None and _is_token(index, tokens)]
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == _CONTROL and token in _END_OF_TURN and token in template:
            ids.append(index)
    return sorted(set(ids))


def check_gguf_tokenizer(metadata: dict[str, Any]) -> None:
    """Raise SystemExit with a reason if a header's tokenizer lacks parts or contradicts itself."""
    tokens = metadata["tokenizer.ggml.tokens"]
    key = "tokenizer.ggml.bos_token_id"  # other ids outside the vocabulary are as none
    index = metadata.get(key) if metadata.get("tokenizer.ggml.add_bos_token") else None
    if index is not None and not _is_token(index, tokens):
        raise SystemExit(f"{key} is {index!r:.40}, but there are {len(tokens)} tokens")
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        merges = metadata.get("tokenizer.ggml.merges")
        if merges is None:
            raise SystemExit("its header has no tokenizer.ggml.merges")
        known = set(tokens)
        for merge in merges:
            parts = merge.split(" ")
            if len(parts) != 2 or not known.issuperset(parts):
                raise SystemExit(f"its merge {merge!r:.40} does not join two of its tokens")
    for name in metadata.get("tokenizer.chat_templates") or []:
        if f"tokenizer.chat_template.{name}" not in metadata:
            raise SystemExit(f"its header has no tokenizer.chat_template.{name}")


def convert_gguf(source: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json for a GGUF file."""
    metadata = read_gguf_metadata(source)
    if "tokenizer.ggml.tokens" not in metadata:
        raise SystemExit(f"{source} contains no tokenizer.")
    check_gguf_tokenizer(metadata)
    plain = metadata.get("tokenizer.ggml.pre", "gpt-2") in {*_GPT2_SPLIT, *_SPLITS}
    config = gguf_config(metadata)
    if metadata.get("tokenizer.ggml.model") == "gpt2" and plain:
        byte_level_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    else:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        except Exception as error:  # whatever transformers cannot read
            known = ", ".join(sorted({*_GPT2_SPLIT, *_SPLITS}))
            reason = " ".join(str(error).split()).rstrip(".")
            raise SystemExit(
                f"its tokenizer.ggml.pre is {metadata.get('tokenizer.ggml.pre')!r}, this server "
                f"knows {known}, and transformers says: {reason}"
            ) from error
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": gguf_eos_ids(metadata)})


def convert_folder(source: Path, folder: Path) -> None:
    """Convert a folder's vocabulary to tokenizer.json with transformers."""
    if (source / "tekken.json").is_file():
        convert_tekken(source, folder)
    else:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    for name in ("generation_config.json", "config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)


def convert_tekken(source: Path, folder: Path) -> None:
    """Convert Mistral's tekken.json, byte-level BPE as ranks, and the files beside it."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    tokenizer: Tokenizer = MistralConverter(str(source / "tekken.json")).converted()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    known = {name: text for name, text in named.items() if tokenizer.token_to_id(text) is not None}
    path = source / "tokenizer_config.json"
    given = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    _write(
        folder / "tokenizer_config.json", {**known, "add_bos_token": "bos_token" in known, **given}
    )
    for name in ("chat_template.jinja", "chat_template.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def main(source: str, folder: str) -> None:
    """Convert `source`, a .gguf file or a folder, into `folder`, which must exist."""
    if Path(source).is_file():
        convert_gguf(Path(source), Path(folder))
    else:
        convert_folder(Path(source), Path(folder))


def _end_with_parent() -> None:
    os.read(0, 1)  # the parent writes nothing, so this returns when it has exited
    os._exit(ORPHANED)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(*sys.argv[1:])
