"""Owns what the server says about itself: one state, since when, and why. Routes only read it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

State = Literal["starting", "ready", "restarting", "failed", "draining"]


@dataclass(frozen=True)
class HealthReport:
    """The state at one moment."""

    state: State
    detail: str
    since: float  # time.monotonic() of the last change
    retry_at: float | None  # time.monotonic() of the next start of the worker
    restarts: int  # of the worker, since the server's start
    lost_drafters: int = 0  # that a worker could not be started again with

    @property
    def is_ready(self) -> bool:
        """True if requests are served: HTTP status 200, otherwise 503."""
        return self.state == "ready"

    @property
    def retry_after(self) -> int:
        """Whole seconds after which a client may try again; at least 1."""
        wait = 1.0 if self.retry_at is None else self.retry_at - time.monotonic()
        return max(1, round(wait + 0.5))

    def as_dict(self) -> dict[str, Any]:
        """The body of /health."""
        body: dict[str, Any] = {
            "status": self.state,
            "seconds_in_state": round(time.monotonic() - self.since, 3),
            "worker_restarts": self.restarts,
        }
        if self.detail:
            body["detail"] = self.detail
        return body


class Health:
    """The state's one owner is the engine client; everyone else reads `report`."""

    def __init__(self) -> None:
        self.report = HealthReport("starting", "", time.monotonic(), None, 0)

    @property
    def state(self) -> State:
        """The state alone."""
        return self.report.state

    def change(self, state: State, detail: str = "", retry_in: float | None = None) -> None:
        """Enter a state; entering "restarting" from another one counts as a restart."""
        now = time.monotonic()
        old = self.report
        self.report = HealthReport(
            state,
            detail,
            old.since if old.state == state else now,
            None if retry_in is None else now + retry_in,
            old.restarts + (state == "restarting" and old.state != state),
            old.lost_drafters,
        )

    def lose_drafter(self) -> None:
        """The worker is started with another drafter, or none, as its own cannot be loaded."""
        self.report = replace(self.report, lost_drafters=self.report.lost_drafters + 1)
