"""Creates the HTTP application of an engine: services, routes, middleware, error handlers."""

from __future__ import annotations

import hashlib
import random
import secrets
import time
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ...configs.schema import Config, ServerConfig
from ..api.chat import chat_routes
from ..api.completions import completion_routes
from ..api.models import ModelCard, ModelList, model_routes
from ..api.operations import absent_routes, operation_routes
from ..api.responses import InputTokens, response_routes
from ..api.speculator import SpeculatorReply, SpeculatorRequest, SpeculatorState, speculator_routes
from ..api.tokenize import Detokenized, DetokenizeRequest, TokenizeRequest, Tokens, tokenize_routes
from ..chat_templates.chat_template import ChatTemplate
from ..chat_templates.content_guard import ContentGuard
from ..chat_templates.template_children import TemplateChildren
from ..drafters.capture import TrafficCapture
from ..errors import install_error_handlers
from ..generation.services import Engine, Services
from ..http.body import BodyReader
from ..http.middleware import BodyLimit, Faults, Keys, RequestScope
from ..http.openapi import Documented, app_with_page, install_openapi
from ..live_page.routes import live_routes
from ..metrics import Metrics
from ..openai_types.chat import ChatCompletionRequest
from ..openai_types.completions import CompletionRequest
from ..openai_types.replies import ChatCompletion, Completion
from ..openai_types.responses import ResponsesRequest
from ..output.chat_tools import OutputFormat
from ..text.tokenizer import Tokenizer
from ..version import version

_DOCUMENTED = {
    ("POST", "/v1/chat/completions"): Documented(
        ChatCompletionRequest, ChatCompletion, streams=True
    ),
    ("POST", "/v1/completions"): Documented(CompletionRequest, Completion, streams=True),
    ("POST", "/v1/responses"): Documented(ResponsesRequest, dict, streams=True),
    ("POST", "/v1/responses/input_tokens"): Documented(ResponsesRequest, InputTokens),
    ("POST", "/v1/speculator"): Documented(SpeculatorRequest, SpeculatorReply, serves=False),
    ("GET", "/v1/speculator"): Documented(None, SpeculatorState),
    ("POST", "/tokenize"): Documented(TokenizeRequest, Tokens),
    ("POST", "/detokenize"): Documented(DetokenizeRequest, Detokenized),
    ("GET", "/v1/models"): Documented(None, ModelList),
    ("GET", "/v1/models/{model}"): Documented(None, ModelCard),
    ("GET", "/health"): Documented(None, dict, statuses=("200", "503")),
    ("GET", "/ready"): Documented(None, dict, statuses=("200", "503")),
    ("GET", "/ping"): Documented(None, dict, statuses=("200", "503")),
    ("GET", "/version"): Documented(None, dict[str, str]),
    ("GET", "/"): Documented(None, dict),
    ("GET", "/metrics"): Documented(None, str, media="text/plain"),
}


def create_app(
    config: Config,
    engine: Engine,
    source: str | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
) -> FastAPI:
    """The application. `source` is the folder, file or hub id of the tokenizer, if not the model's.

    Loads the tokenizer and chat template unless they are given, which may take seconds. Needs no
    event loop. Sets the engine's `stats` callback. Raises TokenizerLoadError, ValueError, OSError.
    """
    services = _services(config, engine, source, tokenizer, template)
    clients: list[Engine] = getattr(engine, "clients", [engine])
    services.metrics.add_engines(len(clients))
    for client, metrics in zip(clients, services.metrics.engines, strict=True):
        client.stats = metrics.step
    app = app_with_page(title="Slipstream", version=version(), redirect_slashes=False)
    app.state.services = services
    for router in (
        chat_routes(services),
        completion_routes(services),
        response_routes(services),
        model_routes(services),
        tokenize_routes(services),
        operation_routes(services),
        speculator_routes(services),
        absent_routes(),
    ):
        app.include_router(router)
    if config.server.live_page:
        app.include_router(live_routes())
    install_error_handlers(app)
    install_openapi(app, _DOCUMENTED, services.model_names)
    _add_middleware(app, services)
    return app


def _services(
    config: Config,
    engine: Engine,
    source: str | None,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
) -> Services:
    if tokenizer is None:
        where = source or config.model.tokenizer or config.model.model
        tokenizer = Tokenizer.load(where, config.model.revision)
    if template is None:
        template = tokenizer.load_template(config.server.chat_template)
    is_open = config.server.allow_special_tokens_in_content
    guard = None if is_open else ContentGuard(tokenizer.special_texts)
    names = config.server.served_model_name or (config.model.model,)
    identity = f"{version()} {config.model} {config.speculative}"
    return Services(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        metrics=Metrics(config.server.metrics_prefix, names[0]),
        seeds=random.Random(config.model.seed or secrets.randbits(64)),
        bodies=BodyReader(config.server.client_timeout),
        output_format=OutputFormat.of(config.server, template, tokenizer),
        fingerprint="fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12],
        created=int(time.time()),
        template_children=TemplateChildren(
            tokenizer.special_tokens, tokenizer.special_texts if guard else frozenset()
        ),
        guard=guard,
        capture=_capture(config.server),
    )


def _capture(server: ServerConfig) -> TrafficCapture | None:
    if server.capture_traffic is None:
        return None
    return TrafficCapture(Path(server.capture_traffic), server.capture_traffic_max_bytes)


def _add_middleware(app: FastAPI, services: Services) -> None:
    """Add the middleware, innermost first."""
    server = services.config.server
    app.add_middleware(BodyLimit, max_bytes=server.max_body_bytes)
    app.add_middleware(Keys, keys=server.api_key)
    app.add_middleware(Faults)
    if server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    if server.otlp_traces_endpoint:
        from ..http.tracing import Traces, start_tracing

        name = services.model_names[0]
        tracer = start_tracing(server.otlp_traces_endpoint, name, services.metrics)
        app.add_middleware(Traces, tracer=tracer)
    app.add_middleware(
        RequestScope,
        metrics=services.metrics,
        log=server.access_log,
        root_path=server.root_path.rstrip("/"),
    )
