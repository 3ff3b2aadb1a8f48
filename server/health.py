"""The server's health: its state, the reason for it and the time of the last change."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

State = Literal["starting", "ready", "restarting", "failed", "draining"]


@dataclass(frozen=True)
class HealthReport:
    state: State
    detail: str
    since: float  # time.monotonic() of the last change
    retry_at: float | None  # time.monotonic() of the next start of the worker
    restarts: int  # number of worker restarts since the server started
    lost_drafters: int = 0  # worker restarts at which the drafter could not be loaded
    engines: tuple[HealthReport, ...] = ()  # of each engine, if there are several

    @property
    def is_ready(self) -> bool:
        """Whether requests are served; health routes answer 200 if so and 503 otherwise."""
        return self.state == "ready"

    @property
    def retry_after(self) -> int:
        """Seconds after which a client should retry, a whole number of at least 1."""
        wait = 1.0 if self.retry_at is None else self.retry_at - time.monotonic()
        return max(1, round(wait + 0.5))

    def as_dict(self) -> dict[str, Any]:
        """The fields of the JSON body of /health."""
        body: dict[str, Any] = {
            "status": self.state,
            "seconds_in_state": round(time.monotonic() - self.since, 3),
            "worker_restarts": self.restarts,
        }
        if self.detail:
            body["detail"] = self.detail
        if self.engines:
            body["engines"] = [engine.as_dict() for engine in self.engines]
        return body


def joint_report(engines: list[HealthReport]) -> HealthReport:
    """The health of a server with several engines: ready if one is, with what ails the others."""
    order: tuple[State, ...] = ("draining", "ready", "restarting", "starting", "failed")
    state = min((engine.state for engine in engines), key=order.index)
    details = {f"engine {i}": engine.detail for i, engine in enumerate(engines) if engine.detail}
    alike = len({engine.detail for engine in engines}) == 1
    text = "; ".join(f"{name}: {detail}" for name, detail in details.items())
    retries = [engine.retry_at for engine in engines if engine.retry_at is not None]
    return HealthReport(
        state,
        engines[0].detail if alike else text,
        max(engine.since for engine in engines if engine.state == state),
        min(retries, default=None) if state != "ready" else None,
        sum(engine.restarts for engine in engines),
        sum(engine.lost_drafters for engine in engines),
        tuple(engines),
    )


class Health:
    """Holds the current health. Only the engine client changes it; all others read `report`."""

    def __init__(self) -> None:
        self.report = HealthReport("starting", "", time.monotonic(), None, 0)

    @property
    def state(self) -> State:
        return self.report.state

    def change(self, state: State, detail: str = "", retry_in: float | None = None) -> None:
        """Enter a state. Entering "restarting" from another state counts as a restart.

        `detail` is the reason in words; `retry_in` is the time in seconds until the next attempt to
        start the worker.
        """
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
        """Count a drafter that could not be loaded when the worker restarted."""
        self.report = replace(self.report, lost_drafters=self.report.lost_drafters + 1)
