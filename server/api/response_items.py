"""Builds the output items of /v1/responses from a message's deltas, and the stream events for them.

Whole replies use the items, streams use the events.
"""

from __future__ import annotations

import uuid
from typing import Any

from ..openai_types.replies import Delta, ReplyToolCall

Event = dict[str, Any]  # a stream event without its sequence number


class ResponseItems:
    """The output items of a response; only the last one can be open, that is, unfinished."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []  # logprobs of tokens for the next text delta
        self._open = ""  # type of the open item, or ""

    def add(self, delta: Delta) -> list[Event]:
        """Add a delta; returns the stream events for it."""
        events: list[Event] = []
        if delta.reasoning_content:
            events += self._text("reasoning", delta.reasoning_content)
        if delta.content:
            events += self._text("message", delta.content)
        for part in delta.tool_calls or ():
            events += self._call(part)
        return events

    def finish(self, status: str = "completed") -> list[Event]:
        """Close the open item; returns its events. Without any item, adds an empty message."""
        events = [] if self.items else self._begin("message")
        return events + self._close(status)

    def _text(self, kind: str, text: str) -> list[Event]:
        events = [] if self._open == kind else [*self._close(), *self._begin(kind)]
        self.items[-1]["content"][0]["text"] += text
        name = "output_text" if kind == "message" else "reasoning_text"
        event = self._event(f"response.{name}.delta", content_index=0, delta=text)
        if kind == "message":
            event["logprobs"], self.logprobs = self.logprobs, []
            self.items[-1]["content"][0]["logprobs"] += event["logprobs"]
        return [*events, event]

    def _call(self, part: ReplyToolCall) -> list[Event]:
        events: list[Event] = []
        if isinstance(part.id, str):
            events += [*self._close(), *self._begin("function_call", part)]
        arguments = part.function.arguments
        if isinstance(arguments, str) and arguments:
            self.items[-1]["arguments"] += arguments
            name = "response.function_call_arguments.delta"
            events.append(self._event(name, delta=arguments))
        return events

    def _begin(self, kind: str, call: ReplyToolCall | None = None) -> list[Event]:
        self._open = kind
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {
            "id": f"{prefix}_{uuid.uuid4().hex}",
            "type": kind,
            "status": "in_progress",
        }
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        elif call is not None:
            item |= {"call_id": call.id, "name": call.function.name, "arguments": ""}
        self.items.append(item)
        added = self._event("response.output_item.added", item=_copy(item))
        del added["item_id"]
        if kind == "function_call":
            return [added]
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        name = "response.content_part.added"
        shown = {key: list(v) if isinstance(v, list) else v for key, v in part.items()}
        return [added, self._event(name, content_index=0, part=shown)]

    def _close(self, status: str = "completed") -> list[Event]:
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item = self.items[-1]
        item["status"] = status
        if kind == "function_call":
            name = "response.function_call_arguments.done"
            events = [self._event(name, arguments=item["arguments"], name=item["name"])]
        else:
            part = item["content"][0]
            name = "output_text" if kind == "message" else "reasoning_text"
            done = self._event(f"response.{name}.done", content_index=0, text=part["text"])
            if kind == "message":
                done["logprobs"] = part["logprobs"]
            closed = self._event("response.content_part.done", content_index=0, part=dict(part))
            events = [done, closed]
        last = self._event("response.output_item.done", item=_copy(item))
        del last["item_id"]
        return [*events, last]

    def _event(self, kind: str, /, **fields: Any) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "output_index": index, "item_id": self.items[index]["id"], **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    copied = dict(item)
    if "content" in item:
        copied["content"] = [dict(part) for part in item["content"]]
    return copied
