"""Runs an engine over the fake runner and checks the scheduler's state after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from slipstream.configs.schema import CacheConfig, Config, SchedulerConfig
from slipstream.runner.engine.engine import Engine, join
from slipstream.runner.grammars.grammar import GrammarMatcher, MaskJob, fill_lines
from slipstream.runner.messages import (
    AbortRequests,
    AddRequest,
    GrammarSpec,
    RequestOutput,
    SamplingParams,
    StepStats,
)
from slipstream.runner.scheduling.kv_blocks import (
    NEVER,
    BlockGroup,
    KVBlocks,
    RequestBlocks,
    first_block_in_window,
)

from .fake_runner import FakeRunner, next_token

MAX_STEPS = 4000
COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "num_prompt_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_plain_steps",
    "num_generated_tokens",
)


class ParityMatcher:
    """A grammar that alternates odd and even tokens; token 0 may end it after two."""

    ends_with_text = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._accepted: list[int] = []

    @property
    def is_terminated(self) -> bool:
        return bool(self._accepted) and self._accepted[-1] == 0

    def allows(self, token_id: int) -> bool:
        if token_id == 0:
            return len(self._accepted) >= 2
        return token_id % 2 == len(self._accepted) % 2

    def accept(self, token_id: int) -> bool:
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"{token_id} is no token id")
        if self.is_terminated or not self.allows(token_id):
            return False
        self._accepted.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self._accepted)
        del self._accepted[-num_tokens:]

    def fill(self, line: np.ndarray) -> None:
        line[:] = 0
        if self.is_terminated:
            line[:] = -1
            return
        bits = np.array([self.allows(t) for t in range(32 * len(line))])
        line[:] = np.packbits(bits, bitorder="little").view(np.int32)


def fill_rows(matcher: GrammarMatcher, draft_ids: Sequence[int], lines: np.ndarray) -> int:
    """Fill all of a request's mask lines; returns the number of real drafts that are cut."""
    num_filled, num_cut = fill_lines(matcher, draft_ids, lines)
    lines[num_filled:] = lines[num_filled - 1]
    return num_cut


class ParityBackend:
    """Compiles "parity" when told to (`finish_all`), and refuses everything else."""

    def __init__(self, vocab_size: int, at_once: bool = True) -> None:
        self._vocab_size = vocab_size
        self._at_once = at_once
        self._waiting: list[tuple[GrammarSpec, Future[GrammarMatcher]]] = []
        self.was_shut_down = False
        self.is_prepared = False

    def prepare(self) -> None:
        self.is_prepared = True

    def compile(self, spec: GrammarSpec) -> Future[GrammarMatcher]:
        future: Future[GrammarMatcher] = Future()
        self._waiting.append((spec, future))
        if self._at_once:
            self.finish_all()
        return future

    def finish_all(self) -> None:
        for spec, future in self._waiting:
            if spec.value == "parity":
                future.set_result(ParityMatcher(self._vocab_size))
            else:
                future.set_exception(ValueError("no such grammar"))
        self._waiting.clear()

    def take_waiting(self) -> list[tuple[GrammarSpec, Future[GrammarMatcher]]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def fill(self, jobs: Sequence[MaskJob]) -> None:
        for job in jobs:
            try:
                job.num_cut = fill_rows(job.matcher, job.draft_ids, job.lines)
            except Exception as error:
                job.error = error

    def shutdown(self) -> None:
        self.was_shut_down = True


PARITY = GrammarSpec("grammar", "parity")


def add(
    request_id: str, prompt: Sequence[int], max_tokens: int = 8, **kwargs: object
) -> AddRequest:
    """A request; keywords are sampling parameters, or `priority`, or `cache_salt`."""
    others = [kwargs.pop("priority", 0), kwargs.pop("cache_salt", "")]
    kwargs.setdefault("stop_token_ids", [0])
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, **kwargs)  # type: ignore[arg-type]
    return AddRequest(request_id, list(prompt), sampling, *others)  # type: ignore[arg-type]


def expected_output(
    message: AddRequest, vocab_size: int, max_model_len: int
) -> tuple[list[int], str]:
    """The tokens and finish reason of plain decoding, one request at a time."""
    sampling, tokens = message.sampling, list(message.prompt_token_ids)
    matcher = ParityMatcher(vocab_size) if sampling.grammar else None
    output: list[int] = []
    limit = min(sampling.max_tokens, max_model_len - len(tokens))
    while True:
        line = None
        if matcher is not None:
            line = np.zeros(-(-vocab_size // 32), dtype=np.int32)
            matcher.fill(line)
        token = next_token(tokens + output, vocab_size, line)
        output.append(token)
        if matcher is not None:
            assert matcher.accept(token)
        stops = token in sampling.stop_token_ids and len(output) > sampling.min_tokens
        if stops or (matcher is not None and matcher.is_terminated):
            return output, "stop"
        if len(output) == limit:
            return output, "length"


def full_blocks(kv: KVBlocks, blocks: RequestBlocks, num_tokens: int) -> list[bool]:
    """For each group, whether `num_confirmed` tokens fill a block that is not published yet."""
    done = zip(kv.groups, blocks.num_published, strict=True)
    return [num_tokens // group.block_size > count for group, count in done]


def slid_blocks(kv: KVBlocks, blocks: RequestBlocks, num_tokens: int) -> list[bool]:
    """For each group, whether a block has left the window and is still held."""
    done = zip(kv.groups, blocks.num_slid, strict=True)
    return [first_block_in_window(group, num_tokens) > count for group, count in done]


@dataclass
class Received:
    """All outputs of one request."""

    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None


class Bench:
    """An engine over a fake runner, and all its outputs."""

    def __init__(
        self,
        groups: Sequence[BlockGroup] = (BlockGroup(64, 4),),
        max_model_len: int = 64,
        num_drafts: int = 0,
        async_scheduling: bool = True,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        chunked: bool = True,
        caching: bool = True,
        compile_at_once: bool = True,
        configured: bool = True,  # whether the user set the tokens of a step
        max_itl_ms: float | None = None,
        **runner_options: object,
    ) -> None:
        self.runner = FakeRunner(
            groups,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            num_drafts,
            **runner_options,  # type: ignore[arg-type]
        )
        config = Config(
            scheduler=SchedulerConfig(
                max_num_seqs,
                max_num_batched_tokens if configured else None,
                chunked,
                async_scheduling,
                max_itl_ms,
            ),
            cache=CacheConfig(enable_prefix_caching=caching),
        )
        self.engine: Engine = join(self.runner, config)
        self.backend = ParityBackend(self.runner.facts.vocab_size, compile_at_once)
        self.engine.set_grammar_backend(self.backend)
        self.scheduler = self.engine._scheduler
        self.kv = self.scheduler.kv
        self.caching = caching
        self.received: dict[str, Received] = {}
        self.totals = StepStats(accepted_per_pos=[0] * num_drafts)
        self.last_stats: StepStats | None = None
        self.num_steps = 0

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **options: object
    ) -> None:
        self.engine.handle([add(request_id, prompt, max_tokens, **options)])

    def abort(self, *request_ids: str) -> None:
        self.engine.handle([AbortRequests(list(request_ids))])

    def step(self) -> None:
        self.num_steps += 1
        assert self.num_steps < MAX_STEPS, "no end: a request is starved or the engine livelocks"
        for step in self.engine.step():
            self.count(step.stats)
            for output in step.outputs:
                received = self.received.setdefault(output.request_id, Received())
                assert received.finish_reason is None, "output after the end"
                received.outputs.append(output)
        self.check_books()

    def run(self) -> None:
        while self.engine.has_work():
            self.step()
        self.check_idle()

    def count(self, stats: StepStats) -> None:
        self.last_stats = stats
        for name in COUNTERS:
            setattr(self.totals, name, getattr(self.totals, name) + getattr(stats, name))
        for position, accepted in enumerate(stats.accepted_per_pos):
            self.totals.accepted_per_pos[position] += accepted
        assert sum(stats.accepted_per_pos) == stats.num_accepted_tokens <= stats.num_draft_tokens
        rows = stats.num_drafts + stats.num_plain_steps
        assert stats.num_accepted_tokens + rows == stats.num_generated_tokens
        assert 0.0 <= stats.kv_cache_usage <= 1.0

    def check_books(self) -> None:
        """Check that slots and blocks are owned exactly by their holders, and the null block by
        none."""
        scheduler = self.scheduler
        slots = [request.slot for request in scheduler.running]
        assert sorted(slots + scheduler._free_slots) == list(range(self.runner.max_num_seqs))
        held: list[Counter[int]] = [Counter() for _ in self.kv.pools]
        for request in scheduler.running:
            assert request.blocks is not None
            for counter, table in zip(held, request.blocks.tables, strict=True):
                counter.update(block for block in table if block)
        for request in scheduler.waiting:
            assert request.blocks is None and request.num_placeholders == 0
        for pool, counter in zip(self.kv.pools, held, strict=True):
            counts = {b: pool.ref_count(b) for b in range(pool.num_blocks) if pool.ref_count(b)}
            assert counts == dict(counter)
            assert pool.num_free == pool.num_usable - len(counter)

        self.check_kept_numbers()

    def check_kept_numbers(self) -> None:
        """Check that incrementally updated counts equal a recount."""
        scheduler, kv = self.scheduler, self.kv
        flights = [entry for entries in scheduler._in_flight.values() for entry in entries]
        for request in scheduler.running:
            rows = [row for r, born, row in flights if r is request and born == r.incarnation]
            sampling = [row for row in rows if not row.is_prefill]
            assert request.num_sampling_in_flight == len(sampling)
            assert request.num_rows_in_flight == len(rows)
            assert request.num_placeholders == sum(row.num_draft_tokens + 1 for row in sampling)
            blocks = request.blocks
            assert blocks is not None
            pairs = list(zip(kv.groups, blocks.tables, strict=True))
            assert blocks.capacity == min(len(table) * g.block_size for g, table in pairs)
            assert (blocks.publishes_at == NEVER) == (not self.caching)
            if self.caching:
                assert any(full_blocks(kv, blocks, blocks.publishes_at))
                assert not any(full_blocks(kv, blocks, blocks.publishes_at - 1))
            if blocks.slides_at != NEVER:
                assert any(slid_blocks(kv, blocks, blocks.slides_at))
            assert not any(slid_blocks(kv, blocks, blocks.slides_at - 1))
        matchers = [r.matcher for r in scheduler._requests.values() if r.matcher is not None]
        assert scheduler._num_grammars == len(matchers)

    def check_idle(self) -> None:
        """Check that every block and slot is free and that the gauges agree."""
        assert not self.scheduler.running and not self.scheduler.waiting
        assert all(pool.num_free == pool.num_usable for pool in self.kv.pools)
        if self.last_stats is not None:
            gauges = self.last_stats
            assert (gauges.num_running, gauges.num_waiting, gauges.kv_cache_usage) == (0, 0, 0.0)

    def expect(self, message: AddRequest) -> None:
        """Check that a finished request has exactly the output of plain decoding."""
        facts = self.runner.facts
        tokens, reason = expected_output(message, facts.vocab_size, facts.max_model_len)
        received = self.received[message.request_id]
        assert (received.token_ids, received.finish_reason) == (tokens, reason)
