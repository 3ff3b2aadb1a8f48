"""Log lines: JSON members, request ids, escaping, and the access log's thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from slipstream.configs.logs import request_id

PROGRAM = """
import logging, sys, threading
from slipstream.configs.logs import ACCESS_LOGGER, configure_logging, request_id

configure_logging("info", sys.argv[1], "server")
logging.getLogger("a").info("before")
request_id.set("req-7")
logging.getLogger("a").warning("inside %d", 5)
assert threading.active_count() == 1
extra = {"request_id": "req-8", "fields": {"status": 200, "seconds": 0.25}}
for _ in range(100):
    logging.getLogger(ACCESS_LOGGER).info("GET /x", extra=extra)
assert threading.active_count() == 2
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("a").exception("failed")
"""


def written(form: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, form]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()


def test_json_lines_carry_the_request_and_their_fields() -> None:
    lines = [json.loads(line) for line in written("json")]
    plain = {line["message"]: line for line in lines}
    assert "request_id" not in plain["before"]
    assert plain["inside 5"]["request_id"] == "req-7"
    assert plain["inside 5"]["level"] == "warning" and plain["inside 5"]["process"] == "server"
    assert plain["GET /x"]["request_id"] == "req-8"
    assert plain["GET /x"]["status"] == 200 and plain["GET /x"]["seconds"] == 0.25
    assert "ZeroDivisionError" in plain["failed"]["exception"]


def test_the_thread_writes_every_access_line_once_before_the_process_ends() -> None:
    lines = written("text")
    assert sum(line.endswith("GET /x id=req-8") for line in lines) == 100
    assert any(line.endswith("inside 5 id=req-7") for line in lines)
    assert any(line.endswith("before") for line in lines)


FORGERY = r"""
import logging, sys
from slipstream.configs.logs import configure_logging

configure_logging("info", sys.argv[1], "server")
evil = "/x\n2026-01-01 00:00:00,000 INFO server a: forged\x1b[2J\x9b1m\u2028\u202eend"
logging.getLogger("a").info("GET %s", evil)
try:
    raise ValueError(evil)
except ValueError:
    logging.getLogger("a").exception("failed on %s", evil)
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_text_of_a_client_cannot_forge_a_line_or_control_the_terminal(form: str) -> None:
    command = [sys.executable, "-c", FORGERY, form]
    environ = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, check=True, env=environ)
    text = done.stderr.decode()
    assert text.isprintable() is False and text.replace("\n", "").isprintable()
    assert "\\u202e" in text or "\\u202E" in text  # it is shown, as an escape
    if form == "json":
        assert len(text.splitlines()) == 2
        return
    begun = [line for line in text.splitlines() if not line.startswith("    ")]
    assert len(begun) == 2 and all(" a: " in line for line in begun)
    assert r"GET /x\n2026-01-01 00:00:00,000 INFO server a: forged\x1b[2J\x9b1m" in begun[0]
    assert "    ValueError: /x" in text  # and the trace is still there


def test_no_request_is_the_default() -> None:
    assert request_id.get() == ""


HUB_REQUESTS = """
import logging, sys
from slipstream.configs.logs import configure_logging

configure_logging(sys.argv[1], "text", "worker")
for name in ("httpx", "httpx2"):
    logging.getLogger(name).info("HTTP Request: GET")
"""


@pytest.mark.parametrize(("level", "lines"), [("info", 0), ("debug", 2)])
def test_requests_to_the_hub_are_logged_only_at_debug_level(level: str, lines: int) -> None:
    command = [sys.executable, "-c", HUB_REQUESTS, level]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert shown.count("HTTP Request") == lines
