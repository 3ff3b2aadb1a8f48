"""An engine that plays scripts, a byte tokenizer, and an app made of them, without any process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from slipstream.configs.schema import Config, ModelConfig, ServerConfig
from slipstream.runner.messages import (
    AddRequest,
    Ready,
    RequestOutput,
    StepStats,
    TokenLogprobs,
    pack_logprobs,
)
from slipstream.server.chat_templates.chat_template import ChatTemplate
from slipstream.server.health import Health, State
from slipstream.server.http.sse import WRITER
from slipstream.server.request_stream import EngineDead
from slipstream.server.startup.app import create_app
from slipstream.server.text.tokenizer import Tokenizer

MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHARED = ChatTemplate(TEMPLATE, {})  # it compiles once what all apps render
REPLY = "Hello wörld 🎉!"
MAX_LEN = 512

Script = Callable[[AddRequest], list[RequestOutput | Exception | float]]


def byte_tokenizer() -> Tokenizer:
    """One token a byte, a few merged ones, and the special token <|end|>, which is also EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("a", "b")]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *map("".join, merges)])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.token_to_id("<|end|>")
assert EOS is not None


def logprobs_of(ids: list[int], top: int) -> list[TokenLogprobs]:
    """Token i has log probability -(i + 1) / 8 and is the likeliest; its rivals follow it."""
    found = []
    for i, token in enumerate(ids):
        rivals = [(token + j) % 200 if j else token for j in range(top)]
        own = -(i + 1) / 8
        found.append(TokenLogprobs(token, own, 1, rivals, [own - j for j in range(top)]))
    return found


def reply_with(
    text: str = REPLY, run: int = 3, eos: bool = True, ids: list[int] | None = None
) -> Script:
    """Emits the text's tokens, `run` a step, up to max_tokens; then EOS if that may come."""

    def script(request: AddRequest) -> list[RequestOutput | Exception | float]:
        sampling = request.sampling
        tokens = list(TOKENIZER.encode(text, False) if ids is None else ids)
        if eos and EOS in sampling.stop_token_ids:
            tokens.append(EOS)
        while len(tokens) < sampling.max_tokens and tokens[-1] != EOS:
            tokens += tokens[: sampling.max_tokens - len(tokens)]
        tokens = tokens[: sampling.max_tokens]
        stopped = tokens[-1] == EOS and EOS in sampling.stop_token_ids
        top = sampling.logprobs
        logprobs = None if top is None else logprobs_of(tokens, top)
        outputs: list[RequestOutput | Exception | float] = []
        for start in range(0, len(tokens), run):
            part = tokens[start : start + run]
            output = RequestOutput(request.request_id, part, num_draft_tokens=3)
            output.num_accepted_tokens = len(part) - 1
            if logprobs is not None:
                output.logprobs = logprobs[start : start + run]
            if not start:
                output.num_cached_tokens = 2
                if sampling.prompt_logprobs is not None:
                    found = logprobs_of(request.prompt_token_ids, sampling.prompt_logprobs)
                    output.prompt_logprobs = pack_logprobs(found[1:])
            if start + run >= len(tokens):
                output.finish_reason = "stop" if stopped else "length"
                output.stop_token_id = EOS if stopped else None
            outputs.append(output)
        return outputs

    return script


class ScriptedStream:
    """As the engine client's stream; nothing is ever there before it is asked for."""

    def __init__(self, outputs: AsyncIterator[RequestOutput]) -> None:
        self._outputs = outputs
        self._left: list[RequestOutput | Exception] = []  # by `follow` to the reader

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._left:
            return await anext(self._outputs)
        left = self._left.pop()
        if isinstance(left, Exception):
            raise left
        return left

    def drain(self) -> list[RequestOutput]:
        return []

    async def follow(self, take: Callable[[list[RequestOutput]], bool]) -> None:
        """The reader gets the end, or the fault, and whatever comes after `take` has enough."""
        more = not self._left
        while more:
            try:
                output = await anext(self._outputs)
            except StopAsyncIteration:
                return
            except Exception as error:
                self._left.append(error)
                return
            if output.finish_reason is not None:
                self._left.append(output)
                return
            more = take([output])


class AtOnce:
    """An app whose streams may write without waiting, every other time, as if the client were slow.

    So what is written while it comes and what waits its turn alternate in every stream.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions = {**scope.get("extensions", {}), WRITER: HastyWriter(send)}
        await self._app({**scope, "extensions": extensions}, receive, send)


class HastyWriter:
    """Writes by a `send` that never waits."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._num_asked = 0

    def may_write(self) -> bool:
        self._num_asked += 1
        return self._num_asked % 3 != 0

    def write(self, data: bytes) -> bool:
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
        with pytest.raises(StopIteration):
            sending.send(None)  # type: ignore[attr-defined]
        return self.may_write()


class ScriptedEngine:
    """Plays `script` for each request: outputs, errors to raise, seconds to wait."""

    def __init__(self, script: Script | None = None) -> None:
        self.health = Health()
        self.health.change("ready")
        self.stats: Callable[[StepStats], None] | None = None
        self.script = script or reply_with()
        self.requests: list[AddRequest] = []
        self.aborted: list[str] = []
        self.open: set[str] = set()
        assert EOS is not None
        self.ready = Ready(
            MAX_LEN, TOKENIZER.vocab_size, 64, 16, [EOS], "cpu", "float32", "reference", "ngram", 4,
            {"load": 0.5, "kv_cache": 0.25}, 64, 2048,
        )  # fmt: skip

    @property
    def state(self) -> State:
        return self.health.state

    @property
    def num_open(self) -> int:
        return len(self.open)

    def submit(self, request: AddRequest) -> ScriptedStream:
        if self.state != "ready":
            raise EngineDead("there is no worker", 3)
        assert request.request_id not in self.open
        self.requests.append(request)
        self.open.add(request.request_id)
        return ScriptedStream(self._play(request))

    async def _play(self, request: AddRequest) -> AsyncIterator[RequestOutput]:
        for item in self.script(request):
            if request.request_id not in self.open:
                return
            if isinstance(item, Exception):
                self.open.discard(request.request_id)
                raise item
            if isinstance(item, float):
                await asyncio.sleep(min(item, 60.0))
                continue
            await asyncio.sleep(0)
            if item.finish_reason is not None:
                self.open.discard(request.request_id)
            if self.stats is not None:
                self.stats(StepStats(num_running=self.num_open))
            yield item

    def abort(self, request_id: str) -> None:
        if request_id in self.open:
            self.open.discard(request_id)
            self.aborted.append(request_id)


def config_with(**server: object) -> Config:
    """A config of the tiny model, with these fields of its server section."""
    section = replace(ServerConfig(), served_model_name=(MODEL, "alias"), **server)  # type: ignore[arg-type]
    return Config(server=section, model=ModelConfig(model=MODEL))


def make_app(engine: ScriptedEngine, config: Config | None = None) -> FastAPI:
    """The application under test."""
    return create_app(config or config_with(), engine, tokenizer=TOKENIZER, template=SHARED)


def http_client(app: FastAPI) -> httpx.AsyncClient:
    """Speaks to the app without a socket."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(AtOnce(app)), base_url="http://test", timeout=20
    )


def sdk_client(app: FastAPI) -> AsyncOpenAI:
    """OpenAI's SDK on the same transport."""
    return AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=http_client(app), max_retries=0
    )
