"""A client that speaks ASGI itself: a test reads as it comes and hangs up when it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

Header = tuple[bytes, bytes]


class OpenRequest:
    """One POST whose answer is read message by message."""

    def __init__(
        self, app: FastAPI, path: str, body: dict[str, Any], headers: Sequence[Header] = ()
    ) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.hung_up = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self.sent.put))  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def next(self) -> dict[str, Any]:
        """The next ASGI message that the app sends."""
        return await asyncio.wait_for(self.sent.get(), 5)

    async def hang_up(self) -> None:
        """Disconnect and wait until the app has ended the request."""
        self.hung_up.set()
        # Not wait_for: that would cancel the app, and the test would pass by its own doing.
        done, _ = await asyncio.wait({self.task}, timeout=1)
        assert done, "the app goes on after the client has hung up"
        await self.task
