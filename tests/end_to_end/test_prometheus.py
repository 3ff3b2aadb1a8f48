"""A real Prometheus scrapes the real server, and all dashboard and alert expressions work."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from .conftest import RunningServer, free_port

CONFIGS = Path(__file__).parents[2] / "configs"
BOARD = json.loads((CONFIGS / "grafana/dashboards/slipstream.json").read_text())
ALERTS = CONFIGS / "prometheus/alerts.yml"
MODEL = "smollm2-135m"
# The variables that Grafana replaces before it queries Prometheus.
VARIABLES = {"$__rate_interval": "1m", "$__range": "5m", "$model_name": ".*", "$instance": ".*"}
ROUNDS = 4
MORE_ROUNDS = 30  # at most, until there are drafts in the window
PRESET = yaml.safe_load((CONFIGS / f"presets/{MODEL}.yaml").read_text())
DRAFTS = PRESET["speculative_config"]["max_speculative_tokens"]


def expressions() -> dict[str, str]:
    """The dashboard's expressions by panel title and letter, such as "Current K A"."""
    found = {}
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            found[f"{panel['title']} {target['refId']}"] = text
    return found


class Prometheus:
    """A client of a Prometheus server's HTTP API."""

    def __init__(self, url: str) -> None:
        self.api = httpx.Client(base_url=f"{url}/api/v1", timeout=10)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and present value of every series that the expression returns."""
        response = self.api.get("/query", params={"query": expression})
        if response.status_code == 503:  # Prometheus answers 503 until its storage is ready
            return []
        reply = response.json()
        assert reply["status"] == "success", f"{expression}: {reply}"
        return [(each["metric"], float(each["value"][1])) for each in reply["data"]["result"]]

    def metric_names(self) -> set[str]:
        """The names of all metrics that it has stored."""
        return set(self.api.get("/label/__name__/values").json()["data"])

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules that it has loaded."""
        groups = self.api.get("/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"did not happen within {seconds} s: {what}")


def write_config(path: Path, server: RunningServer) -> None:
    """Write the shipped configuration, changed to scrape `server` every two seconds.

    A scrape may take as long as the interval, and other tests use the machine."""
    config = yaml.safe_load((CONFIGS / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    path.write_text(yaml.safe_dump(config))


def make_traffic(server: RunningServer, client: OpenAI, rounds: int = ROUNDS) -> None:
    """Send requests of all kinds that the dashboard shows, over several scrapes."""
    words = "red green blue yellow black white " * 12
    for number in range(rounds):
        # Repetitive, so that drafts are found, and long enough for the prefix cache.
        client.completions.create(model=MODEL, prompt=words.strip(), temperature=0, max_tokens=48)
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"Say {number}."}], max_tokens=8
        )
        httpx.post(f"{server.url}/v1/completions", json={"model": "absent", "prompt": "x"})
        time.sleep(1)  # so that each kind of request is seen by two scrapes


@pytest.fixture(scope="module")
def prometheus(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    write_config(folder / "prometheus.yml", server)
    port = free_port()
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        # Wait for a scrape before the traffic: a rate needs a first sample.
        up = "slipstream:engine_up == 1"
        wait_until(lambda: len(found.query(up)) == 1, (folder / "log").read_text())
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
            make_traffic(server, sdk)
            # Where drafts do not pay, they are tried again only after a while.
            for _ in range(MORE_ROUNDS):
                if data(found, expressions()["Acceptance rate A"]):
                    break
                make_traffic(server, sdk, 1)
        yield found
    finally:
        found.api.close()
        process.terminate()
        process.wait(20)


def data(prometheus: Prometheus, expression: str) -> list[float]:
    return [value for _, value in prometheus.query(expression) if not math.isnan(value)]


def test_every_panel_shows_data(prometheus: Prometheus) -> None:
    empty = dict(expressions())

    def all_found() -> bool:
        for name in [name for name, text in empty.items() if data(prometheus, text)]:
            del empty[name]
        return not empty

    wait_until(all_found, f"data for {sorted(empty)}")


def test_the_panels_show_plausible_values(prometheus: Prometheus) -> None:
    """Whether drafts gain anything, and so whether any is accepted, is up to this machine's speed:
    without a gain only a few are tried."""
    board = expressions()
    assert data(prometheus, board["Worker A"]) == [1.0]
    assert 0 <= data(prometheus, board["Acceptance rate A"])[0] <= 1
    now, largest, drafted = (data(prometheus, board[f"Current K {letter}"])[0] for letter in "ABC")
    assert 0 <= now <= largest == DRAFTS and 0 < drafted <= largest
    assert data(prometheus, board["Drafter A"]) == [1.0]
    (gain,) = data(prometheus, board["Speed-up by drafts A"])
    assert 0.2 < gain < DRAFTS + 1  # other work on the machine disturbs it
    assert [label["reason"] for label, _ in prometheus.query(board["K by reason A"])]
    reasons = prometheus.query("slipstream:spec_decode_k_steps_total")
    assert {"gain", "probe"} & {labels["reason"] for labels, _ in reasons if labels["k"] != "0"}
    assert 1 <= data(prometheus, board["Mean acceptance length A"])[0] <= largest + 1
    positions = prometheus.query(board["Acceptance by position A"])
    assert {labels["position"] for labels, _ in positions} == {str(k) for k in range(DRAFTS)}
    shares = [value for _, value in sorted(positions, key=lambda each: int(each[0]["position"]))]
    assert shares == sorted(shares, reverse=True) and shares[0] >= 0
    assert 0 < data(prometheus, board["Prefix cache hit rate A"])[0] < 1
    assert data(prometheus, board["Share of failed responses A"]) == [0.0]
    responses = prometheus.query(board["HTTP responses per second A"])
    routes = {(labels["handler"], labels["status"]) for labels, _ in responses}
    assert {("/v1/completions", "200"), ("/v1/completions", "404")} <= routes


def test_alert_rules_are_evaluated_on_metrics_that_exist(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        return all(rule["health"] == "ok" for rule in prometheus.rules())

    wait_until(evaluated, str(prometheus.rules()))
    rules = prometheus.rules()
    named = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in named}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
    used = re.findall(r"slipstream:\w+", ALERTS.read_text() + json.dumps(BOARD))
    assert set(used) <= prometheus.metric_names()
