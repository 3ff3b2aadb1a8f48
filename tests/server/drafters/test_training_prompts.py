"""Prompts for training: files, errors with line numbers, built-in prompts, held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.server.chat_templates.chat_template import ChatTemplate
from slipstream.server.commands import main
from slipstream.server.drafters.training_prompts import (
    Prompt,
    PromptError,
    heldout_prompts,
    hold_out,
    read_prompts,
    tokenize_prompts,
    training_prompts,
    user_frame,
)

from ..api_fakes import byte_tokenizer

CHATML = (Path(__file__).parents[1] / "templates" / "chatml.jinja").read_text()


def write(folder: Path, *lines: object) -> Path:
    path = folder / "data.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts))
    return path


def test_chats_and_texts_are_read(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
    path = write(
        tmp_path, {"messages": chat, "domain": "talk"}, "", {"prompt": "Once"},
        {"text": "Twice", "split": "heldout"},
    )  # fmt: skip
    first, second, third = read_prompts(path)
    assert first.messages == tuple(chat[:2])  # the target generates its own reply
    assert (first.domain, first.is_heldout) == ("talk", False)
    assert (second.text, second.messages) == ("Once", ())
    assert third.is_heldout and third.where == f"{path}, line 4"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{nonsense", "not valid JSON"),
        ("[1]", "JSON object"),
        ({"question": "?"}, 'one of "messages"'),
        ({"prompt": "a", "text": "b"}, 'one of "messages"'),
        ({"prompt": ""}, "non-empty"),
        ({"text": 3}, "non-empty"),
        ({"messages": []}, "non-empty"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing before"),
        ({"token_ids": []}, "list of token ids"),
        ({"token_ids": [1, -1]}, "list of token ids"),
        ({"token_ids": [True]}, "list of token ids"),
        ({"prompt": "a", "domain": 1}, "domain"),
        ({"prompt": "a", "split": "test"}, "split"),
    ],
)
def test_the_error_names_the_invalid_line(tmp_path: Path, line: object, what: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(PromptError, match=what) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_unreadable_and_empty_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(PromptError, match="contains no prompt"):
        read_prompts(write(tmp_path, "", " "))
    (tmp_path / "data.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="UTF-8"):
        read_prompts(tmp_path / "data.jsonl")


def test_a_twentieth_is_held_out_unless_the_file_says_which() -> None:
    given = [Prompt(text=str(i)) for i in range(100)]
    marked = hold_out(given, seed=1)
    assert sum(prompt.is_heldout for prompt in marked) == 5
    assert marked == hold_out(given, seed=1) != hold_out(given, seed=2)
    assert hold_out([*given, Prompt(text="x", is_heldout=True)], 1)[:100] == given
    assert (
        sum(prompt.is_heldout for prompt in hold_out([Prompt(text=str(i)) for i in range(9999)], 0))
        == 80
    )
    with pytest.raises(PromptError, match="two prompts"):
        hold_out(given[:1], 0)


def test_built_in_prompts_are_distinct_and_not_among_the_held_out() -> None:
    heldout = heldout_prompts()
    domains = {prompt.domain for prompt in heldout}
    assert len(heldout) == 80 and len(domains) == 8
    training = training_prompts(4000)
    texts = {prompt.messages[0]["content"] for prompt in training}
    assert len(texts) == 4000 and not any("{" in text for text in texts)
    assert {prompt.domain for prompt in training} == domains
    assert not texts & {prompt.messages[0]["content"] for prompt in heldout}
    assert training_prompts(50) == training[:50]
    assert training_prompts(50, seed=1) != training[:50]


def test_prompts_become_tokens() -> None:
    tokenizer = byte_tokenizer()
    template = ChatTemplate(CHATML, {})
    given = [
        Prompt(({"role": "user", "content": "Hi"},)),
        Prompt(text="plain"),
    ]
    chat, text = tokenize_prompts(given, tokenizer, template)
    assert tokenizer.decode(text, False) == "plain"
    assert tokenize_prompts([Prompt(token_ids=(4, 5))], tokenizer, template) == [[4, 5]]
    with pytest.raises(PromptError, match="line 3: the model has no token 99999"):
        tokenize_prompts([Prompt(token_ids=(1, 99999), where="line 3")], tokenizer, template)
    before, after = user_frame(tokenizer, template)
    assert chat == [*before, *tokenizer.encode("Hi", False), *after]
    with pytest.raises(PromptError, match="line 7: The model has no chat template"):
        tokenize_prompts(
            [Prompt(given[0].messages, where="line 7")], tokenizer, ChatTemplate(None, {})
        )


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--method", "medusa"], "--method"),
        (["--epochs", "0"], "--epochs"),
        (["--epochs", "many"], "--epochs"),
        (["--temperatures", "0,3"], "--temperatures"),
        (["--num-prompts", "-4"], "--num-prompts"),
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--data", "none.jsonl", "--num-prompts", "3"], "--num-prompts"),
        (["--num-speculative-tokens", "17"], "--num-speculative-tokens"),
        (["--export-format", "onnx"], "--export-format"),
        (["--train-dtype", "int8"], "--train-dtype"),
        (["--warmup", "1"], "--warmup"),
    ],
)
def test_wrong_flags_of_train_are_one_sentence(
    flags: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--output", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("slipstream train: error: ") and what in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_with_another_runs_replies_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", "--output", str(tmp_path), "--prepare-only", "--num-prompts"]
    assert main([*train, "8"]) == 0
    job = json.loads((tmp_path / "work" / "job.json").read_text())
    assert job["config"]["speculative"]["method"] == "off"
    assert len((tmp_path / "work" / "prompts.jsonl").read_text().splitlines()) == 88
    (tmp_path / "work" / "replies.jsonl").write_text("")
    assert main([*train, "8", "--max-generate-minutes", "3"]) == 0
    assert main([*train, "9"]) == 2
    assert "another" in capsys.readouterr().err
    assert main([*train, "8", "--max-reply-tokens", "9"]) == 2
