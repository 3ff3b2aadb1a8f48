"""The counters of the real server are consistent with each other after requests."""

from __future__ import annotations

from openai import OpenAI

from .conftest import RunningServer

MODEL = "smollm2-135m"


PROMPT = "Repeat: red green blue red green blue red green blue red green blue red"
DRAFTS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")


def increments(server: RunningServer, max_tokens: int) -> dict[str, float]:
    """Run one greedy request; returns by how much it increases each counter.

    Also checks that the counter of generated tokens agrees with the reply's usage."""
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
    """Check that a verify step emits its accepted drafts and one token, a plain step one token."""
    assert counts["accepted_tokens_per_pos"] == counts["accepted_tokens"]
    assert counts["accepted_tokens"] <= counts["draft_tokens"]
    assert counts["accepted_tokens"] + counts["drafts"] + counts["plain"] == counts["generated"]


def test_speculative_counters_add_up(server: RunningServer) -> None:
    """Must hold with and without drafts: the default server chooses K by its measured times."""
    check_sums(increments(server, 64))


def test_speculative_counters_count_drafts(hardened: RunningServer) -> None:
    """This server drafts even where drafting is slower, because its draft length is fixed."""
    counts = increments(hardened, 24)
    check_sums(counts)
    assert 0 < counts["drafts"] <= counts["draft_tokens"] <= 3 * counts["drafts"]
    assert counts["accepted_tokens"] > 0


def test_finished_requests_leave_nothing_running(server: RunningServer, client: OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=3)
    assert server.metric("num_requests_running") == 0
    assert server.metric("num_requests_waiting") == 0
    assert server.metric("request_success_total") > 0
