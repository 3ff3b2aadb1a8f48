"""gpt-oss's chats: the same split whole and streamed, whatever number of tokens a step brings."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from slipstream.runner.messages import AddRequest, RequestOutput
from slipstream.server.chat_templates.chat_template import ChatTemplate
from slipstream.server.startup.app import create_app
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.server.tool_parsers.harmony import HarmonyToolParser

from ..api_fakes import MODEL, Script, ScriptedEngine, byte_tokenizer, config_with, sdk_client

# The parts of gpt-oss's template that matter here.
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.thinking is defined %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HI: list[Any] = [{"role": "user", "content": "Hi <|call|>"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
THINK = "<|channel|>analysis<|message|>Hm, 🎉.<|end|><|start|>assistant"
ANSWER = f"{THINK}<|channel|>final<|message|>Wörld, 4 < 5."
CALL = f"{THINK}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}"


def harmony_tokenizer() -> Tokenizer:
    backend = byte_tokenizer().backend
    backend.add_special_tokens(list(HarmonyToolParser.special_tokens))
    return Tokenizer(backend)


TOKENIZER = harmony_tokenizer()
IDS = {token: TOKENIZER.token_to_id(token) for token in HarmonyToolParser.special_tokens}


def reply_of(text: str, end: str, run: int) -> Script:
    """Emits the text's tokens, `run` a step, and then the token `end`, if that is a stop."""

    def script(request: AddRequest) -> list[RequestOutput | Exception | float]:
        ids = [*TOKENIZER.encode(text, False), IDS[end]]
        assert IDS[end] in request.sampling.stop_token_ids
        outputs: list[RequestOutput | Exception | float] = []
        for start in range(0, len(ids), run):
            output = RequestOutput(request.request_id, ids[start : start + run])
            if start + run >= len(ids):
                output.finish_reason, output.stop_token_id = "stop", IDS[end]
            outputs.append(output)
        return outputs

    return script


def app_of(script: Script) -> tuple[FastAPI, ScriptedEngine]:
    engine = ScriptedEngine(script)
    engine.ready.vocab_size, engine.ready.max_model_len = TOKENIZER.vocab_size, 4096
    engine.ready.eos_token_ids = [0]  # as in a folder whose config names no harmony token
    template = ChatTemplate(TEMPLATE, {})
    return create_app(config_with(), engine, tokenizer=TOKENIZER, template=template), engine


def prompt_of(engine: ScriptedEngine) -> str:
    ids = engine.requests[-1].prompt_token_ids
    return TOKENIZER.decode(ids, skip_special_tokens=False)


async def both(script: Script, **body: Any) -> tuple[list[Any], ScriptedEngine]:
    """(reasoning, content, calls, finish reason) of a whole reply and of a stream."""
    app, engine = app_of(script)
    async with sdk_client(app) as client:
        create = client.chat.completions.create
        whole = (await create(model=MODEL, messages=HI, **body)).choices[0]
        parts = ["", "", "", ""]
        async for chunk in await create(model=MODEL, messages=HI, stream=True, **body):
            (part,) = chunk.choices
            delta = part.delta
            parts[0] += getattr(delta, "reasoning_content", None) or ""
            parts[1] += delta.content or ""
            for call in delta.tool_calls or ():
                parts[2] += (call.function.name or "") + (call.function.arguments or "")
            parts[3] = part.finish_reason or parts[3]
    message = whole.message
    calls = "".join(c.function.name + c.function.arguments for c in message.tool_calls or ())
    reasoning = getattr(message, "reasoning_content", None) or ""
    return [[reasoning, message.content or "", calls, whole.finish_reason], parts], engine


@pytest.mark.parametrize("run", [1, 3, 200])
async def test_reasoning_and_answer(run: int) -> None:
    found, engine = await both(reply_of(ANSWER, "<|return|>", run), reasoning_effort="high")
    assert found == [["Hm, 🎉.", "Wörld, 4 < 5.", "", "stop"]] * 2
    prompt = prompt_of(engine)
    assert "Reasoning: high<|end|>" in prompt and prompt.endswith("<|start|>assistant")


@pytest.mark.parametrize("run", [1, 4, 200])
async def test_a_call_ends_at_its_token(run: int) -> None:
    found, engine = await both(reply_of(CALL, "<|call|>", run), tools=TOOLS)
    assert found == [["Hm, 🎉.", "", "now{}", "tool_calls"]] * 2
    assert '"name": "now"' in prompt_of(engine)


@pytest.mark.parametrize("run", [1, 200])
async def test_a_grammar_constrains_the_final_channel_alone(run: int) -> None:
    script = reply_of('{"a": 1}', "<|return|>", run)
    found, engine = await both(script, response_format={"type": "json_object"})
    assert found == [["", '{"a": 1}', "", "stop"]] * 2
    assert prompt_of(engine).endswith("<|start|>assistant<|channel|>final<|message|>")
    ids = engine.requests[-1].prompt_token_ids
    assert ids[-1] == IDS["<|message|>"] and IDS["<|call|>"] not in ids  # the client's is text
    assert engine.requests[-1].sampling.grammar is not None
