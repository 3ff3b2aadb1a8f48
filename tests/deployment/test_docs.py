"""The documentation agrees with the code on flags, routes, metrics, alerts, parsers and links."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from slipstream.configs.load import flag_table
from slipstream.configs.speculative import METHODS
from slipstream.server.commands import build_parser
from slipstream.server.http.middleware import OPEN_PATHS
from slipstream.server.metrics import Metrics
from slipstream.server.openai_types.chat import ChatCompletionRequest
from slipstream.server.openai_types.completions import CompletionRequest
from slipstream.server.output.reasoning import REASONING_PARSERS
from slipstream.server.tool_parsers import TOOL_PARSERS

from ..server.api_fakes import ScriptedEngine, make_app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def first_cells(text: str) -> list[str]:
    """The first cell of every table row."""
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]


def code(text: str) -> set[str]:
    """All inline code, which is text between backticks on one line; code blocks are left out."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", text)))


def test_the_table_of_flags_is_up_to_date() -> None:
    assert page("flags") == flag_table(), "run `make docs`"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_to_existing_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w]+\.md)\)", page("README")))
    assert listed == {path.name for path in DOCS.glob("*.md")} - {"README.md"}


def test_every_route_is_described() -> None:
    described = set()
    for cell in first_cells(page("api")):
        described |= {tuple(entry.split()) for entry in code(cell) if " /" in entry}
    served = set()
    routes = list(make_app(ScriptedEngine()).routes)
    for route in routes:
        routes += getattr(getattr(route, "original_router", None), "routes", ())
        path = re.sub(r":\w+}", "}", getattr(route, "path", ""))
        for method in getattr(route, "methods", None) or ():
            if method != "HEAD" and not path.startswith(("/v1/responses/{", "/docs/")):
                served.add((method, path))
    assert described == served


def test_every_parameter_is_described() -> None:
    described: set[str] = set()
    for cell in first_cells(page("api")):
        described |= code(cell)
    for model in (ChatCompletionRequest, CompletionRequest):
        missing = set(model.model_fields) - described - {"modalities"}
        assert not missing, f"{model.__name__}: {sorted(missing)}"


def test_every_parser_and_method_is_named() -> None:
    assert {*TOOL_PARSERS, *REASONING_PARSERS} <= code(page("api"))
    assert {method for method in METHODS if method != "off"} <= code(page("speculation"))
    assert all(path in code(page("api")) for path in OPEN_PATHS)


def test_the_table_of_metrics_is_complete() -> None:
    exposed, created = set(), set()
    for family in text_string_to_metric_families(Metrics("slipstream", "m").text().decode()):
        if family.name.endswith("_created"):
            created.add(family.name.replace("_created", "_total"))
        else:
            exposed.add(family.name + ("_total" if family.type == "counter" else ""))
    cells = [code(cell) for cell in first_cells(page("metrics"))]
    described = {name for cell in cells for name in cell if name.startswith("slipstream:")}
    assert described == exposed
    assert created and created < described and "_created" in code(page("metrics"))


def test_every_alert_is_described() -> None:
    rules = yaml.safe_load((ROOT / "configs/prometheus/alerts.yml").read_text())
    named = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert named == {name for name in code(page("metrics")) if name.startswith("Slipstream")}


def command_flags() -> set[str]:
    """The flags of all commands and subcommands."""
    flags: set[str] = set()
    parsers = [build_parser()]
    while parsers:
        for action in parsers.pop()._actions:
            flags |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return flags


def test_flags_that_pages_mention_exist() -> None:
    known = code(flag_table())
    words = {word.split()[0] for word in known} | command_flags()
    elsewhere = {  # flags of Docker and other programs, and placeholders
        *("--build-arg", "--target", "--tag", "--rm", "--init", "--gpus", "--ipc", "--publish"),
        *("--volume", "--read-only", "--tmpfs", "--cap-drop", "--health-cmd", "--env", "--build"),
        *("--head", "--address"),  # of ray start
        *("--help", "--flag", "--no-flag"),
    }
    for script in (*ROOT.glob("tests/lab/*.py"), *ROOT.glob("tests/reliability/*.py")):
        text = script.read_text()
        elsewhere |= set(re.findall(r'"(--[a-z0-9-]+)"', text))
        switches = re.findall(r'"--([a-z0-9-]+)", action=argparse\.BooleanOptionalAction', text)
        elsewhere |= {f"--no-{name}" for name in switches}
    for path in DOCS.glob("*.md"):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", path.read_text()):
            assert flag in words | elsewhere, f"{path.name} mentions {flag}"
