"""Models, health, metrics, tokenize, keys, CORS and request ids."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.runner.messages import StepStats
from slipstream.server.metrics import Metrics

from ..api_fakes import (
    EOS,
    MAX_LEN,
    MODEL,
    TOKENIZER,
    ScriptedEngine,
    config_with,
    http_client,
    make_app,
    sdk_client,
)

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 100}


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name without prefix, most telling label) -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            label = labels.get("finished_reason") or labels.get("position") or labels.get("le")
            label = label or labels.get("phase") or labels.get("status") or ""
            found[sample.name.partition(":")[2], label] = sample.value
    return found


async def test_models_are_listed_under_each_name() -> None:
    async with sdk_client(make_app(ScriptedEngine())) as client:
        listed = await client.models.list()
        assert [model.id for model in listed.data] == [MODEL, "alias"]
        one = await client.models.retrieve("alias")
    assert one.object == "model" and one.owned_by == "slipstream"


async def test_health_follows_the_engine() -> None:
    engine = ScriptedEngine()
    async with http_client(make_app(engine)) as client:
        for path in ("/health", "/ready", "/ping"):
            assert (await client.get(path)).json()["status"] == "ready"
            assert (await client.head(path)).status_code == 200
        engine.health.change("restarting", "the worker was killed", 2.0)
        response = await client.get("/health")
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 2
        assert response.json()["status"] == "restarting"
        assert "killed" in response.json()["detail"]
        assert (await client.get("/version")).json()["version"]
        assert (await client.get("/v1/models")).status_code == 200


async def test_the_address_that_the_start_prints_leads_on() -> None:
    app = make_app(ScriptedEngine(), config_with(root_path="/llm", api_key=("k",)))
    async with http_client(app) as client:
        for path in ("/", "/llm/"):
            reply = await client.get(path)  # without a key
            assert reply.status_code == 200
            index = reply.json()
            assert index["name"] == "slipstream"
            assert index["version"] == (await client.get("/version")).json()["version"]
            for name in ("docs", "models", "health"):
                assert index["links"][name].startswith("/llm/")
                found = await client.get(
                    index["links"][name], headers={"Authorization": "Bearer k"}
                )
                assert found.status_code == 200
        page = await client.get("/", headers={"Accept": "text/html,*/*;q=0.8"})
        assert page.headers["content-type"].startswith("text/html")
        assert set(re.findall(r'href="([^"]+)"', page.text)) == set(index["links"].values())
        assert (await client.head("/")).status_code == 200
        assert (await client.post("/")).status_code == 405
        assert (await client.get("/nowhere")).status_code == 401


async def test_tokenize_and_back() -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        reply = (await client.post("/tokenize", json={"prompt": "hello é"})).json()
        assert reply["tokens"] == TOKENIZER.encode("hello é")
        assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == MAX_LEN
        back = await client.post("/detokenize", json={"tokens": [*reply["tokens"], EOS]})
        assert back.json()["prompt"] == "hello é<|end|>"
        chat = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
        rendered = (await client.post("/tokenize", json=chat)).json()
        assert TOKENIZER.decode(rendered["tokens"], False) == "<|user|>hi<|end|><|assistant|>"
        assert rendered["token_strs"][-1]
        for wrong in ({}, {"prompt": "x", "messages": chat["messages"]}, {"prompt": 5}):
            assert (await client.post("/tokenize", json=wrong)).status_code == 400
        assert (await client.post("/detokenize", json={"tokens": [10**6]})).status_code == 400


async def test_requests_show_in_the_metrics() -> None:
    engine = ScriptedEngine()
    async with http_client(make_app(engine)) as client:
        for n in (1, 2):
            await client.post("/v1/completions", json={**BODY, "n": n})
        await client.post("/v1/completions", json={**BODY, "max_tokens": 2})
        await client.post("/v1/completions", json={**BODY, "n": 0})
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        found = samples(response.text)
    assert found["request_success_total", "stop"] == 3
    assert found["request_success_total", "length"] == 1
    assert found["request_success_total", "abort"] == 0
    assert found["prompt_tokens_total", ""] == 4 * 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert found[f"{name}_count", ""] == found[f"{name}_bucket", "+Inf"] == 4
    generated = 3 * 18 + 2
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert found[f"{name}_count", ""] == generated - 4  # one less for each request
        assert found[f"{name}_sum", ""] > 0
    assert found["request_generation_tokens_sum", ""] == generated
    assert found["startup_seconds", "load"] == 0.5
    assert found["http_requests_total", "400"] == 1


async def test_dead_engine_runs_nothing() -> None:
    engine = ScriptedEngine()
    async with http_client(make_app(engine)) as client:
        assert engine.stats is not None
        engine.stats(StepStats(num_running=3, num_waiting=2, kv_cache_usage=0.5))
        found = samples((await client.get("/metrics")).text)
        assert found["num_requests_running", ""] == 3 and found["kv_cache_usage_perc", ""] == 0.5
        engine.health.change("restarting")
        found = samples((await client.get("/metrics")).text)
        assert found["num_requests_running", ""] == found["num_requests_waiting", ""] == 0


def test_step_counters_add_up_under_vllms_names() -> None:
    metrics = Metrics("vllm", MODEL)
    steps = [
        StepStats(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=5, num_plain_steps=1,
                  accepted_per_pos=[2, 2, 1, 0], num_generated_tokens=8, num_prompt_tokens=10,
                  prefix_cache_queries=32, prefix_cache_hits=16, num_preemptions=1),
        StepStats(num_drafts=1, num_draft_tokens=4, num_accepted_tokens=1,
                  accepted_per_pos=[1], num_generated_tokens=2),
    ]  # fmt: skip
    for stats in steps:
        metrics.step(stats)
    text = metrics.text().decode()
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 3.0' in text
    found = samples(text)
    spec = "spec_decode_num_accepted_tokens"
    per_position = [v for (name, _), v in found.items() if name == f"{spec}_per_pos_total"]
    accepted = found[f"{spec}_total", ""]
    assert sum(per_position) == accepted == 6
    assert per_position == sorted(per_position, reverse=True)
    assert accepted <= found["spec_decode_num_draft_tokens_total", ""] == 12
    verified, plain = (
        found["spec_decode_num_drafts_total", ""],
        found["plain_decode_steps_total", ""],
    )
    assert accepted + verified + plain == found["generation_tokens_total", ""]
    assert found["prefix_cache_hits_total", ""] <= found["prefix_cache_queries_total", ""]
    assert found["num_preemptions_total", ""] == 1


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer two"}, 200),
        ({"Authorization": "Bearer three"}, 401),
        ({"Authorization": "Bearer onetwo"}, 401),
        ({"Authorization": "Bearer on"}, 401),
        ({"Authorization": "Bearer One"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({}, 401),
    ],
)
async def test_keys_guard_the_api_alone(header: dict[str, str], status: int) -> None:
    app = make_app(ScriptedEngine(), config_with(api_key=("one", "two")))
    async with http_client(app) as client:
        response = await client.get("/v1/models", headers=header)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
            assert (await client.post("/tokenize", json={}, headers=header)).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200


async def test_request_ids_come_back() -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        given = await client.get("/health", headers={"X-Request-Id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        made = {(await client.get("/health")).headers["x-request-id"] for _ in range(2)}
        assert len(made) == 2
        odd = await client.get("/nope", headers={"X-Request-Id": "a b\t" * 100})
        assert odd.status_code == 404 and len(odd.headers["x-request-id"]) == 32


async def test_browsers_from_allowed_origins_may_call() -> None:
    app = make_app(
        ScriptedEngine(), config_with(allowed_origins=("https://a.example",), api_key=("k",))
    )
    async with http_client(app) as client:
        preflight = {
            "Origin": "https://a.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        allowed = await client.options("/v1/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        foreign = await client.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in foreign.headers


async def test_stated_body_size_over_the_limit_is_a_413() -> None:
    engine = ScriptedEngine()
    async with http_client(make_app(engine, config_with(max_body_bytes=100))) as client:
        small = await client.post("/v1/completions", json=BODY)
        large = await client.post("/v1/completions", json={**BODY, "user": "x" * 100})
    assert small.status_code == 200
    assert large.status_code == 413 and large.json()["error"]["code"] == "request_too_large"
    assert len(engine.requests) == 1


async def test_access_log_has_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[logging.LogRecord] = []
    own = logging.Logger("access")
    own.addFilter(lambda record: written.append(record) or False)
    monkeypatch.setattr("slipstream.server.http.middleware.access_log", own)
    async with http_client(make_app(ScriptedEngine(), config_with(access_log=True))) as client:
        await client.get("/health", headers={"X-Request-Id": "id-7"})
    (record,) = written
    assert record.getMessage().startswith("GET /health 200 ")
    assert vars(record)["request_id"] == "id-7" and vars(record)["fields"]["status"] == 200


@pytest.mark.parametrize(
    ("sent", "logged"),
    [
        ("/v1%0a2026 GET /health 200 0.1 s", "/v1%0a2026%20GET%20/health%20200%200.1%20s"),
        ("/%1b[31m%20x", "/%1b[31m%20x"),
        ("/" + "a" * 5000, "/" + "a" * 511 + "…"),
    ],
)
async def test_the_access_log_has_the_path_as_it_was_sent(
    sent: str, logged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[logging.LogRecord] = []
    own = logging.Logger("access")
    own.addFilter(lambda record: written.append(record) or False)
    monkeypatch.setattr("slipstream.server.http.middleware.access_log", own)
    async with http_client(make_app(ScriptedEngine(), config_with(access_log=True))) as client:
        await client.get(sent)
    (record,) = written
    assert vars(record)["fields"]["path"] == logged
    assert record.getMessage().startswith(f"GET {logged} 404 ")


async def test_openapi_document_describes_the_bodies() -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rpartition("/")[2]
        assert document["components"]["schemas"][name]["properties"]
        assert "Error" in str(operation["responses"]["400"])
    schemas = document["components"]["schemas"]
    for name in ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest"):
        assert schemas[name]["properties"]["model"] == {"type": "string", "enum": [MODEL, "alias"]}
    assert "enum" not in schemas["SpeculatorRequest"]["properties"]["model"]  # any drafter's
    replies = {path: each["get"]["responses"]["200"]["content"] for path, each in gets(document)}
    assert set(replies["/metrics"]) == {"text/plain"} and "/health" in replies
    assert replies["/ping"] == replies["/ready"] and "503" in str(document["paths"]["/ping"])
    count = document["paths"]["/v1/responses/input_tokens"]["post"]
    assert "ResponsesRequest" in str(count["requestBody"])
    assert "InputTokens" in str(count["responses"]["200"])
    compact = document["paths"]["/v1/responses/compact"]["post"]
    assert set(compact["responses"]) == {"404", "default"}
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    assert replies["/v1/models"]["application/json"]["schema"]["$ref"].endswith("/ModelList")


async def test_every_reply_has_a_schema() -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
    replies = {
        (method.upper(), path): operation["responses"]["200"]["content"]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "200" in operation["responses"]  # all but those that only refuse
    }
    for operation, content in replies.items():
        assert content and all(each["schema"] for each in content.values()), operation
    for method, name in (("GET", "State"), ("POST", "Reply")):
        schema = replies[method, "/v1/speculator"]["application/json"]["schema"]
        assert schema["$ref"].endswith(f"/Speculator{name}")


def gets(document: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(path, each) for path, each in document["paths"].items() if "get" in each]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("OPTIONS", "/health", {"GET", "HEAD"}),
        ("POST", "/ready", {"GET", "HEAD"}),
        ("GET", "/v1/completions", {"POST"}),
        ("PUT", "/v1/models", {"GET"}),
        ("GET", "/v1/responses/compact", {"POST"}),
        ("DELETE", "/v1/responses/input_tokens", {"POST"}),
        ("PUT", "/v1/responses/input_tokens", {"POST"}),
    ],
)
async def test_a_405_names_every_method_that_the_path_takes(
    method: str, path: str, allowed: set[str]
) -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        response = await client.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed
