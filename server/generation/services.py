"""What every route works with, as one value made once by `create_app`; and the engine's interface.

Routes take this instead of globals. The protocol says what is used of the engine client, so tests
can script one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...configs.schema import Config
from ...runner.messages import AddRequest, Ready, StepStats
from ..chat_templates.chat_template import ChatTemplate
from ..chat_templates.content_guard import ContentGuard
from ..chat_templates.template_children import TemplateChildren
from ..drafters.capture import TrafficCapture
from ..errors import ModelNotFound, NotReady
from ..health import Health, State
from ..http.body import BodyReader
from ..metrics import Metrics
from ..output.chat_tools import OutputFormat
from ..request_stream import OutputStream
from ..text.tokenizer import Tokenizer


class Engine(Protocol):
    """What the routes use of the engine client."""

    health: Health
    stats: Callable[[StepStats], None] | None

    @property
    def ready(self) -> Ready: ...

    @property
    def state(self) -> State: ...

    @property
    def num_open(self) -> int: ...

    def submit(self, request: AddRequest) -> OutputStream: ...

    def abort(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class Services:
    """The parts that a route needs."""

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
    guard: ContentGuard | None = None  # of what clients write in chats
    capture: TrafficCapture | None = None  # only where the operator asked for it

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use; replies carry the one the client used."""
        return self.config.server.served_model_name or (self.config.model.model,)

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless the name is served."""
        if name not in self.model_names:
            raise ModelNotFound(name, self.model_names)

    def check_ready(self) -> None:
        """Raise NotReady unless the engine takes requests."""
        report = self.engine.health.report
        if not report.is_ready:
            raise NotReady(report.state, report.detail, report.retry_after)
