"""Asks an OpenAI-compatible server for completions, whatever of OpenAI's API it has.

The server is the application in this process, or one at a URL: then `connect` finds out whether it
has completions or only chats, whether it takes options beyond OpenAI's, and whether it reports log
probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TOP = 5  # log probabilities asked for; OpenAI allows 5
# A server's defaults may cut off or change probabilities: llama.cpp's do, and vLLM and SGLang take
# those of the model's generation_config.json. The last name is llama.cpp's.
NEUTRAL = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "repeat_penalty": 1}
_ABSENT = (404, 405, 501)
_REFUSED = (400, 422)


class RequestFailed(Exception):
    """A server refused a request; the message is one sentence."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; 0 if there was no reply


@dataclass(frozen=True)
class Endpoint:
    client: httpx.AsyncClient  # its base URL is the server's
    model: str
    extra: dict[str, Any] = field(default_factory=dict)  # added to every request
    is_chat: bool = False  # the server has no completions
    has_logprobs: bool = True

    async def complete(self, prompt: str | Sequence[int], **options: Any) -> dict[str, Any]:
        """One completion; returns the reply's body. Raises RequestFailed.

        A reply of a chat gets the `text` that a completion has."""
        body = {"model": self.model, **self.extra, **options}
        if not self.has_logprobs:
            body.pop("logprobs", None)
        if not self.is_chat:
            return await self._post("/v1/completions", body | {"prompt": prompt})
        if (count := body.pop("logprobs", None)) is not None:
            body |= {"logprobs": True, "top_logprobs": count}
        body["messages"] = [{"role": "user", "content": prompt}]
        reply = await self._post("/v1/chat/completions", body)
        for choice in reply["choices"]:
            said = choice["message"]
            parts = (said.get(key) for key in ("reasoning_content", "reasoning", "content"))
            choice["text"] = "".join(part for part in parts if isinstance(part, str))
        return reply

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = await self.client.post(path, json=body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise RequestFailed(f"{self.client.base_url} cannot be asked ({reason})") from None
        if reply.status_code != 200:
            raise RequestFailed(failure(reply), reply.status_code)
        try:
            found: dict[str, Any] = reply.json()
            found["choices"][0]
        except (ValueError, LookupError, TypeError):
            raise RequestFailed(f"{path} of {self.client.base_url} sent no completion") from None
        return found


def failure(reply: httpx.Response) -> str:
    """What a reply with an error says, as one sentence."""
    text = reply.text[:200]
    try:
        error = reply.json()
        error = error.get("error", error)
        text = str(error.get("message", text) if isinstance(error, dict) else error)[:200]
    except (ValueError, AttributeError):
        pass
    if reply.status_code == 401:
        text += "; pass the key with --api-key or OPENAI_API_KEY"
    return f"HTTP {reply.status_code}: {text}"


async def connect(client: httpx.AsyncClient, model: str | None) -> Endpoint:
    """Find out by short requests how a server must be asked. Raises RequestFailed.

    `model` is the name in requests; None takes the first that the server lists."""
    model = model or await _first_model(client)
    failed: RequestFailed | None = None
    for endpoint in _ways(client, model):
        if failed is not None and failed.status in _ABSENT and not endpoint.is_chat:
            continue  # without completions, options do not matter
        try:
            reply = await endpoint.complete("1, 2,", max_tokens=1, temperature=0, logprobs=TOP)
        except RequestFailed as error:
            failed = error
            if error.status not in (*_ABSENT, *_REFUSED):
                break
            continue
        has_logprobs = bool(reply["choices"][0].get("logprobs"))
        return Endpoint(client, model, endpoint.extra, endpoint.is_chat, has_logprobs)
    assert failed is not None
    raise failed


def _ways(client: httpx.AsyncClient, model: str) -> Iterator[Endpoint]:
    """How a server may have to be asked, the best way first."""
    for is_chat in (False, True):
        for extra in (NEUTRAL, {}):
            for has_logprobs in (True, False):
                yield Endpoint(client, model, dict(extra), is_chat, has_logprobs)


async def _first_model(client: httpx.AsyncClient) -> str:
    reply = await client.get("/v1/models")
    if reply.status_code in _ABSENT:
        raise RequestFailed(f"{client.base_url} lists no model; name it")
    if reply.status_code != 200:
        raise RequestFailed(failure(reply), reply.status_code)
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise RequestFailed(f"{client.base_url} lists no model; name it") from None
