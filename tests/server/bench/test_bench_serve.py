"""`bench serve`: what it counts and times, and how it reports a server's errors."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.configs.options import ConfigError
from slipstream.server.bench import client_processes
from slipstream.server.bench import serve as bench
from slipstream.server.bench.load import (
    BenchRequest,
    arrivals,
    jsonl_requests,
    lognormal_requests,
    random_requests,
    sharegpt_requests,
)
from slipstream.server.bench.stream_client import StreamClient
from slipstream.server.commands import main

from .sse_server import Answer, Request, serving


def data(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content: str) -> bytes:
    return data(choices=[{"index": 0, "delta": {"content": content}}])


USAGE = data(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 9})
DONE = b"data: [DONE]\n\n"


def target_at(url: str) -> bench.Target:
    return bench.Target(f"{url}/v1/chat/completions", "m", chat=True)


async def outcome_of(*pieces: bytes, status: int = 200) -> bench.Outcome:
    async with serving(lambda _: Answer(pieces, status, seconds=0.03)) as server:
        target = target_at(server.url)
        async with StreamClient(target.url, {}, 10.0) as client:
            return await bench.send_request(client, target, BenchRequest("hi", 9))


async def test_tokens_are_counted_by_usage_and_times_by_text() -> None:
    role = data(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    split = text("second")
    outcome = await outcome_of(role, text("first"), split[:9], split[9:], USAGE, DONE)
    assert outcome.error is None
    assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 9)
    assert outcome.ttft >= 0.055  # two pieces: the role carries no text
    assert len(outcome.gaps) == 1 and outcome.gaps[0] >= 0.055
    # The usage and [DONE] came later and do not count.
    assert outcome.latency == pytest.approx(outcome.ttft + outcome.gaps[0])
    assert outcome.tpot == pytest.approx(outcome.gaps[0] / 8)


@pytest.mark.parametrize(
    ("pieces", "status", "words"),
    [
        ((b'{"error": "full"}',), 503, "HTTP 503"),
        ((text("a"), data(error={"message": "lost"})), 200, "lost"),
        ((text("a"), USAGE), 200, "without [DONE]"),
        ((text("a"), DONE), 200, "reports no usage"),
        ((b"data: nonsense\n\n",), 200, "Error"),
    ],
)
async def test_an_error_of_the_server_is_a_failed_request(
    pieces: tuple[bytes, ...], status: int, words: str
) -> None:
    outcome = await outcome_of(*pieces, status=status)
    assert outcome.error is not None and words in outcome.error
    found = bench.figures([outcome, await outcome_of(text("a"), USAGE, DONE)], 2.0, {})
    assert (found["completed"], found["failed"]) == (1, 1)
    assert found["total_output_tokens"] == 9 and found["output_throughput"] == 4.5


async def test_a_closed_loop_keeps_its_concurrency_and_an_open_one_its_times() -> None:
    def answer(_: Request) -> Answer:
        return Answer([text("a") + USAGE + DONE], seconds=0.02)

    requests = [BenchRequest("hi", 9)] * 8
    async with serving(answer) as server:
        target = target_at(server.url)
        async with StreamClient(target.url, {}, 10.0) as client:
            outcomes, _ = await bench.run_load(client, target, requests, [0.0] * 8, 2)
        assert server.num_connections == 2 and [o.error for o in outcomes] == [None] * 8
        due = [0.05 * place for place in range(8)]
        async with StreamClient(target.url, {}, 10.0) as client:
            outcomes, seconds = await bench.run_load(client, target, requests, due, None)
    assert seconds >= 0.35 and len(outcomes) == 8


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    def gaps(burstiness: float, seed: int = 1) -> list[float]:
        times = list(arrivals(4001, 20.0, burstiness, seed))
        return [b - a for a, b in zip(times, times[1:], strict=False)]

    poisson, bursts, even = gaps(1.0), gaps(0.25), gaps(16.0)
    for found in (poisson, bursts, even):
        assert statistics.fmean(found) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(poisson) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(bursts) == pytest.approx(2 / 20, rel=0.15)
    assert statistics.stdev(even) == pytest.approx(0.25 / 20, rel=0.1)
    assert poisson == gaps(1.0) != gaps(1.0, seed=2)
    assert set(arrivals(5, math.inf, 1.0, 0)) == {0.0}


def test_summaries_goodput_and_percentiles() -> None:
    assert [bench.percentile([1.0, 2.0, 3.0, 4.0], p) for p in (0, 50, 90, 100)] == [
        1.0,
        2.5,
        pytest.approx(3.7),
        4.0,
    ]
    quick = bench.Outcome(None, 0.0, 0.1, 0.5, [0.4], 3, 5)
    slow = bench.Outcome(None, 0.0, 0.9, 1.3, [0.4], 3, 5)
    found = bench.figures([quick, slow], 2.0, {"ttft": 500.0, "tpot": 150.0})
    assert found["goodput"]["request_throughput"] == 0.5
    assert found["ttft_ms"] == {"mean": 500.0, "median": 500.0, "p90": 820.0, "p99": 892.0}
    assert bench.figures([quick, slow], 2.0, {"e2el": 1.0})["goodput"]["request_throughput"] == 0


@pytest.mark.parametrize("prefix", ["vllm", "slipstream"])
async def test_acceptance_is_the_change_of_the_counters(prefix: str) -> None:
    def exposition(drafts: int, accepted: list[int]) -> str:
        labels = 'engine="0",model_name="m"'
        lines = [
            f"# HELP {prefix}:spec_decode_num_drafts_total Steps.",
            f"{prefix}:spec_decode_num_drafts_total{{{labels}}} {drafts}.0",
            f"{prefix}:spec_decode_num_drafts_created{{{labels}}} 1.7e9",
            f"{prefix}:spec_decode_num_draft_tokens_total{{{labels}}} {2 * drafts}.0",
            f"{prefix}:spec_decode_num_accepted_tokens_total{{{labels}}} {sum(accepted)}.0",
        ]
        lines += [
            f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
            f'{{{labels},position="{place}"}} {count}.0'
            for place, count in enumerate(accepted)
        ]
        return "\n".join(lines) + "\n"

    answers = iter([exposition(10, [5, 1]), exposition(110, [85, 41]), "up 1\n"])
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=next(answers)))
    async with httpx.AsyncClient(transport=transport) as client:
        before, after, none = [await bench.drafting_counters(client, "http://t") for _ in range(3)]
    found = bench.acceptance(before, after)
    assert found is not None
    assert found["drafts"] == 100 and found["acceptance_rate"] == 0.6
    assert found["mean_acceptance_length"] == 2.2 and found["per_position"] == [0.8, 0.4]
    assert none is None and bench.acceptance(before, none) is None
    assert bench.acceptance(before, before) is None


def test_datasets(tmp_path: Path) -> None:
    requests = random_requests(50, 100, 10, 0.5, False, 3)
    assert (
        requests
        == random_requests(50, 100, 10, 0.5, False, 3)
        != random_requests(50, 100, 10, 0.5, False, 4)
    )
    lengths = [len(request.prompt) for request in requests]
    assert min(lengths) >= 50 and max(lengths) <= 150 and len(set(lengths)) > 10
    many = lognormal_requests(2000, 2048, False, 0)
    assert statistics.median(len(request.prompt) for request in many) == pytest.approx(110, rel=0.1)
    assert max(request.output_len for request in many) <= 2048

    file = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "Why is it so?"}, {"from": "gpt", "value": "a b c d e"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    found = sharegpt_requests(file, 3, lambda t: len(t.split()), 100, 0)
    assert found == [BenchRequest("Why is it so?", 5)] * 3
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a", "output_len": 3}\n\n{"messages": [{"role": "user"}]}\n')
    assert {request.output_len for request in jsonl_requests(lines, 2, 8, 0)} == {3, 8}
    lines.write_text('{"other": 1}\n')
    with pytest.raises(ConfigError, match="needs 'prompt' or 'messages'"):
        jsonl_requests(lines, 2, 8, 0)


def test_compare_reads_the_lines_of_another_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer, ours = tmp_path / "peer.jsonl", tmp_path / "ours.json"
    peer.write_text(
        'INFO something\n{"name": "peer", "start_s": 3}\n'
        '{"name": "peer", "batch": 1, "prefill_s": 0.1, "decode_tok_s": 100.0}\n'
        '{"name": "peer", "batch": 8, "prefill_s": 0.2, "decode_tok_s": 700.0}\n'
    )
    row = {"batch": 1, "decode_tok_s": 125.0, "prefill_s": 0.05, "step_ms": 8.0}
    ours.write_text(json.dumps({"kind": "offline", "runs": [{"name": "off", "results": [row]}]}))
    out = tmp_path / "table.json"
    assert main(["bench", "compare", str(peer), str(ours), "--output", str(out)]) == 0
    shown = {(r["row"], r["figure"]): r["ratio"] for r in json.loads(out.read_text())}
    assert shown == {("batch 1", "decode_tok_s"): 1.25, ("batch 1", "prefill_s"): 0.5}
    assert "1.250" in capsys.readouterr().out
    (tmp_path / "empty").write_text("nothing\n")
    assert main(["bench", "compare", str(tmp_path / "empty"), str(ours)]) == 2
    assert "contains no benchmark figures" in capsys.readouterr().err


async def test_the_error_for_a_missing_or_wrong_key_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: Request) -> Answer:
        if request.headers.get("authorization") != "Bearer right":
            return Answer([b'{"error": {"message": "no"}}'], 401)
        if request.path == "/v1/models":
            return Answer([b'{"data": [{"id": "m"}]}'])
        return Answer([text("a"), USAGE, DONE])

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    advice = "pass one with --api-key or OPENAI_API_KEY\n"
    async with serving(answer) as server:

        async def bench_serve(*flags: str) -> tuple[int, str]:
            command = ["bench", "serve", "--num-prompts", "1", "--base-url", server.url, *flags]
            status = await asyncio.to_thread(main, command)
            return status, capsys.readouterr().err

        none, warm = ("--num-warmups", "0"), ("--num-warmups", "1")
        status, shown = await bench_serve(*none)
        assert status == 2
        assert shown.endswith(f"the server requires an API key (HTTP 401); {advice}")
        status, shown = await bench_serve(*none, "--api-key", "wrong")
        assert status == 2
        assert f"the server does not accept this API key (HTTP 401); {advice}" in shown
        status, shown = await bench_serve(*warm, "--model", "m")
        assert status == 1 and f"requires an API key (HTTP 401); {advice}" in shown
        assert (await bench_serve(*warm, "--api-key", "right"))[0] == 0
        monkeypatch.setenv("OPENAI_API_KEY", "right")
        assert await bench_serve(*warm) == (
            0, "bench serve: 0 of 1 requests\nbench serve: 1 of 1 requests\n"
        )  # fmt: skip


@pytest.mark.parametrize(("share", "warns"), [(0.95, True), (0.3, False)])
async def test_a_line_says_when_the_client_was_the_bottleneck(
    share: float,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(count: int, load: client_processes.Load, tick: Any) -> client_processes.Measured:
        found = asyncio.run(client_processes.send(load, tick))
        return replace(found, seconds=2.0, cpu_share=share)

    monkeypatch.setattr(client_processes, "send_from", measured)
    async with serving(lambda _: Answer([text("a"), USAGE, DONE])) as server:
        command = ["bench", "serve", "--num-prompts", "1", "--num-warmups", "0", "--model", "m"]
        flags = ["--base-url", server.url, "--client-processes", "3"]
        assert await asyncio.to_thread(main, [*command, *flags]) == 0
    shown = capsys.readouterr().err
    line = "one of its 3 processes used 95% of a core; increase --client-processes"
    assert (line in shown) == warns and ("bottleneck" in shown) == warns


@pytest.mark.parametrize("flags", [("--output", "/nowhere/x.json"), ("--plot", "/nowhere/x.png")])
def test_an_unwritable_file_is_reported_before_any_request(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert f"{flags[0]} {flags[1]}: its folder does not exist" in capsys.readouterr().err
