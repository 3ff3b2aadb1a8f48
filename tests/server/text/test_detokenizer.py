"""Streams of ids decode to the same text as all ids at once, for every kind of decoder."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import (
    Tokenizer as Backend,
)

from slipstream.server.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox, the lazy dog",
    "naïve café",
    "  two  spaces ",
    "日本語 日本",
    "1 2 3",
]
TEXTS = [
    *("the quick brown fox", "  two  spaces  and\n\n\ttabs ", "naïve cafe\u0301 e\u0301\u0323"),
    *("日本語の文章、混ぜて the fox", "😀 family 👨‍👩‍👧‍👦 flags 🇩🇪🇯🇵", "ไทย हिन्दी العربية", ""),
    *("<think>x</think> <|end|> y", "\u00a0nbsp\u200bzero \ufeff bom \U0001f9d1🏽‍🚀"),
]


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    return with_added(backend)


def byte_fallback(strip: bool) -> Tokenizer:
    """As Llama 2 (a prefix space, stripped again) or Gemma (none)."""
    pieces = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "▁▁", "th", "the", "▁the", "日"]
    pieces += sorted({c for text in CORPUS for c in text.replace(" ", "▁")} - {"▁", "日"})
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    prefixed = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    backend.normalizer = prefixed if strip else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return with_added(backend)


def metaspace() -> Tokenizer:
    words = {"▁", "the", "▁the", "▁fox", *"".join(CORPUS + TEXTS)} - {" "}
    scored = [("<unk>", 0.0), *((word, -float(len(word))) for word in sorted(words))]
    backend = Backend(models.Unigram(scored, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return with_added(backend)


def word_piece() -> Tokenizer:
    """A decoder that looks at its neighbours, so that the window is used."""
    words = [
        "[UNK]",
        "the",
        "quick",
        "brown",
        "fox",
        "##es",
        "##s",
        "the",
        ",",
        ".",
        "don",
        "'",
        "t",
    ]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return with_added(backend)


def with_added(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("ü", normalized=False)])
    return Tokenizer(backend)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama2": lambda: byte_fallback(True),
    "gemma": lambda: byte_fallback(False),
    "metaspace": metaspace,
    "word_piece": word_piece,
}
CACHE: dict[str, Tokenizer] = {}


def make(kind: str) -> Tokenizer:
    if kind not in CACHE:
        CACHE[kind] = KINDS[kind]()
    return CACHE[kind]


def stream(tokenizer: Tokenizer, chunks: list[list[int]], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(skip)
    return "".join([*map(detokenizer.push, chunks), detokenizer.flush()])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_gives_the_backend_s_text(kind: str, skip: bool) -> None:
    tokenizer = make(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip) == expected
        assert stream(tokenizer, [[i] for i in ids], skip) == expected
        for cut in range(len(ids) + 1):
            assert stream(tokenizer, [ids[:cut], ids[cut:]], skip) == expected


@given(st.sampled_from(sorted(KINDS)), st.data(), st.booleans())
def test_random_ids_stream_as_they_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = make(kind)
    chunk = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=5)
    chunks = data.draw(st.lists(chunk, max_size=8))
    ids = [i for chunk in chunks for i in chunk]
    assert stream(tokenizer, chunks, skip) == tokenizer.decode(ids, skip)
    if kind in ("byte_level", "metaspace"):
        assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(
            ids, skip_special_tokens=skip
        )


# Letters of many scripts, emoji with joiners, flags and skin tones, combining marks, white space.
CHARACTERS = "aZé ß日本ไท한नि😀👩🏽\u200d🚀🇩🇪e\u0301\u0323\n\t\u00a0\ufeff▁Ġ<>"
anything = st.text(
    st.one_of(st.sampled_from(CHARACTERS), st.characters(codec="utf-8")), max_size=24
)


@given(st.sampled_from(sorted(KINDS)), anything, st.booleans())
def test_any_text_streams_as_it_decodes_at_every_cut(kind: str, text: str, skip: bool) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode(text)
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == expected == stream(tokenizer, [[i] for i in ids], skip)
    for cut in range(1, len(ids)):
        assert stream(tokenizer, [ids[:cut], ids[cut:]], skip) == expected
    if kind in ("byte_level", "gemma") and "ü" not in text:  # "ü" is an added token
        assert expected == text


@given(st.sampled_from(["byte_level", "llama2", "gemma", "metaspace"]), anything, anything)
def test_a_reply_continues_the_text_of_its_prompt(kind: str, prompt: str, answer: str) -> None:
    tokenizer = make(kind)
    first, second = tokenizer.encode(prompt), tokenizer.encode(answer)
    detokenizer = tokenizer.detokenizer(prompt_ids=first)
    shown = detokenizer.push(second) + detokenizer.flush()
    if tokenizer.decode(first):  # otherwise there is no text yet, and the reply starts one
        assert tokenizer.decode(first) + shown == tokenizer.decode([*first, *second])


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
def test_a_character_is_emitted_only_when_it_is_whole(kind: str) -> None:
    tokenizer = make(kind)
    detokenizer = tokenizer.detokenizer()
    text = "😀ไ👩‍🚀"
    ids = tokenizer.encode(text)
    deltas = [detokenizer.push([i]) for i in ids]
    assert "\ufffd" not in "".join(deltas)
    assert [delta for delta in deltas if delta] == list(text) and len(ids) > len(text)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
def test_a_cut_character_becomes_replacement_marks_at_the_end(kind: str) -> None:
    tokenizer = make(kind)
    start = tokenizer.encode("the ") + tokenizer.encode("😀")[-4:-1]
    detokenizer = tokenizer.detokenizer()
    assert "\ufffd" not in detokenizer.push(start)
    assert detokenizer.flush() == tokenizer.backend.decode(start)[4:]


def test_invalid_bytes_keep_the_valid_ones_beside_them() -> None:
    tokenizer = make("llama2")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "é".encode() + b"\xff\xe9"]
    assert tokenizer.decode(ids) == "é\ufffd\ufffd" == stream(tokenizer, [[i] for i in ids], True)


def test_special_tokens_can_be_kept_one_by_one() -> None:
    tokenizer = make("byte_level")
    ids = tokenizer.encode("a<|end|>b")
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None and end in tokenizer.special_ids
    assert tokenizer.detokenizer().push(ids) == "ab"
    assert tokenizer.detokenizer(keep=frozenset([end])).push(ids) == "a<|end|>b"


@pytest.mark.parametrize("kind", ["llama2", "metaspace", "byte_level"])
def test_a_continuation_keeps_its_leading_space(kind: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode("the the")
    detokenizer = tokenizer.detokenizer(prompt_ids=ids[:-1])
    assert tokenizer.decode(ids[:-1]) + detokenizer.push(ids[-1:]) == "the the"


def test_push_tokens_returns_one_text_per_token() -> None:
    tokenizer = make("byte_level")
    ids = tokenizer.encode("the 😀 fox")
    parts = tokenizer.detokenizer().push_tokens(ids)
    assert len(parts) == len(ids) and "".join(parts) == "the 😀 fox"


def test_token_bytes_join_to_the_text_s_bytes() -> None:
    for kind in ("byte_level", "gemma"):
        tokenizer = make(kind)
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_ids_without_a_token_are_empty() -> None:
    tokenizer = make("byte_level")
    assert tokenizer.decode([tokenizer.vocab_size + 5, -1]) == ""
    assert tokenizer.id_to_token(-1) is None


def test_long_invalid_streams_cost_no_more_per_token() -> None:
    tokenizer = make("byte_level")
    bad = [i for i in range(256) if len(tokenizer.token_bytes(i)) == 1]
    ids = random.Random(0).choices(bad, k=20_000)
    detokenizer = tokenizer.detokenizer()
    deltas = [detokenizer.push([i]) for i in ids]  # with quadratic cost, this would take minutes
    assert "".join(deltas) + detokenizer.flush() == tokenizer.backend.decode(ids)
