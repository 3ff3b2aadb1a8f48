"""`metrics.speculative_decoding` in replies: by flag or request, whole, streamed, for n > 1."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI

from slipstream.runner.messages import AddRequest, RequestOutput
from slipstream.server.generation.reply import speculative_metrics

from ..api_fakes import EOS, TOKENIZER, ScriptedEngine, config_with, http_client, make_app


def drafted(request: AddRequest) -> list[Any]:
    """Three verify steps (3 of 3, 0 of 3, 1 of 2) between a plain first and last step."""
    steps = [(0, 0), (3, 3), (0, 3), (1, 2), (0, 0)]
    outputs: list[Any] = []
    for accepted, count in steps:
        outputs.append(
            RequestOutput(
                request.request_id, [40] * (accepted + 1), num_draft_tokens=count,
                num_accepted_tokens=accepted,
            )
        )  # fmt: skip
    outputs[-1].token_ids = [EOS]
    outputs[-1].finish_reason, outputs[-1].stop_token_id = "stop", EOS
    return outputs


def app_with(**server: Any) -> FastAPI:
    return make_app(ScriptedEngine(drafted), config_with(**server))


BODIES = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "tiny", "prompt": "x"},
}
EXPECTED = {
    "mean_acceptance_length": 1 + 4 / 3,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [1, 1, 0, 1, 0],
    "acceptance_histogram_by_draft_length": {"2": [0, 1, 0], "3": [1, 0, 0, 1]},
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 8,
    "num_spec_tokens": 4,
}


async def post(app: FastAPI, path: str, **more: Any) -> Any:
    async with http_client(app) as client:
        reply = await client.post(path, json=BODIES[path] | more)
    assert reply.status_code == 200, reply.text
    if not more.get("stream"):
        return reply.json()
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
async def test_metrics_come_when_the_server_or_the_request_asks(path: str) -> None:
    assert "metrics" not in await post(app_with(), path)
    by_flag = app_with(per_request_spec_decode_metrics="summary")
    assert (await post(by_flag, path))["metrics"] == {"speculative_decoding": EXPECTED}
    refused = await post(by_flag, path, speculative={"metrics": "none"})
    assert "metrics" not in refused
    asked = await post(app_with(), path, speculative={"metrics": "detailed"})
    assert asked["metrics"]["speculative_decoding"] == EXPECTED | {
        "per_step_accepted": [3, 0, 1],
        "per_step_drafted": [3, 3, 2],
    }


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_has_them_in_its_usage_chunk(path: str) -> None:
    app = app_with(per_request_spec_decode_metrics="summary")
    chunks = await post(app, path, stream=True, stream_options={"include_usage": True})
    assert chunks[-1]["metrics"] == {"speculative_decoding": EXPECTED}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]
    assert all("metrics" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("path", BODIES)
async def test_several_choices_count_together(path: str) -> None:
    app = app_with(per_request_spec_decode_metrics="summary")
    found = (await post(app, path, n=3))["metrics"]["speculative_decoding"]
    assert found["num_spec_steps"] == 9 and found["num_draft_tokens"] == 24
    assert found["acceptance_histogram"] == [3, 3, 0, 3, 0]
    assert found["mean_acceptance_length"] == EXPECTED["mean_acceptance_length"]


async def test_a_server_that_does_not_draft_tells_nothing() -> None:
    engine = ScriptedEngine()
    engine.ready.num_speculative_tokens = 0
    app = make_app(engine, config_with(per_request_spec_decode_metrics="summary"))
    assert "metrics" not in await post(app, "/v1/completions")


def test_a_request_without_drafts_has_zeros() -> None:
    metrics = speculative_metrics([], 3)
    assert metrics.mean_acceptance_length == 1.0 and metrics.draft_acceptance_rate == 0.0
    assert metrics.acceptance_histogram == [0] * 4


def rejecting(request: AddRequest) -> list[Any]:
    """Two accepted and one rejected draft, half a character, a plain step, an end within drafts."""
    half, rest = TOKENIZER.encode("é", False)
    x, y = TOKENIZER.encode("xy", False)
    steps = [
        ([x, y, half], [x, y, y]),
        ([rest], [x, y]),
        ([x], None),
        ([y, EOS], [y, EOS, x]),
    ]
    outputs: list[Any] = []
    for ids, drafts in steps:
        output = RequestOutput(request.request_id, ids, num_draft_tokens=len(drafts or ()))
        output.num_accepted_tokens = len(ids) - 1
        output.draft_token_ids = drafts if request.sampling.report_drafts else None
        outputs.append(output)
    outputs[-1].finish_reason, outputs[-1].stop_token_id = "stop", EOS
    return outputs


STEPS = [
    {"tokens": ["x", "y", ""], "num_accepted": 2, "rejected": ["y"]},
    {"tokens": ["é"], "num_accepted": 0, "rejected": ["x", "y"]},
    {"tokens": ["x"], "num_accepted": 0, "rejected": []},
    {"tokens": ["y", ""], "num_accepted": 1, "rejected": []},
]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_names_the_steps_that_a_request_asks_for(path: str) -> None:
    app = make_app(ScriptedEngine(rejecting))
    more: dict[str, Any] = {"stream": True}
    plain = await post(app, path, **more)
    assert not any("speculative_steps" in each for chunk in plain for each in chunk["choices"])
    more["speculative"] = {"steps": True}
    for n in (1, 2):
        chunks = await post(app, path, **more, n=n)
        for index in range(n):
            choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            steps = [step for choice in choices for step in choice.get("speculative_steps", ())]
            assert steps == STEPS
            texts = [
                c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices
            ]
            assert "".join(texts) == "xyéxy"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("more", [{}, {"stream": True, "stop": "x"}])
async def test_steps_need_a_stream_without_stop_strings(path: str, more: dict[str, Any]) -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        reply = await client.post(path, json=BODIES[path] | more | {"speculative": {"steps": True}})
    assert reply.status_code == 400 and "'stream' is true" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "speculative"
