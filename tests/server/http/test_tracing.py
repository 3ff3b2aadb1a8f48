"""Traces reach an OTLP collector; without the packages, a sentence says what to install."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from ..api_fakes import MODEL, ScriptedEngine, config_with, http_client, make_app

needs_otel = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.exporter") is None
    or importlib.util.find_spec("opentelemetry.sdk") is None,
    reason="OpenTelemetry's SDK and OTLP exporter are not installed",
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP endpoint that keeps the bodies it gets."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.arrived = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                collector.bodies.append(self.rfile.read(length))
                self.send_response(200)
                self.end_headers()
                collector.arrived.set()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def spans(self) -> dict[str, Any]:
        """Name -> span, and the service's name under ""."""
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        found: dict[str, Any] = {}
        for body in self.bodies:
            raw = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
            for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
                found[""] = attributes(resource.resource)["service.name"]
                for scope in resource.scope_spans:
                    found |= {span.name: span for span in scope.spans}
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(each) for each in found.values] if kind == "array_value" else found

    return {each.key: plain(each.value) for each in span.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
    found = Collector()
    yield found
    found.close()


@needs_otel
async def test_a_request_and_its_choice_continue_the_clients_trace(collector: Collector) -> None:
    app = make_app(ScriptedEngine(), config_with(otlp_traces_endpoint=collector.url))
    async with http_client(app) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "id-9"}
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 100}
        reply = await client.post("/v1/completions", json=body, headers=headers)
        assert reply.status_code == 200
        assert (await client.get("/health")).status_code == 200
    assert collector.arrived.wait(10)
    spans = collector.spans()
    assert spans.pop("") == "slipstream"
    assert set(spans) == {"POST /v1/completions", "generate"}
    request, choice = spans["POST /v1/completions"], spans["generate"]
    assert request.trace_id.hex() == choice.trace_id.hex() == TRACE
    assert request.parent_span_id.hex() == PARENT
    assert choice.parent_span_id == request.span_id
    seen = attributes(request)
    assert seen["http.response.status_code"] == 200
    assert seen["slipstream.request_id"] == "id-9"
    usage = reply.json()["usage"]
    generated = attributes(choice)
    assert generated["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert generated["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert generated["gen_ai.response.finish_reasons"] == ["stop"]
    (first,) = choice.events
    assert choice.start_time_unix_nano <= first.time_unix_nano <= choice.end_time_unix_nano


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"pip install 'slipstream\[otel\]'"):
        make_app(ScriptedEngine(), config_with(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"))


def test_without_an_endpoint_nothing_is_loaded() -> None:
    import subprocess

    code = "import sys, slipstream.server.startup.app; "
    code += "sys.exit('slipstream.server.http.tracing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
