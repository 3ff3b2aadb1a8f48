"""Tokenizers and chat templates give what transformers gives."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.preset import preset_model
from slipstream.server.chat_templates.chat_template import ChatTemplate, ChatTemplateError
from slipstream.server.text import tokenizer_source
from slipstream.server.text.tokenizer import Tokenizer

from .rendering import text_of

HERE = Path(__file__).parents[1]
TEMPLATES = {path.stem: path.read_text() for path in sorted(HERE.glob("templates/*.jinja"))}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEXTS = [
    *("", " ", "Hello", " Hello world", "  two  spaces   three", "tabs\t\tand\n\n\nlines\r\n"),
    *("<|im_start|>user\nHi<|im_end|>\n", "x<|im_end|>", "<|endoftext|> <|im_start|>", "</s><s>a"),
    *("😀👩\u200d👩\u200d👧 🇩🇪", "日本語の文章。中文", "café cafe\u0301 ñ", "ไทย العربية हिन्दी"),
    *("\ufeff\u200b\u00a0x", "\x00\x01\x7f", "ﬁ Å", "a  "),
    *("def f(x):\n    return x+1  # ok", "3.14159 and 2026", "I'm you're IT'S"),
    *("a  12", "  7", "x\n\n 3 4", "v1.02b٣²"),
]
USER = {"role": "user", "content": " What is <b>2+2</b>? é "}
SYSTEM = {"role": "system", "content": "Be “kind”. "}
ANSWER = {"role": "assistant", "content": "It is 4. "}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <Ort> & Tag",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}},
        }
    ],
}
RESULT = {"role": "tool", "content": '{"sky": "blau"}', "tool_call_id": "abcdefghi"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."}
REASONED = {"role": "assistant", "content": "Four.", "reasoning_content": "two and two"}
OPEN = {"role": "assistant", "content": "Sure:\n"}
CHATS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [USER], "add_generation_prompt": True},
    {"messages": [SYSTEM, USER, ANSWER, USER], "add_generation_prompt": True},
    {"messages": [SYSTEM, USER, CALL, RESULT], "tools": [TOOL], "add_generation_prompt": True},
    {"messages": [USER, CALL, RESULT, ANSWER, USER], "tools": [TOOL, TOOL]},
    {"messages": [USER, THOUGHT, USER, REASONED]},
    {"messages": [USER, USER]},
    {"messages": [ANSWER]},
    {"messages": [{"role": "critic", "content": "hm"}]},
    {"messages": [USER], "add_generation_prompt": True, "enable_thinking": False},
    {"messages": [USER], "enable_extra": True, "documents": [{"title": "T", "text": "x"}]},
    {"messages": [SYSTEM, USER, ANSWER], "continue_final_message": True},
    {
        "messages": [USER, {"role": "assistant", "content": "Sure:\n"}],
        "continue_final_message": True,
    },
]
CASES = [(name, n) for name in [*TEMPLATES, "smollm2"] for n in range(len(CHATS))]
# Our own choice where the template ignores tools: they are described in the system message.
TOOL_CASES = {n for n, chat in enumerate(CHATS) if "tools" in chat}
TOOL_BLIND = {"chatml", "features", "gemma", "llama2", "smollm2"}


def smollm2() -> Path:
    return Path(preset_model("smollm2-135m"))


def train_sentencepiece(folder: Path, kind: str) -> Path:
    """A folder with nothing but a sentencepiece model, as old Llama checkpoints are."""
    import sentencepiece

    folder.mkdir()
    (folder / "corpus.txt").write_text("\n".join([t for t in TEXTS if t.isprintable()] * 30))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=420,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    config["tokenizer_class"] = "LlamaTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return folder


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "llama", "bpe")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tokenizer(cache: Path) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return Tokenizer.load(preset_model("smollm2-135m"))


@pytest.fixture(scope="module")
def sources(tokenizer: Tokenizer) -> dict[str, str]:
    return {**TEMPLATES, "smollm2": tokenizer.chat_template or ""}


@pytest.fixture(scope="module")
def conversions(llama_folder: Path, cache: Path) -> dict[Path, Path]:
    """The sources of the sentencepiece vocabulary, a folder and a GGUF file, each with an empty
    folder for what it is converted to."""
    gguf_path = write_gguf(cache / "spm.gguf", llama_folder / "tokenizer.model")
    found = {llama_folder: cache / "from_folder", gguf_path: cache / "from_gguf"}
    for folder in found.values():
        folder.mkdir()
    return found


@pytest.fixture(scope="module")
def oracle(
    llama_folder: Path, sources: dict[str, str], conversions: dict[Path, Path]
) -> dict[str, Any]:
    request = {
        "convert": {str(source): str(folder) for source, folder in conversions.items()},
        "tokenize": {str(smollm2()): TEXTS, str(llama_folder): TEXTS},
        "single_digits": [str(smollm2())],
        "render": [(sources[name], SPECIAL, CHATS[n]) for name, n in CASES],
    }
    from ..transformers_oracle import answers

    with warnings.catch_warnings(action="ignore"):
        return answers(json.loads(json.dumps(request)))


def write_gguf(path: Path, model: Path) -> Path:
    """The same sentencepiece vocabulary as a GGUF file holds it."""
    import gguf
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    kinds = [
        (
            2
            if pieces.is_unknown(i)
            else 3
            if pieces.is_control(i)
            else 6
            if pieces.is_byte(i)
            else 1
        )
        for i in range(len(pieces))
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(i) for i in range(len(pieces))])
    writer.add_token_scores([pieces.get_score(i) for i in range(len(pieces))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check_tokenizer(tokenizer: Tokenizer, expected: dict[str, Any]) -> None:
    assert tokenizer.encode_batch(TEXTS) == expected["ids"]
    assert [tokenizer.encode(t, add_special_tokens=False) for t in TEXTS] == expected["plain"]
    assert [tokenizer.decode(ids, False) for ids in expected["ids"]] == expected["texts"]
    assert [tokenizer.decode(ids) for ids in expected["ids"]] == expected["shown"]
    assert tokenizer.bos_id == expected["bos"] and expected["eos"] in tokenizer.eos_ids


def test_smollm2_from_gguf_equals_transformers(
    tokenizer: Tokenizer, oracle: dict[str, Any]
) -> None:
    check_tokenizer(tokenizer, oracle["tokenize"][str(smollm2())])
    assert tokenizer.eos_ids == {2} and tokenizer.max_length == 8192
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]


def test_smollm2_takes_digits_one_by_one_and_the_spaces_before_them_as_one(
    tokenizer: Tokenizer,
) -> None:
    """As the model's own tokenizer.json has it; the plain pattern of GPT-2 gives Ġ, Ġ12."""
    for text, pieces in (
        ("a  12", ["a", "ĠĠ", "1", "2"]),
        (" 7", ["Ġ", "7"]),
        ("in 2026", ["in", "Ġ", "2", "0", "2", "6"]),
    ):
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode(text)] == pieces
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_equals_transformers_from_a_folder_and_from_gguf(
    llama_folder: Path,
    cache: Path,
    oracle: dict[str, Any],
    conversions: dict[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle has converted them, for the server's child that does would import transformers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def convert(source: Path, folder: Path) -> None:
        shutil.copytree(conversions[source], folder, dirs_exist_ok=True)

    monkeypatch.setattr(tokenizer_source, "_convert", convert)
    for source in conversions:
        tokenizer = Tokenizer.load(str(source))
        check_tokenizer(tokenizer, oracle["tokenize"][str(llama_folder)])
        emoji = tokenizer.encode("😀", add_special_tokens=False)
        assert tokenizer.token_bytes(emoji[-1]) == b"\x80"


def render(source: str, arguments: dict[str, Any]) -> str | None:
    template = ChatTemplate(source, SPECIAL)
    try:
        return text_of(template, **{"add_generation_prompt": False, **copy.deepcopy(arguments)})
    except ChatTemplateError as error:
        assert str(error).endswith(".")
        return None


@pytest.mark.parametrize("name", [*TEMPLATES, "smollm2"])
def test_templates_render_as_in_transformers(
    name: str, sources: dict[str, str], oracle: dict[str, Any]
) -> None:
    for (case, n), expected in zip(CASES, oracle["render"], strict=True):
        if case == name and not (name in TOOL_BLIND and n in TOOL_CASES):
            assert render(sources[name], CHATS[n]) == expected, (name, CHATS[n])
    refused = [text is None for (case, _), text in zip(CASES, oracle["render"], strict=True)]
    assert 0 < sum(refused) < len(refused) / 3


def test_a_chat_keeps_its_markers_as_single_ids(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
    ids = tokenizer.encode(text_of(template, [USER]), add_special_tokens=False)
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text_of(template, [USER])
