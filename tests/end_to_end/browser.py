"""A headless Chromium, driven by its DevTools protocol over a pair of pipes.

Messages are JSON objects that end with a zero byte. No package and no open port is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
    *("--disable-extensions", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio"),
)
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Home": 36}


def find_chromium() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser with one page. `problems` lists errors in its console, and `urls` all requests.

    A context, which ends the browser.
    """

    def __init__(self, program: str) -> None:
        self.problems: list[str] = []
        self.urls: list[str] = []
        self._last_id = 0
        self._buffer = b""
        self._session: str | None = None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._write = os.pipe()
        self._read, replies = os.pipe()
        # The browser reads from descriptor 3 and writes to 4; copies above those can move there.
        ends = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (commands, replies)]
        root = ["--no-sandbox"] if os.getuid() == 0 else []  # the sandbox refuses to run as root
        arguments = [program, *FLAGS, *root, f"--user-data-dir={self._folder.name}", "about:blank"]
        silent = [(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, end, place) for end, place in zip(ends, (3, 4), strict=True)]
        self._pid = os.posix_spawn(program, arguments, os.environ, file_actions=[*silent, *pipes])
        for each in (commands, replies, *ends):
            os.close(each)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        process = psutil.Process(self._pid)
        process.terminate()
        try:
            process.wait(10)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(10)
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()

    # --- the protocol ---------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; notes what happened meanwhile."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive(60)
            if reply.get("id") == self._last_id:
                assert "error" not in reply, f"{method}: {reply}"
                result: dict[str, Any] = reply["result"]
                return result
            self._note(reply)

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], "no answer in time"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(json.dumps(params["entry"]))
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])

    # --- the page -------------------------------------------------------------------------------

    def open(self, url: str, width: int, height: int, scheme: str = "light") -> None:
        """Open a page in a window of this size, with the colour scheme "light" or "dark"."""
        self.resize(width, height, scheme)
        self.call("Page.navigate", url=url)
        self.wait(lambda: self.run("document.readyState") == "complete", "the page loads")

    def resize(self, width: int, height: int, scheme: str = "light", scale: float = 1) -> None:
        """Change the size of the window and the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def type(self, text: str) -> None:
        """Type into the element with the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key."""
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        if key == "Enter":
            pressed["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **pressed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def hover(self, expression: str) -> None:
        """Move the mouse over the element that an expression finds."""
        self.run(
            f"{expression}.scrollIntoView({{block: 'center'}});"
            " new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        box = self.run(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])({expression}.getClientRects()[0])"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def wait(self, holds: Callable[[], Any], what: str, seconds: float = 60) -> None:
        """Wait until `holds` is true."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"did not happen: {what}; {self.problems}"
            time.sleep(0.05)

    def screenshot(self) -> bytes:
        """What the window shows, as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
