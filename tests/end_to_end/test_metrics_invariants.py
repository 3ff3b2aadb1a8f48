"""Counters of the real server add up after real traffic."""

from __future__ import annotations

from openai import OpenAI

from .conftest import RunningServer

MODEL = "smollm2-135m"


def test_speculative_counters_add_up(server: RunningServer, client: OpenAI) -> None:
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    full = {name: f"spec_decode_num_{name}_total" for name in names}
    before = {name: server.metric(metric) for name, metric in full.items()}
    generated_before = server.metric("generation_tokens_total")
    plain_before = server.metric("plain_decode_steps_total")
    prompt = "Repeat: red green blue red green blue red green blue red green blue red"
    reply = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=64)
    grown = {name: server.metric(metric) - before[name] for name, metric in full.items()}
    assert grown["drafts"] > 0
    assert grown["accepted_tokens_per_pos"] == grown["accepted_tokens"] <= grown["draft_tokens"]
    assert reply.usage is not None
    generated = server.metric("generation_tokens_total") - generated_before
    assert generated == reply.usage.completion_tokens
    # Every verify step emits its accepted drafts and one more token; plain steps emit one.
    plain = server.metric("plain_decode_steps_total") - plain_before
    assert grown["accepted_tokens"] + grown["drafts"] + plain == generated


def test_finished_requests_leave_nothing_running(server: RunningServer, client: OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=3)
    assert server.metric("num_requests_running") == 0
    assert server.metric("num_requests_waiting") == 0
    assert server.metric("request_success_total") > 0
