"""A real browser opens /live of the real server, chats, and reads what the page shows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from slipstream.runner.messages import AddRequest, RequestOutput

from ..server.api_fakes import (
    EOS,
    MODEL,
    TOKENIZER,
    ScriptedEngine,
    config_with,
    logprobs_of,
    make_app,
)
from .browser import Browser, find_chromium
from .conftest import RunningServer, free_port

PROMPT = "What is the capital of France? <img src=x onerror=alert(1)>"
KINDS = ("accepted", "replaced")
MODES = [(*size, scheme) for size in ((390, 800), (1280, 800)) for scheme in ("light", "dark")]
# What a user sees of an answer: the class and text of each token.
TOKENS = (
    "[...document.querySelectorAll('.answer-text')].map(text =>"
    " [...text.children].map(token => [token.className.split(' ')[1], token.textContent]))"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with Browser(program) as found:
        yield found


def by_id(name: str, what: str) -> str:
    return f"document.getElementById('{name}').{what}"


def ask(browser: Browser, prompt: str, **options: Any) -> None:
    """Type a prompt, send it with the Enter key, and wait for the end of the answer."""
    for name, value in {"max-tokens": 24, **options}.items():
        what = "checked" if isinstance(value, bool) else "value"
        browser.run(f"{by_id(name, what)} = {str(value).lower()}")
    browser.run(by_id("prompt", "focus()"))
    browser.type(prompt)
    browser.press("Enter")
    ended = f"{by_id('status', 'textContent')}.startsWith('Answer complete')"
    browser.wait(lambda: browser.run(ended), "the answer ends")


def wait_for_charts(browser: Browser) -> None:
    """Wait until each chart has a value, for which the page reads the server's figures twice."""
    # The default server chooses K, so it measures what drafts gain.
    browser.wait(lambda: browser.run("document.querySelectorAll('.plot').length") == 5, "charts")
    named = "[...document.querySelectorAll('.plot')].every(p => p.getAttribute('aria-label'))"
    browser.wait(lambda: browser.run(named), "the charts have values")


def colour(browser: Browser, selector: str, what: str) -> str:
    found = browser.run(f"getComputedStyle(document.querySelector('{selector}')).{what}")
    assert isinstance(found, str)
    return found


def test_a_chat_shows_drafts_and_compares_the_speed(
    browser: Browser, server: RunningServer
) -> None:
    browser.open(f"{server.url}/live", 1280, 800)
    drafted = server.metric("spec_decode_num_draft_tokens_total")
    ask(browser, PROMPT, compare=True)
    drafted = server.metric("spec_decode_num_draft_tokens_total") - drafted
    with_drafts, without = browser.run(TOKENS)
    assert {kind for kind, _ in with_drafts} <= {"accepted", "drawn", "replaced"}
    assert {kind for kind, _ in without} == {"drawn"}
    text = "".join(piece for _, piece in with_drafts)
    assert text and "".join(piece for _, piece in without) == text
    facts = browser.run("document.querySelector('.facts').textContent")
    # On a slow machine, K may be 0 for so short a text.
    assert (f"{int(drafted)} drafts accepted" if drafted else "no drafts") in facts
    assert "times as fast" in browser.run("document.querySelector('.verdict').textContent")
    # The text of the prompt stays text.
    assert browser.run("document.querySelector('.question').textContent") == PROMPT
    assert not browser.run("document.querySelector('img, .question *')")

    browser.run("document.querySelector('.answer-text').focus()")
    browser.press("ArrowRight")
    spoken = browser.run(by_id("spoken", "textContent"))
    assert "by the model" in spoken and "Probability" not in spoken  # they would cost speed
    assert not browser.run(by_id("detail", "hidden"))
    browser.press("Escape")
    assert browser.run(by_id("detail", "hidden"))
    browser.hover("document.querySelector('.answer-text').children[1]")
    browser.wait(lambda: not browser.run(by_id("detail", "hidden")), "the detail shows")


def test_rejected_drafts_are_named(browser: Browser, server: RunningServer) -> None:
    """The page marks each kind of token, whatever the server happens to draft."""
    browser.open(f"{server.url}/live", 1280, 800)
    step = {"tokens": [" a", " <b>"], "num_accepted": 1, "rejected": [" bad", " &lt;"]}
    found = browser.run(
        "import('./live/answer.js').then(m => { const a = new m.Answer(document.body, 'x');"
        f" a.addStep({step}); a.finish(); m.show(document.getElementById('detail'), a.tokens[1]);"
        " return [a.text.textContent, a.tokens.map(t => t.kind), m.described(a.tokens[0]),"
        " document.getElementById('detail').textContent, a.facts.textContent] })"
    )
    assert found[:2] == [" a <b>", ["accepted", "replaced"]]
    assert "Drafted (draft 1 of 3) and accepted" in found[2]
    assert '" bad"' in found[3] and '" &lt;"' in found[3]
    assert "2 tokens a step, 33 % of 3 drafts accepted" in found[4]


@pytest.mark.parametrize(("width", "height", "scheme"), MODES)
def test_the_page_fits_and_can_be_read(
    browser: Browser, server: RunningServer, width: int, height: int, scheme: str
) -> None:
    browser.open(f"{server.url}/live", width, height, scheme)
    assert browser.run("document.documentElement.scrollWidth") <= width
    charts, chat = (
        browser.run(f"document.querySelector('.{name}').getBoundingClientRect().left")
        for name in ("charts", "chat")
    )
    assert (charts > chat) == (width > 1000)  # beside the chat on a screen, below it on a phone
    for selector in (".token.accepted", ".token.replaced", "#send", ".quiet", ".legend li"):
        ink = colour(browser, selector, "color")
        paper = colour(browser, selector, "backgroundColor")
        if paper == "rgba(0, 0, 0, 0)":
            paper = colour(browser, "section", "backgroundColor")
        assert contrast(ink, paper) >= 4.5, (selector, scheme, ink, paper)
    dark = luminance(colour(browser, "body", "backgroundColor")) < 0.2
    assert dark == (scheme == "dark")
    styles = {colour(browser, f".token.{kind}", "borderBottomStyle") for kind in KINDS}
    assert styles == {"solid", "dotted"}  # not by colour alone
    if scheme == "light":  # the same charts in other colours
        wait_for_charts(browser)


def figures_of(second: int) -> str:
    """What /metrics says after some seconds: K is 2 in the first second and 4 in the next ones."""
    k_steps = {2: 30 * min(second, 1), 4: 30 * max(second - 1, 0)}
    accepted = [20 * second, 10 * second]
    lines = [
        f"generation_tokens_total {90 * second}",
        f"spec_decode_num_drafts_total {30 * second}",
        *(f'spec_decode_k_steps_total{{k="{k}",reason="gain"}} {n}' for k, n in k_steps.items()),
        *(
            f'spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}'
            for place, count in enumerate(accepted)
        ),
        f"spec_decode_seconds_total {second}",
        f"spec_decode_seconds_without_drafts_total {1.5 * second}",
        f"inter_token_latency_seconds_sum {0.9 * second}",
        f"inter_token_latency_seconds_count {90 * second}",
        f'inter_token_latency_seconds_bucket{{le="0.02"}} {90 * second}',
        f'inter_token_latency_seconds_bucket{{le="+Inf"}} {90 * second}',
        f"num_requests_running {second}",
        "num_requests_waiting 7",
    ]
    return "".join(f"slipstream:{line}\n" for line in lines)


def test_charts_show_the_figures_of_the_server_over_time(
    browser: Browser, server: RunningServer
) -> None:
    """The page reads prepared figures, so that each value of each chart is known."""
    browser.open(f"{server.url}/live", 1280, 800)
    texts = [figures_of(second) for second in range(4)]
    browser.run(
        f"const texts = {json.dumps(texts)}; let at = 0; const real = window.fetch;"
        "window.fetch = (path, options) => path !== 'metrics' ? real(path, options) :"
        " Promise.resolve(new Response(texts[Math.min(at++, 3)]));"
        "const box = document.createElement('div'); box.id = 'known'; document.body.append(box);"
        "import('./live/charts.js').then(m => m.startCharts(box))"
    )
    spoken = "[...document.querySelectorAll('#known .plot')].map(p => p.getAttribute('aria-label'))"

    def named(words: str) -> bool:
        return any(words in (label or "") for label in browser.run(spoken))

    browser.wait(lambda: named("Requests: running 3, waiting 7"), "four readings are drawn", 30)
    labels = browser.run(spoken)
    for words in ("Draft length K, mean of the steps: K 4", "Time between tokens: mean 10, 95th"):
        assert named(words), labels
    assert named("Tokens a second: tokens ") and named("Speed-up by drafts: measured 1.5 times")
    shown = "[...document.querySelectorAll('#known .positions li')].map(li => li.textContent)"
    assert browser.run(shown) == ["Draft 167 %", "Draft 233 %"]  # 20 and 10 of 30
    lines = (
        "[...document.querySelectorAll('#known .plot path.first')].map(p => p.getAttribute('d'))"
    )
    rises = [path for path in browser.run(lines) if path.count("L") >= 1]
    assert len(rises) >= 3  # lines over time, among them that of K
    note = "[...document.querySelectorAll('#known .scale span')].map(s => s.textContent)"
    assert "this K promises most tokens a second" in browser.run(note)


def test_the_page_can_be_used_by_keyboard_and_screen_reader(
    browser: Browser, server: RunningServer
) -> None:
    browser.open(f"{server.url}/live", 1280, 800)
    ask(browser, "Say hi")
    focused = "document.activeElement.id || document.activeElement.className"
    visited = []
    for _ in range(32):
        browser.press("Tab")
        visited.append(browser.run(focused))
    visited = visited[visited.index("skip") :]  # once around, from the beginning of the page
    order = ["skip", "answer-text", "prompt", "send", "clear", "compare", "logprobs", "max-tokens"]
    at = [next(i for i, name in enumerate(visited) if name.startswith(each)) for each in order]
    assert at == sorted(at) and "temperature" in visited, visited

    wait_for_charts(browser)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    tree = [
        (node["role"]["value"], node.get("name", {}).get("value", ""), node)
        for node in nodes
        if not node.get("ignored") and "role" in node
    ]
    found = {(role, name) for role, name, _ in tree}
    assert {
        ("textbox", "Message"), ("button", "Send"), ("log", "Conversation"),
        ("checkbox", "Answer again without drafts, and compare the speed"),
        ("heading", "Chat"), ("heading", "The server now"), ("list", "Kinds of tokens"),
    } <= found  # fmt: skip
    assert any(role == "status" for role, _ in found)
    images = {name.partition(":")[0] for role, name in found if role in ("image", "img")}
    assert {"Tokens a second", "Draft length K, mean of the steps", "Requests"} <= images
    nameless = [
        (role, name) for role, name, node in tree
        if not name and any(p["name"] == "focusable" for p in node.get("properties", ()))
        and role not in ("RootWebArea", "generic")
    ]  # fmt: skip
    assert nameless == []


def luminance(rgb: str) -> float:
    """WCAG's relative luminance of "rgb(r, g, b)"."""
    parts = [int(part) / 255 for part in rgb.removeprefix("rgb(").rstrip(")").split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_nothing_was_wrong_and_nothing_came_from_elsewhere(
    browser: Browser, server: RunningServer
) -> None:
    """After the other tests: no error in the console, and every request went to the server."""
    assert browser.urls and all(url.startswith(f"{server.url}/") for url in browser.urls)
    assert browser.problems == []


def test_closing_the_page_ends_its_stream(browser: Browser, server: RunningServer) -> None:
    browser.open(f"{server.url}/live", 1280, 800)
    aborted = server.metric("request_success_total", finished_reason="abort")
    browser.run(f"{by_id('max-tokens', 'value')} = 4000; {by_id('prompt', 'focus()')}")
    browser.type("Count from one to a thousand.")
    browser.press("Enter")
    tokens = "document.querySelectorAll('.answer-text .token').length"
    browser.wait(lambda: browser.run(tokens), "tokens come")
    browser.call("Page.navigate", url="about:blank")

    def ended() -> bool:
        return server.metric("request_success_total", finished_reason="abort") == aborted + 1

    browser.wait(ended, "the request ends", 20)


def rejecting(request: AddRequest) -> list[RequestOutput | Exception | float]:
    """A step that accepts one of three drafts, one without drafts, and the end of the text."""
    a, b, c = TOKENIZER.encode("<b>", False)
    draft, other = TOKENIZER.encode("xy", False)
    first = RequestOutput(request.request_id, [a, b], num_draft_tokens=3, num_accepted_tokens=1)
    first.draft_token_ids = [a, draft, other]
    second = RequestOutput(request.request_id, [c])
    last = RequestOutput(request.request_id, [EOS or 0], finish_reason="stop", stop_token_id=EOS)
    outputs: list[RequestOutput | Exception | float] = [first, second, last]
    if request.sampling.logprobs is not None:
        for output, ids in ((first, [a, b]), (second, [c]), (last, [EOS or 0])):
            output.logprobs = logprobs_of(ids, request.sampling.logprobs)
    return outputs


@pytest.fixture
def locked() -> Iterator[tuple[str, ScriptedEngine]]:
    """The URL of a server with the key "secret", in a thread, and the engine that it plays."""
    engine = ScriptedEngine(rejecting)
    app = make_app(engine, config_with(api_key=("secret",)))
    port = free_port()
    config = uvicorn.Config(app, port=port, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}", engine
    finally:
        server.should_exit = True
        thread.join(20)


def test_the_key_is_asked_for_and_kept_in_the_tab(
    browser: Browser, locked: tuple[str, ScriptedEngine]
) -> None:
    """The server plays a script, so that each mark of the answer is known."""
    url, engine = locked
    browser.open(f"{url}/live", 1280, 800)
    is_open = by_id("key-dialog", "open")
    for key, fault in (("wrong", True), ("secret", False)):
        browser.wait(lambda: browser.run(is_open), "the page asks for a key")
        browser.type(key)
        browser.press("Enter")
        refused = by_id("key-fault", "hidden === false")
        if fault:
            browser.wait(lambda refused=refused: browser.run(refused), "the key is refused")
    connected = f"{by_id('server', 'textContent')} === 'Model {MODEL}'"
    browser.wait(lambda: browser.run(connected), "the page is connected")
    assert not browser.run(is_open)

    ask(browser, "hi")
    assert browser.run(TOKENS) == [[["accepted", "<"], ["replaced", "b"], ["drawn", ">"]]]
    (request,) = engine.requests
    assert request.sampling.report_drafts and request.sampling.speculative_enabled
    browser.run("document.querySelector('.answer-text').focus()")
    for _ in range(2):
        browser.press("ArrowRight")
    spoken = browser.run(by_id("spoken", "textContent"))
    assert 'in place of the rejected draft "x". Drafts after it: "y".' in spoken
    assert "Probability 77.88 % (log -0.25)." in spoken
    assert browser.run("document.querySelectorAll('#detail tr').length") == 4
    browser.press("Escape")
    browser.hover("document.querySelector('.answer-text').children[1]")  # with the mouse
    hovered = f"{by_id('detail', 'hidden')} ? '' : {by_id('detail', 'textContent')}"
    browser.wait(lambda: '"x"' in browser.run(hovered), "the rejected draft shows")
    assert '"y"' in browser.run(hovered) and "log -0.25" in browser.run(hovered)

    assert browser.run("JSON.stringify([localStorage.length, document.cookie])") == '[0,""]'
    browser.open(f"{url}/live", 1280, 800)  # the tab still has the key
    browser.wait(lambda: browser.run(connected), "the page is connected again")
    ask(browser, "hi", compare=True)
    assert [r.sampling.speculative_enabled for r in engine.requests] == [True, True, False]
