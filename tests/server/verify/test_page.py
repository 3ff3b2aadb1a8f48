"""The report as HTML: complete, safe, without anything from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from slipstream.server.verify.report import Report, page

_VOID = {"meta", "rect", "path", "circle"}


class Balanced(HTMLParser):
    """Checks that every element is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag


def example() -> Report:
    report = Report({"model": "<model> & co", "drafter": None})
    report.note("Drafts", "acceptance, greedy", "words", acceptance=[0.8, 0.5])
    report.note("Drafts", "speed-up, one at a time", "words", ratios=[0.9, 1.2, 1.4])
    two = {"total_variation": 0.3, "bound": 0.2}
    report.add("Sampled text", "top-k", False, "a <b> differs", **{"token 1": two})
    bet = {"trials": 9, "bias": -0.02, "detectable_bias": 0.01}
    report.add("Sampled text", "all options: the judged draft", True, "words", **bet)
    report.skip("Sampled text", "seed", "why")
    return report


def test_a_page_is_complete_and_needs_nothing_else() -> None:
    text = page(example())
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert text.count("<svg") == 4 and "prefers-color-scheme:dark" in text
    assert "&lt;model&gt; &amp; co" in text and "a &lt;b&gt; differs" in text
    assert "<b> differs" not in text
    assert not re.search(r"<script|https?://|src=|@import|url\(", text)
    assert "1 of 5 checks failed (Sampled text: top-k)" in text


def test_bars_beyond_their_limit_are_marked() -> None:
    text = page(example())
    assert 'rect class="bad"' in text
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([0-9.]+)"', text)]
    assert all(0 < width < 640 for width in widths)


def test_without_figures_there_are_no_plots() -> None:
    assert "<svg" not in page(Report({}))
