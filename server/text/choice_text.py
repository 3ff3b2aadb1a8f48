"""Makes the text of one OpenAI choice: detokenization, stop strings, token counts, logprobs.

It knows nothing of HTTP or of the other choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...runner.messages import RequestOutput, TokenLogprobs
from ..errors import GenerationFailed, InvalidRequest
from .stop_strings import StopChecker, StopStrings
from .tokenizer import Tokenizer


class TextOptions(NamedTuple):
    """A request's options for converting its token ids to text."""

    stop: list[str]
    include_stop: bool = False  # keep the stop string or stop token in the text
    skip_special_tokens: bool = True
    min_tokens: int = 0  # tokens before which stop strings are ignored
    keep: frozenset[int] = frozenset()  # special tokens that are never skipped
    stop_token_ids: frozenset[int] = frozenset()  # those of the client, reported as stop_reason
    grammar_param: str | None = None  # parameter to blame if the engine rejects the request
    reports_steps: bool = False  # events name the steps that they consist of; not with `stop`


class TokenEntry(NamedTuple):
    """An emitted token with its log probabilities."""

    offset: int  # index of its first character in the choice's text
    hidden: bool  # its text is not output: a stop token or string, or a skipped special token
    logprobs: TokenLogprobs


class StepText(NamedTuple):
    """The tokens that one step of the engine added to a choice."""

    texts: list[str]  # of each token, the characters that it completes
    num_accepted: int  # how many of them, from the first, are accepted drafts
    rejected_ids: list[int]  # the drafts after those


class GenerationEvent(msgspec.Struct):
    """The text and tokens that one step added to one choice."""

    index: int
    text: str
    token_ids: list[int]
    num_read: int = 0  # tokens received for it; `token_ids` lacks those held back
    prompt_logprobs: list[bytes] | None = None  # packed
    logprobs: Sequence[TokenEntry] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    steps: Sequence[StepText] = ()  # with `TextOptions.reports_steps`

    def join(self, later: GenerationEvent) -> None:
        """Append the event that follows this one."""
        self.text += later.text
        self.token_ids = self.token_ids + later.token_ids
        self.num_read += later.num_read
        self.logprobs = [*self.logprobs, *later.logprobs]
        self.steps = [*self.steps, *later.steps]
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class ChoiceText:
    """Converts the token ids of one OpenAI choice to text while they are generated."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        options: TextOptions,
        prompt_ids: Sequence[int] = (),
        stops: StopStrings | None = None,
    ) -> None:
        """The text continues that of `prompt_ids`, so a leading space is kept.

        `stops` are the stop strings of `options`, prepared once for all choices of a request.
        """
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.spec_steps: list[tuple[int, int]] = []  # (accepted, drafted) of each verify step
        self.finish_reason: str | None = None
        self.logprob_sum = 0.0
        self._options = options
        self._detokenizer = tokenizer.detokenizer(
            options.skip_special_tokens, options.keep, prompt_ids
        )
        self._push = self._detokenizer.push
        stops = stops or StopStrings(options.stop)
        self._stops = StopChecker(stops, options.include_stop) if options.stop else None
        self._is_plain = self._stops is None and not options.reports_steps
        self._num_read = 0  # tokens received; `num_tokens` counts those emitted
        self._raw_length = 0  # characters of the tokens received
        self._shown_length = 0  # characters emitted
        self._held: list[tuple[int, int, TokenEntry]] = []  # token id, end of its text, entry

    def feed(self, outputs: Sequence[RequestOutput]) -> GenerationEvent:
        """Read outputs that arrived together; returns one event for the client.

        Outputs after the one that ends the text are dropped. With log probabilities, the event's
        `token_ids` and `logprobs` cover the same tokens: both are held back while a stop string may
        still remove the token's text. Raises GenerationFailed or InvalidRequest if an output is an
        error.
        """
        num_plain = 0
        ids: list[int] = []
        if self._is_plain:
            for output in outputs:  # nearly all outputs are text and nothing else
                if output.finish_reason is not None or output.logprobs is not None:
                    break
                if output.num_draft_tokens or output.num_cached_tokens:
                    self._count(output)
                ids = ids + output.token_ids if ids else output.token_ids
                num_plain += 1
        num_ids = len(ids)
        self._num_read += num_ids
        self.num_tokens += num_ids
        of_prompt = outputs[0].prompt_logprobs
        event = GenerationEvent(self.index, self._push(ids), ids, num_ids, of_prompt)
        if num_plain < len(outputs):
            for output in outputs[num_plain:]:
                event.join(self._read(output))
                if event.finish_reason is not None:
                    break
        return event

    def _read(self, output: RequestOutput) -> GenerationEvent:
        """The event of one output of any kind, without the prompt's log probabilities."""
        if output.finish_reason == "error":
            message = output.error or "The engine could not finish this request."
            if output.invalid_request:
                param = self._options.grammar_param
                raise InvalidRequest(message, param, "invalid_value" if param else None)
            raise GenerationFailed(message)
        self._count(output)
        event = GenerationEvent(self.index, "", output.token_ids, len(output.token_ids))
        ids = output.token_ids
        ended_by_token = output.stop_token_id is not None
        visible = ids[:-1] if ended_by_token and not self._options.include_stop else ids
        if self._is_plain and output.logprobs is None:
            event.text = self._push(visible)
        else:
            self._push_each(event, visible, output)
        self._num_read += len(event.token_ids)
        if event.finish_reason is None and output.finish_reason is not None:
            self._end(event, output)
        if output.logprobs is not None:
            self._release(event)
        self.num_tokens += len(event.token_ids)
        self.finish_reason = event.finish_reason
        return event

    def _count(self, output: RequestOutput) -> None:
        if output.num_cached_tokens and not self.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.num_draft_tokens:
            self.num_draft_tokens += output.num_draft_tokens
            self.num_accepted_tokens += output.num_accepted_tokens
            self.spec_steps.append((output.num_accepted_tokens, output.num_draft_tokens))

    def _push_each(self, event: GenerationEvent, visible: list[int], output: RequestOutput) -> None:
        """Push token by token, so that the output ends with the token that completes a stop."""
        shown, logprobs = [], output.logprobs
        pieces = self._detokenizer.push_tokens(visible)
        if self._options.reports_steps and event.token_ids:
            texts = [*pieces, *[""] * (len(event.token_ids) - len(pieces))]
            event.steps = [StepText(texts, output.num_accepted_tokens, _rejected(output))]
        for number in range(len(event.token_ids)):
            piece = pieces[number] if number < len(pieces) else ""
            if logprobs is not None:
                token_id = event.token_ids[number]
                hidden = number >= len(pieces) or token_id in self._detokenizer.dropped
                self._hold(token_id, logprobs[number], len(piece), hidden)
            self._raw_length += len(piece)
            if self._stops is None or self._num_read + number < self._options.min_tokens:
                shown.append(piece)
                continue
            text, matched = self._stops.push(piece, False)
            shown.append(text)
            if matched is not None:
                self._stopped(event, matched)
                event.token_ids = event.token_ids[: number + 1]
                break
        event.text = "".join(shown)
        self._shown_length += len(event.text)

    def _end(self, event: GenerationEvent, output: RequestOutput) -> None:
        rest = self._detokenizer.flush()
        event.finish_reason = output.finish_reason
        if output.stop_token_id in self._options.stop_token_ids:
            event.stop_reason = output.stop_token_id
        if self._stops is not None:
            rest, matched = self._stops.push(rest, True)
            if matched is not None:
                self._stopped(event, matched)
        event.text += rest
        if event.steps:
            event.steps[-1].texts[-1] += rest  # bytes that are no whole character
        self._shown_length += len(rest)

    def _stopped(self, event: GenerationEvent, matched: str) -> None:
        event.finish_reason = "stop"
        event.stop_reason = matched

    def _hold(self, token_id: int, entry: TokenLogprobs, length: int, hidden: bool) -> None:
        self.logprob_sum += entry.logprob
        end = self._raw_length + length
        self._held.append((token_id, end, TokenEntry(self._raw_length, hidden, entry)))

    def _release(self, event: GenerationEvent) -> None:
        """Move the tokens with emitted text into the event; at the end, all tokens."""
        shown = self._shown_length
        if event.finish_reason is not None:
            count = len(self._held)
        else:
            count = sum(end <= shown for _, end, _ in self._held)
        left, self._held = self._held[:count], self._held[count:]
        event.token_ids = [token_id for token_id, _, _ in left]
        event.logprobs = [entry for _, _, entry in left]
        if isinstance(event.stop_reason, str):
            event.logprobs = [_without_stop(entry, shown) for entry in event.logprobs]


def _rejected(output: RequestOutput) -> list[int]:
    """The drafts of a step that the target rejected, from the one in whose place it drew another.

    If that one equals the last token, the text ended within accepted drafts, and none was rejected.
    """
    first, drafts = output.num_accepted_tokens, output.draft_token_ids or []
    rejected = drafts[first : output.num_draft_tokens]
    return [] if rejected[:1] == output.token_ids[-1:] else rejected


def _without_stop(entry: TokenEntry, shown: int) -> TokenEntry:
    """The entry of a token in an output cut to `shown` characters, where it may have no text."""
    return entry if entry.offset < shown else entry._replace(offset=shown, hidden=True)
