"""Dockerfile, compose files, alerts and dashboard agree with each other and with the code."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import socket
import subprocess
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from slipstream.configs.schema import ServerConfig

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
FOLDERS = sorted(path.name for path in (ROOT / ".src/slipstream").iterdir() if path.is_symlink())


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, rest), continued lines joined."""
    text = "\n".join(
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")
    )
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    parts = [line.strip().split(None, 1) for line in lines if line.strip()]
    return [(part[0], part[1] if len(part) > 1 else "") for part in parts]


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Stage -> (base image or stage, instructions), in the order of the Dockerfile."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    name = ""
    for instruction, rest in instructions():
        if instruction == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", rest)
            assert match, f"a stage without a name: FROM {rest}"
            name = match[2]
            assert name not in found
            found[name] = (match[1], [])
        elif name:
            found[name][1].append((instruction, rest))
    return found


def ignored(path: str) -> bool:
    """Whether .dockerignore excludes a top-level file or folder."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            keep = pattern.startswith("!")
            if fnmatch.fnmatch(path, pattern.lstrip("!")):
                out = not keep
    return out


def test_stages_build_on_earlier_stages_or_on_named_base_images() -> None:
    arguments = {
        rest.partition("=")[0] for instruction, rest in instructions() if instruction == "ARG"
    }
    earlier: list[str] = []
    for name, (base, steps) in stages().items():
        variable = re.fullmatch(r"\$\{(\w+)\}", base)
        assert base in earlier or (variable and variable[1] in arguments), f"{name}: {base}"
        for instruction, rest in steps:
            if instruction == "COPY" and (match := re.search(r"--from=(\S+)", rest)):
                assert match[1] in earlier, f"{name}: COPY {rest}"
        earlier.append(name)
    assert earlier[-1] == "cpu"  # the last stage is the one that `docker build .` builds


def test_copied_files_exist_and_are_not_ignored() -> None:
    copied = set()
    for _, steps in stages().values():
        for instruction, rest in steps:
            if instruction != "COPY" or "--from=" in rest:
                continue
            for source in shlex.split(rest)[:-1]:
                assert (ROOT / source).exists(), source
                assert not ignored(source.strip("/").split("/")[0]), source
                copied.add(source.strip("/"))
    assert {".src", *FOLDERS} <= copied
    assert ignored("docs") and ignored("tests") and ignored(".venv") and ignored(".git")


def test_the_pins_that_steps_look_up_exist() -> None:
    text = (ROOT / "Dockerfile").read_text()
    looked_up = re.findall(r"grep '(\^[^']+)' (\S+?\.txt)", text)
    assert looked_up
    for pattern, file in looked_up:
        lines = (ROOT / file).read_text().splitlines()
        assert sum(bool(re.match(pattern, line)) for line in lines) == 1, f"{pattern} in {file}"


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_runs_as_a_user_and_reports_its_health(name: str) -> None:
    base, steps = stages()[name]
    assert base == f"{name}-system"
    found = dict(steps)
    assert int(found["USER"]) > 0
    assert "PYTHONSAFEPATH=1" in found["ENV"] and "SLIPSTREAM_HOST=0.0.0.0" in found["ENV"]
    check = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert "/ready" in check[-1]
    compile(check[-1], "HEALTHCHECK", "exec")
    assert json.loads(found["ENTRYPOINT"]) == ["slipstream"]
    assert found["STOPSIGNAL"] == "SIGTERM"
    order = [instruction for instruction, _ in steps]
    assert order.index("COPY") < order.index("USER")  # the code belongs to root


@pytest.mark.parametrize("name", ["cpu", "cuda"])
@pytest.mark.parametrize(("status", "unhealthy"), [(200, False), (503, True)])
def test_the_health_check_finds_the_port_that_the_server_listens_on(
    name: str, status: int, unhealthy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    check = json.loads(dict(stages()[name][1])["HEALTHCHECK"].partition("CMD ")[2])
    with HTTPServer(("0.0.0.0", 0), Ready) as server, socket.socket() as another:
        another.bind(("127.0.0.1", 0))
        another.listen()  # a worker's port, or that of another container, whose pid is hidden
        find, ports = psutil.net_connections, (server.server_port, another.getsockname()[1])

        def in_a_container(kind: str) -> list[Any]:
            open_ = [found for found in find(kind) if found.laddr and found.laddr.port in ports]
            ours = next(found for found in open_ if found.laddr.port == server.server_port)
            other = next(found for found in open_ if found is not ours)
            return [other._replace(pid=None), other._replace(pid=ours.pid + 1), ours]

        monkeypatch.setattr(psutil, "net_connections", in_a_container)
        monkeypatch.setenv("SLIPSTREAM_PORT", "1")
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        try:
            with pytest.raises(SystemExit) as end:
                exec(check[-1], {})
        finally:
            if not asked:  # the check used another port; let handle_request return
                socket.create_connection(("127.0.0.1", server.server_port)).close()
            serving.join(5)
    assert asked == ["/ready"] and end.value.code == unhealthy


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_has_labels_for_title_version_and_licence(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    steps = stages()[name][1]
    labels = dict(
        word.partition("=")[::2]
        for instruction, rest in steps
        if instruction == "LABEL"
        for word in shlex.split(rest)
    )
    found = {key.removeprefix("org.opencontainers.image."): labels[key] for key in labels}
    assert name.upper() in found["title"]
    assert found["description"] == project["description"]
    assert found["licenses"] == project["license"]
    assert (found["version"], found["revision"]) == ("${VERSION}", "${REVISION}")
    order = [instruction for instruction, _ in steps]
    above = steps[: order.index("LABEL")]
    assert ("ARG", "VERSION") in above and ("ARG", "REVISION") in above  # otherwise both are empty
    assert ("ARG", f"VERSION={project['version']}") in instructions()
    # The labels come last, so that a new commit does not rebuild the layers before them.
    assert order.index("LABEL") > max(i for i, step in enumerate(order) if step == "COPY")


def bind_mounts(service: dict[str, Any]) -> dict[str, str]:
    """The bind mounts of a service: path in the container -> path in the repository."""
    pairs = [volume.split(":") for volume in service["volumes"]]
    return {target[0]: source for source, *target in pairs if source.startswith("./")}


def test_compose_has_the_services_and_their_files() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"slipstream", "prometheus", "grafana"}
    assert services["slipstream"]["build"]["target"] in stages()
    for service in services.values():
        assert all((ROOT / source).exists() for source in bind_mounts(service).values())
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        named = [v.split(":")[0] for v in service["volumes"] if not v.startswith("./")]
        assert set(named) <= set(COMPOSE["volumes"])
    grace = int(services["slipstream"]["stop_grace_period"].rstrip("s"))
    assert grace > ServerConfig().drain_timeout
    cuda = yaml.safe_load((ROOT / "docker-compose.cuda.yml").read_text())["services"]["slipstream"]
    assert cuda["build"]["target"] == "cuda"


def test_compose_bounds_each_service_and_its_log() -> None:
    for name, service in COMPOSE["services"].items():
        limits = service["deploy"]["resources"]["limits"]
        assert re.fullmatch(r"(\$\{\w+:-)?\d+[mg]\}?", limits["memory"]), name
        assert re.fullmatch(r"\d+|\$\{\w+:-\d+\}", limits["cpus"]) and limits["pids"] > 0
        log = service["logging"]
        assert log["driver"] == "json-file" and int(log["options"]["max-file"]) > 1, name
        assert re.fullmatch(r"\d+m", log["options"]["max-size"])


def test_compose_requires_a_password_and_has_no_default() -> None:
    environment = COMPOSE["services"]["grafana"]["environment"]
    # With `:?`, compose does not start if the variable is unset or empty, and prints the message.
    assert re.fullmatch(
        r"\$\{GRAFANA_PASSWORD:\?[^}]+\}", environment["GF_SECURITY_ADMIN_PASSWORD"]
    )
    assert "GF_AUTH_ANONYMOUS_ENABLED" not in environment


def test_every_variable_of_compose_is_described() -> None:
    text = "".join((ROOT / f"docker-compose{part}.yml").read_text() for part in ("", ".cuda"))
    page = (ROOT / "docs/deployment.md").read_text()
    variables = set(re.findall(r"\$\{(\w+)", text))
    assert variables and not {name for name in variables if f"`{name}`" not in page}


def test_prometheus_and_grafana_refer_to_existing_services_and_files() -> None:
    services = COMPOSE["services"]
    config = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in services and int(port) == ServerConfig().port
    for file in config["rule_files"]:
        assert (ROOT / "configs/prometheus" / file).exists()
    folder = ROOT / "configs/grafana"
    source = yaml.safe_load((folder / "provisioning/datasources/prometheus.yml").read_text())
    assert re.fullmatch(r"http://(\w+):9090", source["datasources"][0]["url"])[1] in services  # type: ignore[index]
    provider = yaml.safe_load((folder / "provisioning/dashboards/slipstream.yml").read_text())
    path = provider["providers"][0]["options"]["path"]
    assert (ROOT / bind_mounts(services["grafana"])[path] / "slipstream.json").exists()
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(path)


def test_the_dashboard_is_consistent() -> None:
    board = json.loads((ROOT / "configs/grafana/dashboards/slipstream.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    text = json.dumps(panels)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__range"}
    assert used == variables
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["targets"] and panel["description"])


def board_expressions() -> dict[str, list[str]]:
    """Panel title -> its expressions, in the order of the dashboard."""
    board = json.loads((ROOT / "configs/grafana/dashboards/slipstream.json").read_text())
    panels = sorted(board["panels"], key=lambda p: (p["gridPos"]["y"], p["gridPos"]["x"]))
    return {p["title"]: [t["expr"] for t in p.get("targets", ())] for p in panels}


def test_the_share_of_failed_responses_counts_api_routes_only() -> None:
    """Frequent probes and scrapes would hide failures of the API, or be counted as failures."""
    rules = yaml.safe_load((ROOT / "configs/prometheus/alerts.yml").read_text())["groups"][0]
    alerts = {rule["alert"]: rule["expr"] for rule in rules["rules"]}
    panel = board_expressions()["Share of failed responses"]
    for text in (alerts["SlipstreamHighErrorRate"], *panel):
        selectors = re.findall(r"http_requests_total(\{[^}]*\})?", text)
        assert len(selectors) == 2 and all('handler=~"/v1/.*"' in each for each in selectors)
        assert 'status=~"5.."' in selectors[0] and "status" not in selectors[1]


def test_the_dashboard_starts_with_speculation() -> None:
    titles = list(board_expressions())
    rows = ["Speculation", "State", "Latency", "Throughput", "Memory and queue"]
    assert [title for title in titles if title in rows] == rows and titles[0] == rows[0]
    speculation = titles[1 : titles.index("State")]
    assert {"Drafter", "Drafter health", "K by reason", "Current K"} <= set(speculation)
    assert "spec_decode_drafter_healthy" in board_expressions()["Drafter"][0]
    (by_reason,) = board_expressions()["K by reason"]
    assert by_reason.startswith("sum by (reason, k) (rate(slipstream:spec_decode_k_steps_total{")


# What an operator of speculation asks -> panels, and what their expressions read.
QUESTIONS = {
    "is it gaining": (
        ["Speed-up by drafts", "Speed-up over time", "Tokens per second, with drafts and without"],
        ["spec_decode_seconds_total", "spec_decode_seconds_without_drafts_total"],
    ),
    "K and why": (["K by reason", "Current K"], ["spec_decode_k_steps_total"]),
    "acceptance by position": (["Acceptance by position"], ["accepted_tokens_per_pos_total"]),
    "watchdog": (["Drafter", "Drafter health"], ["spec_decode_drafter_healthy"]),
    "TTFT": (["Time to first token"], ["0.5", "0.99", "time_to_first_token_seconds_bucket"]),
    "TPOT": (["Time per output token, by request"], ["0.5", "0.99", "time_per_output_token"]),
    "queue": (["Queue"], ["num_requests_waiting", "num_requests_running"]),
    "KV use": (["KV cache in use"], ["kv_cache_usage"]),
    "preemptions": (["Preemptions per second"], ["num_preemptions_total"]),
    "prefix hits": (["Prefix cache hit rate"], ["prefix_cache_hits", "prefix_cache_queries"]),
    "errors": (["Share of failed responses", "Drafter failures"], ["http_requests_total", "5.."]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_board_answers_what_an_operator_asks(question: str) -> None:
    titles, words = QUESTIONS[question]
    board = board_expressions()
    text = " ".join(expression for title in titles for expression in board[title])
    assert [word for word in words if word not in text] == []


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian: apt-get install prometheus)",
)
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "configs/prometheus/prometheus.yml"),
        ("check", "rules", "configs/prometheus/alerts.yml"),
        ("test", "rules", "tests/deployment/alerts_test.yml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_accepts_the_configuration_and_the_rules(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_that_builds_the_image_has_valid_syntax() -> None:
    script = ROOT / "tests/deployment/build_rootfs.sh"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", script]).returncode == 0
