"""Counters of the real server add up after real traffic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from .conftest import RunningServer

MODEL = "smollm2-135m"


PROMPT = "Repeat: red green blue red green blue red green blue red green blue red"
DRAFTS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")


@pytest.fixture(scope="module")
def drafting() -> Iterator[RunningServer]:
    """A server that drafts in every step, also where that does not pay."""
    running = RunningServer("-sc", '{"method":"ngram","num_speculative_tokens":3}')
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def grown(server: RunningServer, max_tokens: int) -> dict[str, float]:
    """What one greedy request adds to the counters; its tokens are also those of the reply."""
    names = {name: f"spec_decode_num_{name}_total" for name in DRAFTS}
    names |= {"generated": "generation_tokens_total", "plain": "plain_decode_steps_total"}
    before = {name: server.metric(metric) for name, metric in names.items()}
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    with client:
        reply = client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=0, max_tokens=max_tokens
        )
    counts = {name: server.metric(metric) - before[name] for name, metric in names.items()}
    assert reply.usage is not None
    assert counts["generated"] == reply.usage.completion_tokens == max_tokens
    return counts


def check_sums(counts: dict[str, float]) -> None:
    """Every verify step emits its accepted drafts and one more token; plain steps emit one."""
    assert counts["accepted_tokens_per_pos"] == counts["accepted_tokens"]
    assert counts["accepted_tokens"] <= counts["draft_tokens"]
    assert counts["accepted_tokens"] + counts["drafts"] + counts["plain"] == counts["generated"]


def test_speculative_counters_add_up(server: RunningServer) -> None:
    """Whether the default server drafts here depends on what steps take beside other work."""
    check_sums(grown(server, 64))


def test_speculative_counters_count_drafts(drafting: RunningServer) -> None:
    counts = grown(drafting, 24)
    check_sums(counts)
    assert 0 < counts["drafts"] <= counts["draft_tokens"] <= 3 * counts["drafts"]
    assert counts["accepted_tokens"] > 0


def test_finished_requests_leave_nothing_running(server: RunningServer, client: OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=3)
    assert server.metric("num_requests_running") == 0
    assert server.metric("num_requests_waiting") == 0
    assert server.metric("request_success_total") > 0
