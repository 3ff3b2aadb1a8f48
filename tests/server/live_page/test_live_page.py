"""The page /live: its files, headers and off switch, and what its scripts avoid."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from ..api_fakes import ScriptedEngine, config_with, http_client, make_app

FILES = {
    file.name: file.read_text(encoding="utf-8")
    for file in files("slipstream.server.live_page").joinpath("files").iterdir()
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def policy(header: str) -> dict[str, str]:
    """The directives of a content security policy."""
    parts = [part.strip().partition(" ") for part in header.split(";")]
    return {name: value for name, _, value in parts}


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_the_page_and_its_files_need_no_key(prefix: str) -> None:
    app = make_app(ScriptedEngine(), config_with(root_path="/llm", api_key=("k",)))
    async with http_client(app) as client:
        page = await client.get(f"{prefix}/live")
        assert page.status_code == 200 and page.text == FILES["index.html"]
        assert (await client.head(f"{prefix}/live")).status_code == 200
        for name in set(FILES) - {"index.html"}:
            reply = await client.get(f"{prefix}/live/{name}")
            assert reply.status_code == 200 and reply.text == FILES[name]
            assert reply.headers["content-type"].startswith(TYPES[name.rpartition(".")[2]])
            assert reply.headers["x-content-type-options"] == "nosniff"
        for absent in ("index.html", "none.js", "..%2froutes.py", "routes.py"):
            assert (await client.get(f"{prefix}/live/{absent}")).status_code == 404
        # The page is open, what it asks for is not.
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401


async def test_the_page_may_load_nothing_from_elsewhere_and_run_nothing_inline() -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        for path in ("/live", "/live/app.js"):
            rules = policy((await client.get(path)).headers["content-security-policy"])
            assert rules["default-src"] == rules["form-action"] == rules["base-uri"] == "'none'"
            assert rules["frame-ancestors"] == "'none'"
            assert rules["require-trusted-types-for"] == "'script'"
            loads = {rules[name] for name in rules if name.endswith("-src")}
            assert loads == {"'none'", "'self'"}
    page = FILES["index.html"]
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", page)
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {name.removeprefix("live/") for name in loaded} <= set(FILES) and loaded
    assert not any("//" in name for name in loaded)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_turn_text_into_html(name: str) -> None:
    text = SCRIPTS[name]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert not re.search(r"localStorage|document\.cookie|new Function", text)
    addresses = set(re.findall(r"https?://[^\"'\s]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of a namespace
    imported = re.findall(r'from "\./([^"]+)"', text)
    assert set(imported) <= set(SCRIPTS)


async def test_the_page_can_be_turned_off() -> None:
    html = {"Accept": "text/html"}
    async with http_client(make_app(ScriptedEngine(), config_with(live_page=False))) as client:
        assert (await client.get("/live")).status_code == 404
        assert (await client.get("/live/app.js")).status_code == 404
        assert "live" not in (await client.get("/")).json()["links"]
        assert "/live" not in (await client.get("/", headers=html)).text
    async with http_client(make_app(ScriptedEngine())) as client:
        assert (await client.get("/")).json()["links"]["live"] == "/live"
        index = await client.get("/", headers=html)
        assert '<a href="/live">' in index.text
        assert policy(index.headers["content-security-policy"])["default-src"] == "'none'"


def test_every_control_of_the_page_has_a_label() -> None:
    page = FILES["index.html"]
    controls = re.findall(r'<(?:input|textarea|select)[^>]*\bid="([^"]+)"', page)
    labelled = set(re.findall(r'<label for="([^"]+)"', page))
    labelled |= set(re.findall(r'<label>[^<]*<input id="([^"]+)"', page))
    assert controls and set(controls) <= labelled
    used = {found for text in SCRIPTS.values() for found in re.findall(r'\$\("([^"]+)"\)', text)}
    assert used <= set(re.findall(r'\bid="([^"]+)"', page))
