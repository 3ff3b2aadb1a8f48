"""Ahead-of-time compilation: replays start-up on meta tensors, compiling every kernel it launches.

It runs in a process of its own (see `start_ahead`). Meta tensors have shapes but no memory, so
nothing here can touch weights, KV or requests of the worker, and no GPU is needed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...configs.graphs import CUDAGraphMode
from ...configs.schema import Config, SchedulerConfig, StepLimits
from ...kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from ...kernels.compile_log import watch_compilations
from ...kernels.device import Card
from ..attention.base import AttentionBackend
from ..claims.at_start import ClaimsAtStart, claim_cases, claim_setup
from ..graphs.capture import Graph, GraphBackend
from ..graphs.dispatch import DEFAULT_MAX_CAPTURE_SIZE, wanted_mode
from ..graphs.settings import GraphSettings
from ..models.short_model import shorten
from ..parallel.engine_group import silent_group
from ..parallel.packet_sums import silent_packets
from ..parallel.ranks import Ranks, Silent
from ..process import follow_parent
from ..scheduling.plan import RowResult, StepPlan
from ..step.model_runner import ModelRunner
from ..step.parts import RunnerParts
from ..step.warm_up import rare_steps, warm_up_steps
from .assembly import Assembly
from .batch_invariant import check_rounding
from .compile_ahead import ATTENTION, GRAPHS, STAGES, STEPS, DryReport
from .limits import LARGE, SMALL, completed, is_large
from .memory import MemoryProfile

_META = torch.device("meta")
_NICE = 5  # the worker runs in parallel and must not wait for a core
_NOT_TRITONS = ("flashinfer", "flash_mla")
_MANY_BYTES = 1 << 50  # size of the KV cache, which uses no memory
# Larger batches are not known to need other kernels, whatever a server's own limits are. Experts
# share the rows of a step of thousands of tokens among more programs than those of a smaller one.
_MANY_ROWS, _MANY_TOKENS = 257, LARGE[0].max_num_batched_tokens
_SOME_PREFILL = 64  # tokens of a prefill beside verified drafts
_SHORT_PREFILL = 32  # tokens; the tiles of more hold one prefill only


# Called with the name of a stage once all its kernels have been launched.
Reached = Callable[[str], None]


class _DryGraph:
    def replay(self) -> None:
        """Do nothing: nothing was recorded."""

    def reset(self) -> None:
        """Do nothing: nothing is kept."""


class _DryGraphs:
    """A `GraphBackend` that runs captures without recording them."""

    def create_pool(self) -> int:
        return 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def begin(self, pool: Any) -> _DryGraph:
        return _DryGraph()

    def end(self, graph: Graph) -> None:
        """Do nothing: nothing was begun."""

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor

    def synchronize(self) -> None:
        """Do nothing: meta tensors are never busy."""

    def memory_used(self) -> int:
        return 0

    def release_unused(self) -> None:
        """Do nothing: no memory is used."""


class _DryAssembly(Assembly):
    def __init__(self, config: Config, reached: Reached, own: StepLimits) -> None:
        parallel, ranks = config.parallel, None
        if (size := parallel.tensor_parallel_size) > 1:
            packets = None if parallel.disable_custom_all_reduce else silent_packets(size, _META)
            ranks = Ranks(0, size, Silent(size), parallel.enable_expert_parallel, packets)
        engines = silent_group(config.parallel, _META)
        super().__init__(config, lambda _: None, _META, ranks=ranks, engines=engines)
        self._reached, self._own = reached, own

    def _load_target(self) -> None:
        super()._load_target()
        shorten(self.model)

    def _kv_cache_bytes(self, profile: MemoryProfile) -> int:
        self._reached(ATTENTION)
        profile.run_largest_step()
        num_reqs = min(self._own.max_num_seqs, self.max_num_reqs)
        num_tokens = min(self._own.max_num_batched_tokens, self.max_num_tokens)
        profile.small_target().warm_up(num_tokens, num_reqs)
        profile.graph_bytes()
        return super()._kv_cache_bytes(profile)

    def _graph_backend(self) -> GraphBackend:
        return _DryGraphs()

    def _claims(
        self, backend: AttentionBackend, settings: GraphSettings, needs: Any
    ) -> ClaimsAtStart:
        mode = wanted_mode(self.config.graph, self.device_type)
        cases = claim_cases(mode, self._query_lengths(needs))
        setup = claim_setup(self.max_num_reqs, self.max_model_len, self.block_size)
        return ClaimsAtStart(
            backend, settings.pool, setup, self.format.dtype, self.device, cases, lambda *_: 0.0
        )


class _DryRunner(ModelRunner):
    """A runner without results. It raises the errors of its steps at once."""

    def execute(self, plan: StepPlan) -> Any:
        handle = super().execute(plan)
        if handle.done() and (error := handle.error()) is not None:
            raise error
        return _NoResults()


class _NoResults:
    def get(self) -> list[RowResult]:
        """Return no results: meta tensors have no values."""
        return []


def any_limits(config: Config) -> Config:
    """Replace a server's limits by the largest that affect kernels.

    Kernels compiled for one server then serve all, so `start_key` need not include the limits.
    """
    cache = replace(
        config.cache, kv_cache_memory_bytes=_MANY_BYTES, num_gpu_blocks_override=1 << 16
    )
    graph = config.graph
    if graph.attention_backend in _NOT_TRITONS:  # the rest of the step is the same with "auto"
        graph = replace(graph, attention_backend="auto")
    # Sizes between powers of two need no kernels of their own.
    graph = replace(graph, cudagraph_capture_sizes=tuple(_powers(DEFAULT_MAX_CAPTURE_SIZE)))
    tokens = max(_MANY_TOKENS, _MANY_ROWS * (config.speculative.max_drafts + 1))
    scheduler = SchedulerConfig(max_num_seqs=_MANY_ROWS, max_num_batched_tokens=tokens)
    return replace(config, cache=cache, graph=graph, scheduler=scheduler)


def dry_start(
    config: Config, reached: Reached = lambda stage: None, own: StepLimits | None = None
) -> ModelRunner:
    """Build, warm up and capture like `build_model_runner`, then run steps that only some requests
    need.

    `own` holds the server's limits if those in `config` were replaced.
    """
    parts = _DryAssembly(config, reached, own or completed(config, SMALL, 0)).run()
    shorten(getattr(parts.speculator, "model", None))
    runner = _DryRunner(parts)
    check_rounding(parts.target.model)
    runner.warm_up()
    runner.capture()
    if own is not None and wanted_mode(config.graph, "cuda") is not CUDAGraphMode.NONE:
        with torch.inference_mode():
            run_mixed_sizes(parts, own.max_num_seqs, config.speculative.draft_counts)
    reached(GRAPHS)
    warm_up_steps(runner, own)
    reached(STEPS)
    rare_steps(runner)
    with torch.inference_mode():
        most = parts.facts.limits.max_num_batched_tokens
        run_any_batch(parts, most, config.speculative.draft_counts)
    return runner


def run_mixed_sizes(
    parts: RunnerParts, max_num_seqs: int, draft_counts: Sequence[int] = ()
) -> None:
    """Run the models as graphs of mixed batches do that have more tokens than a server's requests.

    Linear layers then see the tokens, and attention that many requests, whose kernels depend on
    both numbers. The ends of the range below a power of two cover every kind.
    """
    num_reqs = min(max_num_seqs, parts.buffers.max_num_reqs)
    for power in _powers(DEFAULT_MAX_CAPTURE_SIZE)[1:]:
        for num_tokens in (power // 2 + 1, power):
            for decode_len in (1, *(count + 1 for count in draft_counts if count)):
                length = num_tokens - (num_reqs - 1) * decode_len
                if length > 1:  # otherwise the graphs themselves have these
                    _run_mixed(parts, num_reqs, decode_len, length)


def _run_mixed(parts: RunnerParts, num_reqs: int, decode_len: int, length: int) -> None:
    """Run the target, and the drafter's pass over the same rows, eagerly on a prefill of `length`
    tokens behind decodes of the others."""
    buffers = parts.buffers
    num_tokens = length + (num_reqs - 1) * decode_len
    starts = torch.full((buffers.max_num_reqs + 1,), num_tokens, dtype=torch.int32)
    starts[:num_reqs] = torch.arange(num_reqs) * decode_len
    common = buffers.common(num_reqs, num_tokens, starts, starts[1:], length)
    attention = parts.target.eager_attention(num_tokens, common)
    parts.target.run_eagerly(num_tokens, attention)
    speculator = parts.draft_graphs.speculator if parts.draft_graphs is not None else None
    if speculator is not None and speculator.runs_draft_prefill:
        speculator.fill_dummy(num_reqs)
        speculator.first_pass(num_tokens, num_reqs, attention)


def run_any_batch(
    parts: RunnerParts, max_num_tokens: int, draft_counts: Sequence[int] = ()
) -> None:
    """Run the models on one prefill of every length in batches of every size, and on batches of
    short prefills alone.

    Attention runs outside graphs, and its tiles depend on both numbers. Powers of two, and one
    more, cover every kind of tile.
    """
    lengths = [n + more for n in _powers(max_num_tokens) for more in (0, 1)]
    # A prefill's launch does not depend on the decodes beside it, which are verified drafts or not.
    batches = [(1, length) for length in lengths]
    batches += [(count + 1, _SOME_PREFILL) for count in draft_counts if count]
    batches += [(length, length) for length in _powers(_SHORT_PREFILL)[1:]]
    for decode_len, length in batches:
        for num_reqs in _powers(parts.buffers.max_num_reqs):
            num_tokens = length + (num_reqs - 1) * decode_len
            if num_tokens > max_num_tokens:
                break
            _run_mixed(parts, num_reqs, decode_len, length)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def compile_start(
    config: Config, card: Card, num_processes: int, reached: Reached = lambda stage: None
) -> DryReport:
    """Compile what a start with `config` on the GPU `card` will launch, in `num_processes`."""
    began = time.monotonic()
    report = DryReport()
    watch_compilations()
    with without_gpu(card), compiling_only(ForkingExecutor(num_processes)) as kernels:
        try:
            # With little memory the worker chooses smaller limits. It launches the same kernels.
            wanted = LARGE[0] if is_large(card) else SMALL
            dry_start(any_limits(config), reached, completed(config, wanted, 0))
        except Exception as error:
            report.error = f"{type(error).__name__}: {error}"
    for kernel in kernels.values():
        if kernel.future.exception() is not None:
            report.num_failed += 1
        elif kernel.future.result():
            report.num_compiled += 1
        else:
            report.num_cached += 1
    report.seconds = time.monotonic() - began
    return report


def _import_late_parts() -> None:
    """Import modules that load at first use, for seconds, while the worker looks up the GPU."""
    import triton.compiler

    assert triton.compiler is not None
    _ = torch.zeros(1, device=_META) + 1  # arithmetic on meta tensors imports much of torch


def main() -> int:
    """Entry point of `python -m slipstream.runner.startup.dry_start 5 6 7`.

    Its standard input has two lines: the config, then the GPU. The arguments are descriptors of
    pipes, one per stage. Compiling processes inherit them, so a stage's pipe closes when its last
    compilation has ended.
    """
    follow_parent()
    os.nice(_NICE)
    gc.disable()  # a collection would copy memory pages that forked processes share
    gates = dict(zip(STAGES, map(int, sys.argv[1:]), strict=True))
    logging.disable()  # the worker logs the same
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    _import_late_parts()
    line = sys.stdin.buffer.readline()  # empty if nothing needs compiling
    if not line:
        return 0
    facts = json.loads(line)
    card = Card(
        facts["name"], tuple(facts["capability"]), facts["num_processors"], facts["memory_bytes"]
    )
    report = compile_start(
        config, card, facts["num_processes"], lambda stage: os.close(gates[stage])
    )
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
