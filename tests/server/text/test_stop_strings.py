"""Stop strings against a plain search in the whole text, in every chunking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.server.text.stop_strings import StopChecker, StopStrings


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first end at which a stop string is complete; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    checker = StopChecker(StopStrings(stops), include)
    emitted, matched = [], None
    for piece in pieces:
        delta, matched = checker.push(piece)
        emitted.append(delta)
    delta, matched = checker.push("", final=True)
    return "".join([*emitted, delta]), matched


def chunkings(text: str) -> list[list[str]]:
    """Every way to cut a short text."""
    if not text:
        return [[]]
    return [[text[:n], *rest] for n in range(1, len(text) + 1) for rest in chunkings(text[n:])]


small = st.text(alphabet="ab", max_size=9)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(small, stop_lists, st.booleans())
def test_equals_full_search_in_every_chunking(text: str, stops: list[str], include: bool) -> None:
    expected = oracle(text, stops, include)
    for pieces in chunkings(text):
        assert run(pieces, stops, include) == expected


@given(st.lists(st.text(alphabet="aé😀\u0301\n", max_size=5), max_size=12), st.data())
def test_equals_full_search_on_unicode(pieces: list[str], data: st.DataObject) -> None:
    stop = st.text(alphabet="aé😀\u0301\n", min_size=1, max_size=4)
    stops = data.draw(st.lists(stop, min_size=1, max_size=4))
    assert run(pieces, stops, False) == oracle("".join(pieces), stops, False)


@given(st.lists(small, max_size=6), stop_lists)
def test_holds_back_exactly_what_may_become_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    checker, seen, emitted = StopChecker(StopStrings(stops)), "", ""
    for piece in pieces:
        seen += piece
        delta, matched = checker.push(piece)
        emitted += delta
        if matched:
            return
        possible = [n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert len(seen) - len(emitted) == max(possible, default=0)


def test_final_releases_a_partial_match() -> None:
    checker = StopChecker(StopStrings(["STOP"]))
    assert checker.push("go ST") == ("go ", None)
    assert checker.push("O", final=True) == ("STO", None)


def test_drops_all_text_after_a_match() -> None:
    checker = StopChecker(StopStrings(["\n\n"]))
    assert checker.push("one\n\ntwo") == ("one", "\n\n")
    assert checker.push("three", final=True) == ("", "\n\n")


def test_without_stop_strings_text_passes() -> None:
    assert StopChecker(StopStrings([])).push("text") == ("text", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
