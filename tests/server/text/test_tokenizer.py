"""The sources of tokenizers, and what the files beside them say."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from slipstream.server.text import tokenizer_source
from slipstream.server.text.gguf_metadata import GGUFError, read_gguf_metadata
from slipstream.server.text.tokenizer import Tokenizer, TokenizerLoadError
from slipstream.server.text.tokenizer_convert import (
    byte_level_tokenizer,
    check_gguf_tokenizer,
    gguf_config,
    gguf_eos_ids,
)

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<s>", "</s>", "<|im_end|>", "<think>", *ALPHABET, "he"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder(path: Path, **files: Any) -> str:
    path.mkdir(exist_ok=True)
    vocab = {token: index for index, token in enumerate(TOKENS)}
    backend = Backend(models.BPE(vocab, [("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in TOKENS[:3]])
    backend.enable_truncation(2)
    backend.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return str(path)


def gguf_file(path: Path, **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 4, *[1] * (len(TOKENS) - 4)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(more.get("template", "{{ messages }}<|im_end|>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_converted_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_file(tmp_path / "model.gguf")
    tokenizer = Tokenizer.load(str(path))
    assert tokenizer.encode("he<think>") == [0, TOKENS.index("he"), 3]
    assert tokenizer.encode("he", add_special_tokens=False) == [TOKENS.index("he")]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.max_length) == (0, {1, 2}, 77)
    assert tokenizer.decode([0, 3, 2]) == "<think>" and 3 not in tokenizer.special_ids
    assert tokenizer.chat_template == "{{ messages }}<|im_end|>"

    monkeypatch.setattr(tokenizer_source, "_convert", None)
    assert Tokenizer.load(str(tmp_path)).encode("he") == tokenizer.encode("he")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    gguf_file(path, template="{{ other }}")  # a changed file has another cache key
    assert Tokenizer.load(str(path)).chat_template == "{{ other }}"
    assert len(list((cache / "slipstream" / "tokenizers").iterdir())) == 2


def test_without_a_cache_folder_conversion_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert Tokenizer.load(str(gguf_file(tmp_path / "m.gguf"))).vocab_size == len(TOKENS)


def test_a_gguf_header_is_read_without_its_tensors(tmp_path: Path) -> None:
    metadata = read_gguf_metadata(gguf_file(tmp_path / "m.gguf"))
    assert metadata["tokenizer.ggml.tokens"] == TOKENS
    assert metadata["llama.context_length"] == 77
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert gguf_config(metadata)["bos_token"] == "<s>"
    assert gguf_eos_ids(metadata) == [1, 2]
    assert gguf_eos_ids({**metadata, "tokenizer.chat_template": ""}) == [1]
    assert gguf_eos_ids({**metadata, "tokenizer.ggml.eot_token_id": 3}) == [1, 2, 3]


def test_gguf_template_names_become_named_templates() -> None:
    pairs = {"tokenizer.chat_template": "d", "tokenizer.chat_template.rag": "r"}
    names = {"tokenizer.ggml.tokens": [], "tokenizer.chat_templates": ["rag"]}
    expected = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    assert gguf_config({**pairs, **names})["chat_template"] == expected


def test_a_broken_gguf_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = gguf_file(tmp_path / "whole.gguf").read_bytes()
    for data in (b"", b"GGML" + bytes(40), whole[:200], whole[:4] + b"\x09" + whole[5:]):
        path.write_bytes(data)
        with pytest.raises(GGUFError, match="m.gguf is not a readable GGUF file"):
            read_gguf_metadata(path)
        with pytest.raises(TokenizerLoadError, match="^/.*m.gguf is not a readable GGUF"):
            Tokenizer.load(str(path))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("/nope/folder", "/nope/folder does not exist."),
        ("nope.gguf", "nope.gguf does not exist."),
        ("not a hub id", "neither a local folder nor a hub id"),
        ("some-org/some-model", "nor in the download cache, and HF_HUB_OFFLINE is set."),
    ],
)
def test_a_missing_source_is_reported_in_one_sentence(
    source: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TokenizerLoadError, match=sentence):
        Tokenizer.load(source)


def test_an_unusable_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match="contains no tokenizer.json"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerLoadError, match="tokenizer.json is unusable"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "x.bin").touch()
    with pytest.raises(TokenizerLoadError, match="is a file, but not a .gguf file"):
        Tokenizer.load(str(tmp_path / "x.bin"))


def test_facts_come_from_the_files_beside_the_tokenizer(tmp_path: Path) -> None:
    source = folder(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "</s>"}, "model_max_length": 1e30},
        special_tokens_map={"bos_token": "<s>", "additional_special_tokens": ["<x>"]},
        generation_config={"eos_token_id": [1, 2]},
        config={"eos_token_id": 5, "text_config": {"max_position_embeddings": 64}},
    )
    tokenizer = Tokenizer.load(source)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.max_length) == (0, {1, 2}, 64)
    assert tokenizer.chat_template is None
    assert len(tokenizer.encode("hello")) == 4, "tokenizer.json's truncation must be off"


def test_eos_falls_back_to_config_json(tmp_path: Path) -> None:
    source = folder(tmp_path, config={"eos_token_id": 2})
    assert Tokenizer.load(source).eos_ids == {2}


def test_template_files_override_templates_in_json(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "json"}, {"name": "rag", "template": "rag"}]
    source = folder(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.load(source).chat_templates == {"default": "json", "rag": "rag"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    expected = {"default": "file", "rag": "rag", "tool_use": "tools"}
    assert Tokenizer.load(source).chat_templates == expected


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True), (False, False)])
def test_bos_and_eos_are_added_as_the_config_says(tmp_path: Path, bos: bool, eos: bool) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": bos, "add_eos_token": eos}
    tokenizer = Tokenizer.load(folder(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("he") == [0] * bos + [TOKENS.index("he")] + [1] * eos
    assert tokenizer.encode("he", add_special_tokens=False) == [TOKENS.index("he")]


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    entry = {"content": "<new>", "special": True}
    config = {"added_tokens_decoder": {str(len(TOKENS)): entry}}
    tokenizer = Tokenizer.load(folder(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("<new>") == [len(TOKENS)] and len(TOKENS) in tokenizer.special_ids
    config = {"added_tokens_decoder": {str(len(TOKENS) + 9): entry}}
    with pytest.raises(TokenizerLoadError, match="'<new>' should have the id"):
        Tokenizer.load(folder(tmp_path, tokenizer_config=config))


def test_named_tokens_are_special_even_if_the_vocabulary_forgot(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder(tmp_path, tokenizer_config={"pad_token": "<think>"}))
    assert tokenizer.encode("<think>") == [3] and tokenizer.decode([3]) == ""


def test_importing_the_tokenizer_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, slipstream.server.text.tokenizer as t; sys.exit("
    code += "'transformers' in sys.modules or 'torch' in sys.modules)"
    package = str(Path(tokenizer_source.__file__).parents[3])
    child = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": package})
    assert child.returncode == 0


def tekken(path: Path, words: list[bytes]) -> str:
    """Mistral's format: special tokens first, then the ranks of all bytes and of these words."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>"]
    pieces = [*(bytes([b]) for b in range(256)), *words, b"padding that is not used"]
    value = {
        "config": {
            "pattern": r"\S+|\s+",
            "default_vocab_size": 8 + 256 + len(words),
            "default_num_special_tokens": 8,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for rank, piece in enumerate(pieces)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    }
    path.mkdir()
    (path / "tekken.json").write_text(json.dumps(value))
    (path / "chat_template.jinja").write_text(
        "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    )
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 6]}))
    return str(path)


def test_mistrals_tekken_is_converted(tmp_path: Path) -> None:
    words = [b"he", b"ll", b"hell", b"hello", "é".encode(), b" \xf0"]
    tokenizer = Tokenizer.load(tekken(tmp_path / "model", words))
    text = "hello é 🎉"
    ids = tokenizer.encode(text)
    assert ids[:2] == [1, 8 + 256 + 3] and tokenizer.bos_id == 1  # BOS, then the longest word
    assert tokenizer.decode(ids) == text and tokenizer.vocab_size == 8 + 256 + 6
    assert tokenizer.eos_ids == {2, 6} and tokenizer.token_to_id("[TOOL_CALLS]") == 5
    assert tokenizer.encode("[INST]a[/INST]", add_special_tokens=False) == [3, 8 + ord("a"), 4]
    assert tokenizer.chat_template is not None and tokenizer.special_tokens["bos_token"] == "<s>"
    chars = tokenizer.detokenizer()
    assert "".join(chars.push([i]) for i in ids) + chars.flush() == text


TEXT = (
    "Hello World's end, DON'T stop: 1234567 items/day\n\n  \t x ÉCOLE naïve_name foo.Bar() "
    "你好吗かな 12年 … “quoted”!!\r\n<tag/> ǅ a  \n"
)


def split(pre: str, text: str) -> list[str]:
    """The pieces of a text before merges, of a GGUF file whose header names the splits `pre`."""
    metadata = {
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.pre": pre,
    }
    backend = byte_level_tokenizer(metadata)
    assert backend.pre_tokenizer is not None
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


def test_texts_are_split_as_tiktoken_does_for_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    regex = pytest.importorskip("regex")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *args, **kwargs: {})  # a download
    pattern = public.o200k_base()["pat_str"]
    assert split("gpt-4o", TEXT) == regex.findall(pattern, TEXT)


def test_texts_are_split_as_deepseek_v3_does() -> None:
    """Digits in threes, Chinese and Japanese runs apart, punctuation with the letters after it."""
    pieces = split("deepseek-v3", TEXT)
    assert "".join(pieces) == TEXT
    for piece in ("Hello", " World", "'s", "'T", "123", "456", "7", "/day", "\n\n", " ÉCOLE"):
        assert piece in pieces
    for piece in ("_name", ".Bar", "()", "你好吗かな", "12", "年", "”!!\r\n", "/>"):
        assert piece in pieces
    assert split("gpt-2", "abc 1234567") == ["abc", " 1234567"]


# The class of cased letters in the published tokenizer.json of DeepSeek LLM 7B.
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-"
    "\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-"
    "\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-"
    "\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-"
    "\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-"
    "\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-"
    "\U0001e943"
)
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
PUBLISHED = {
    "deepseek-llm": [
        "[\r\n]",
        f"\\s?[{CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        "\\s+$",
        HAN,
    ],
    "deepseek-coder": ["[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", HAN],
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_texts_are_split_as_the_published_tokenizers_of_deepseek_v2_and_coder_do(pre: str) -> None:
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PUBLISHED[pre]
    ]
    steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    by_hand = pre_tokenizers.Sequence(steps)
    chance = random.Random(0)
    letters = [
        *map(chr, range(32, 0x250)),
        *TEXT,
        *"\u1e9e\u1fbc\u2126\u212a\u0416\uff21\U00010428",
    ]
    texts = [TEXT, *("".join(chance.choices(letters, k=40)) for _ in range(200))]
    for text in texts:
        expected = [text[start:end] for _, (start, end) in by_hand.pre_tokenize_str(text)]
        assert split(pre, text) == expected and "".join(expected) == text
    cut = ["\u00c9", "COLE"] if pre == "deepseek-llm" else ["\u00c9COLE"]  # its ":-~" has A to Z
    pieces = split(pre, TEXT)
    at = pieces.index(f" {cut[0]}")
    assert pieces[at : at + len(cut)] == [f" {cut[0]}", *cut[1:]]
    for piece in ("Hello", " World", "'", "s", "1", "2", "\n", "()", "\u5e74"):
        assert piece in pieces


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000, but there are 3 tokens"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merge 'ab' does not join two of its tokens"),
        ({"tokenizer.ggml.merges": ["a q"]}, "merge 'a q' does not join"),
        ({"tokenizer.chat_templates": ["rag"]}, "no tokenizer.chat_template.rag"),
    ],
    ids=str,
)
def test_a_gguf_tokenizer_that_contradicts_itself_is_named(
    change: dict[str, Any], words: str
) -> None:
    whole: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.eos_token_id": 2**32 - 1,  # as converters write "none"
    }
    check_gguf_tokenizer(whole)
    assert gguf_eos_ids(whole) == [] and gguf_config(whole) == {"bos_token": "a"}
    with pytest.raises(SystemExit, match=words):
        check_gguf_tokenizer(whole | change)
