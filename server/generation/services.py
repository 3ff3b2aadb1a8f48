"""The services that routes use, created once by `create_app`, and the engine's interface.

Routes receive them as an argument instead of using globals.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...configs.schema import Config
from ...runner.messages import AddRequest, Ready, SetVocabulary, StepStats
from ..chat_templates.chat_template import ChatTemplate
from ..chat_templates.content_guard import ContentGuard
from ..chat_templates.template_children import TemplateChildren
from ..drafters.capture import TrafficCapture
from ..errors import ModelNotFound, NotReady
from ..health import Health, State
from ..http.body import BodyReader
from ..metrics import Metrics
from ..output.chat_tools import OutputFormat
from ..request_stream import RequestStream
from ..text.tokenizer import Tokenizer


class Engine(Protocol):
    """The part of `EngineClient` that routes use, so that tests can script an engine."""

    health: Health
    stats: Callable[[StepStats], None] | None

    @property
    def ready(self) -> Ready: ...

    @property
    def state(self) -> State: ...

    @property
    def num_open(self) -> int: ...

    @property
    def drafter(self) -> str | None: ...

    @property
    def drafter_fallback(self) -> str | None: ...

    def submit(self, request: AddRequest) -> RequestStream: ...

    def abort(self, request_id: str) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    async def change_speculator(self, action: str, model: str = "") -> None: ...


@dataclass(frozen=True)
class Services:
    """The objects that routes share."""

    config: Config
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    metrics: Metrics
    seeds: random.Random
    bodies: BodyReader
    output_format: OutputFormat
    fingerprint: str
    created: int  # Unix time at which this server started

    template_children: TemplateChildren
    guard: ContentGuard | None = None  # masks special tokens in the contents of chats
    capture: TrafficCapture | None = None  # set by --capture-traffic

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model names that clients may use. Replies repeat the name that the client used."""
        return self.config.server.served_model_name or (self.config.model.model,)

    def vocabulary(self) -> SetVocabulary:
        """The tokens as the worker's grammars need them."""
        spelled = self.output_format.grammar_ids(self.tokenizer)
        return SetVocabulary(self.tokenizer.vocabulary(spelled), sorted(self.tokenizer.eos_ids))

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless the server serves a model of this name."""
        if name not in self.model_names:
            raise ModelNotFound(name, self.model_names)

    def check_ready(self) -> None:
        """Raise NotReady unless the engine accepts requests."""
        report = self.engine.health.report
        if not report.is_ready:
            raise NotReady(report.state, report.detail, report.retry_after)
