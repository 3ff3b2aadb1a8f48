"""Finds stop strings in a growing text; it must not know tokens or requests.

The match that is completed first counts; of several that end at the same character, the longest.
The result therefore does not depend on how the text was split into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """A request's stop strings, prepared once and shared by the checkers of all its choices.

    `borders[i]` of a stop string is the length of the longest proper prefix of `stop[: i + 1]` that
    is also its suffix (the failure function of Knuth, Morris and Pratt).
    """

    def __init__(self, stop: Iterable[str]) -> None:
        """Prepare the stop strings; raises ValueError if one is empty."""
        self.borders = {text: _borders(text) for text in dict.fromkeys(stop)}


def _borders(stop: str) -> list[int]:
    if not stop:
        raise ValueError("a stop string is empty")
    borders = [0]
    border = 0
    for char in stop[1:]:
        while border and char != stop[border]:
            border = borders[border - 1]
        border += char == stop[border]
        borders.append(border)
    return borders


class _Matcher:
    """Searches a growing text for one stop string with the algorithm of Knuth, Morris and Pratt.

    `matched` is the number of characters of the stop string at the end of the text so far."""

    def __init__(self, stop: str, borders: list[int]) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = borders

    def find(self, text: str) -> int | None:
        """Read more text; returns the offset in it after the first complete match, or None."""
        stop, matched = self.stop, self.matched
        if not matched and stop[0] not in text:
            return None
        for offset, char in enumerate(text):
            while matched and char != stop[matched]:
                matched = self._borders[matched - 1]
            matched += char == stop[matched]
            if matched == len(stop):
                return offset + 1
        self.matched = matched
        return None


class StopChecker:
    """Passes text through until a stop string appears.

    Holds back only the longest suffix of the text that may still become a stop string. `include`
    keeps the stop string in the text.
    """

    def __init__(self, stop: StopStrings, include: bool = False) -> None:
        self._matchers = [_Matcher(text, borders) for text, borders in stop.borders.items()]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, final: bool = False) -> tuple[str, str | None]:
        """Read more text; returns the text that can be emitted, and the stop string that matched.

        With `final`, no text follows, so nothing is held back. After a match, further text is
        dropped.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._matchers:
            return text, None
        ends = {m.stop: end for m in self._matchers if (end := m.find(text)) is not None}
        if ends:
            return self._stop(text, ends)
        seen = self._held + text
        held = 0 if final or self._include else max(m.matched for m in self._matchers)
        cut = len(seen) - held
        self._held = seen[cut:]
        return seen[:cut], None

    def _stop(self, text: str, ends: dict[str, int]) -> tuple[str, str]:
        end = min(ends.values())
        self.matched = max((stop for stop, at in ends.items() if at == end), key=len)
        seen = self._held + text[:end]
        self._held = ""
        return (seen if self._include else seen[: len(seen) - len(self.matched)]), self.matched
