"""What the server says about itself."""

from __future__ import annotations

from slipstream.server.health import Health


def test_only_ready_is_ready() -> None:
    health = Health()
    seen = {}
    for state in ("starting", "ready", "restarting", "draining", "failed"):
        health.change(state)  # type: ignore[arg-type]
        seen[state] = health.report.is_ready
    assert seen == {
        "starting": False,
        "ready": True,
        "restarting": False,
        "draining": False,
        "failed": False,
    }


def test_a_restart_counts_once_however_often_it_is_tried() -> None:
    health = Health()
    health.change("ready")
    health.change("restarting", "gone", 1)
    since = health.report.since
    health.change("restarting", "gone again", 2)
    assert health.report.restarts == 1 and health.report.since == since
    health.change("ready")
    health.change("restarting", "gone", 1)
    assert health.report.as_dict()["worker_restarts"] == 2


def test_retry_after_covers_the_wait_for_the_next_start() -> None:
    health = Health()
    assert health.report.retry_after >= 1
    health.change("restarting", "gone", 8.0)
    assert 8 <= health.report.retry_after <= 9
    assert health.report.as_dict()["detail"] == "gone"
