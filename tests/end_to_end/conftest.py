"""Clients of the server that all tests of a session share (see tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from .running_server import RunningServer, environment, free_port, slipstream

__all__ = ["RunningServer", "environment", "free_port", "slipstream"]


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    """An OpenAI client of the shared server, whose connections are closed after the test."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found
