"""OpenTelemetry traces: a span per HTTP request and a child span per generated choice.

This module is imported only with --otlp-traces-endpoint, because the dependency is optional.
"""

from __future__ import annotations

import os
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..metrics import Ended, Metrics
from ..version import version
from .middleware import OPEN_PATHS, route_path

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_EXTRA = "slipstream[otel]"
_current: ContextVar[Span | None] = ContextVar("span", default=None)


class TracingUnavailable(ValueError):
    def __init__(self) -> None:
        super().__init__(f"--otlp-traces-endpoint needs OpenTelemetry: pip install '{_EXTRA}'")


def start_tracing(endpoint: str, model_name: str, metrics: Metrics) -> Tracer:
    """A tracer that sends spans to `endpoint` from a background thread. Raises TracingUnavailable.

    Remaining spans are sent at the end of the process. `metrics` reports each finished choice.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise TracingUnavailable from None
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "slipstream")})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    tracer = provider.get_tracer("slipstream", version())
    metrics.on_end = lambda ended: _record_choice(tracer, model_name, ended)
    return tracer


def _record_choice(tracer: Tracer, model_name: str, ended: Ended) -> None:
    """Record a span from the request's arrival until now, as a child of the request's span."""
    from opentelemetry.trace import set_span_in_context

    parent = _current.get()
    if parent is None or not parent.is_recording():
        return
    now = time.time_ns()
    began = now - round((time.monotonic() - ended.arrived) * 1e9)
    span = tracer.start_span("generate", set_span_in_context(parent), start_time=began)
    span.set_attributes(
        {
            "gen_ai.request.model": model_name,
            "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
            "gen_ai.usage.output_tokens": ended.num_tokens,
            "gen_ai.response.finish_reasons": (ended.outcome,),
        }
    )
    if ended.first_token_seconds is not None:
        span.set_attribute("gen_ai.server.time_to_first_token", ended.first_token_seconds)
        span.add_event("first token", timestamp=began + round(ended.first_token_seconds * 1e9))
    span.end(now)


class Traces:
    """ASGI middleware inside `RequestScope` that continues the client's trace or starts one."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with a span unless it is for a health or metrics route."""
        if scope["type"] != "http" or route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        method = scope["method"]
        with self._tracer.start_as_current_span(method, context, SpanKind.SERVER) as span:
            span.set_attribute("http.request.method", method)
            span.set_attribute("url.path", scope["path"])
            span.set_attribute("slipstream.request_id", scope["state"]["request_id"])

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.set_attribute("http.response.status_code", status)
                    if status >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            token = _current.set(span)
            try:
                await self._app(scope, receive, watched)
            finally:
                _current.reset(token)
                route = getattr(scope.get("route"), "path", None)
                if route is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)
