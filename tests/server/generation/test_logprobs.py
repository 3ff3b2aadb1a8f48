"""The tokens of logprobs spell the text, whatever of the output has no text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from slipstream.runner.messages import RequestOutput
from slipstream.server.text.choice_text import ChoiceText, TextOptions
from slipstream.server.text.tokenizer import Tokenizer

from ..api_fakes import EOS, MODEL, TOKENIZER, ScriptedEngine, http_client, make_app, reply_with

assert EOS is not None
# Text on both sides of a special token that does not end the output, then a character of 4 tokens.
IDS = [*TOKENIZER.encode("he", False), EOS, *TOKENIZER.encode("llo 🎉", False)]


async def answer(path: str, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    engine = ScriptedEngine(reply_with(ids=ids, eos=False))
    full = {"model": MODEL, "max_tokens": len(ids), "ignore_eos": True, "temperature": 0, **body}
    async with http_client(make_app(engine)) as client:
        response = await client.post(path, json=full)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


@pytest.mark.parametrize("skip", [True, False])
async def test_chat_tokens_spell_the_message(skip: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    choice = await answer(
        "/v1/chat/completions", {**body, "skip_special_tokens": skip}, [*IDS, EOS]
    )
    found = choice["logprobs"]["content"]
    assert len(found) == len(IDS) + 1
    data = bytes(byte for entry in found for byte in entry["bytes"])
    assert data.decode() == choice["message"]["content"]
    assert ("<|end|>" in data.decode()) is not skip
    # A greedy token is its own likeliest candidate, spelled the same.
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in found)
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in found[:5])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("echo", [True, False])
async def test_completion_tokens_spell_the_text(skip: bool, echo: bool) -> None:
    body = {"prompt": [*IDS[:4], 5], "echo": echo, "logprobs": 1, "skip_special_tokens": skip}
    choice = await answer("/v1/completions", body, IDS[:5])
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    for token, offset, top in zip(
        found["tokens"], found["text_offset"], found["top_logprobs"], strict=True
    ):
        assert choice["text"].startswith(token, offset)
        assert top is None or token in top


async def test_tokens_can_be_named_by_their_ids() -> None:
    body = {"prompt": "he", "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    found = (await answer("/v1/completions", body, IDS))["logprobs"]
    expected = [f"token_id:{i}" for i in [*TOKENIZER.encode("he"), *IDS]]
    assert found["tokens"] == expected
    assert all(
        name in top for name, top in zip(expected[1:], found["top_logprobs"][1:], strict=True)
    )
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    chat = await answer("/v1/chat/completions", {**body, "return_tokens_as_token_ids": True}, IDS)
    entries = chat["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == expected[1:]
    assert [entry["top_logprobs"][0]["token"] for entry in entries] == expected[1:]


def test_the_space_that_begins_an_answer_is_not_lost() -> None:
    vocab = {piece: i for i, piece in enumerate(["<unk>", "▁", *"isParcd", "▁is", "▁Paris"])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = Tokenizer(backend)
    prompt, answer_ids = [vocab["▁is"]], [vocab["▁Paris"], vocab["▁is"]]
    choice = ChoiceText(0, tokenizer, TextOptions([]), prompt)
    event = choice.feed([RequestOutput("r", answer_ids, finish_reason="length")])
    assert tokenizer.decode(prompt) + event.text == tokenizer.decode(prompt + answer_ids)
    assert event.text == " Paris is"
