"""What docs/api.md says the API takes and offers is what the models and routes have."""

from __future__ import annotations

import re
from pathlib import Path

from slipstream.server.openai_types.chat import ChatCompletionRequest
from slipstream.server.openai_types.completions import CompletionRequest
from slipstream.server.openai_types.responses import ResponsesRequest
from slipstream.server.tool_parsers import TOOL_PARSERS

from ..api_fakes import ScriptedEngine, http_client, make_app

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
# Parameters that are told of elsewhere on the page, or that say nothing by themselves.
ELSEWHERE = {"spaces_between_special_tokens", "use_beam_search", "modalities"}
OF_RESPONSES = {"stream_options", "user", "include", "reasoning", "text", "store", "max_tool_calls"}


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_parameter_is_in_the_table_and_no_other() -> None:
    listed: dict[type, set[str]] = {CompletionRequest: set(), ChatCompletionRequest: set()}
    for cells in rows("Parameters of completions and chats"):
        for model, cell in zip(listed, cells[1:3], strict=True):
            assert cell in ("", "yes", "400", "number", "true/false"), cells
            listed[model] |= set(names(cells[0])) if cell else set()
    known = {model: set(model.model_fields) for model in listed}  # type: ignore[attr-defined]
    shared = known[CompletionRequest] & known[ChatCompletionRequest]
    for model, found in listed.items():
        assert found <= known[model], found - known[model]
        assert known[model] - found <= ELSEWHERE, known[model] - found - ELSEWHERE
    assert {"seed", "stop", "logprobs"} <= shared
    told = {name.split(".")[0] for name in names(section("Parameters of responses"))}
    unsaid = set(ResponsesRequest.model_fields) - told - OF_RESPONSES
    refused = set(names(next(c[1] for c in rows("Routes") if "/v1/responses" in c[0])))
    assert unsaid - refused <= {"model", "service_tier", "safety_identifier", "prompt_cache_key"}


async def test_every_route_of_the_page_exists_and_no_other() -> None:
    app = make_app(ScriptedEngine())
    documented = {
        (method, re.sub(r"\{\w+\}", "{}", path))
        for cells in rows("Routes")
        for method, path in (name.split(" ") for name in names(cells[0]))
    }
    served = {
        (method.upper(), re.sub(r"\{[^}]+\}", "{}", path))
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    }
    assert served <= documented | {("GET", "/docs"), ("GET", "/openapi.json")}
    hidden = documented - served
    assert ("POST", "/v1/embeddings") in hidden
    async with http_client(app) as client:
        for method, path in hidden:
            response = await client.request(method, path, json=None if method == "GET" else {})
            is_known = response.status_code != 405 and "unknown_url" not in response.text
            assert is_known or path == "/live/{}", path  # it has no file of that name


def test_every_parser_is_named() -> None:
    listed = names(next(cells[1] for cells in _parsers() if cells[0] == "tool calls"))
    assert set(listed) == set(TOOL_PARSERS) and len(listed) == len(TOOL_PARSERS)


def _parsers() -> list[list[str]]:
    lines = [line for line in section("Tools and reasoning").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
