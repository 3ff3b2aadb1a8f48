"""Decides which batches run in which graph: capture sizes, descriptors, dispatch and graph modes.

These are pure functions over plain values; nothing here captures, allocates or knows a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from ...configs.schema import GraphConfig
from ..errors import RunnerError

DEFAULT_MAX_CAPTURE_SIZE = 1024
_MOST_MIXED = 2048  # tokens of the largest graph of a mixed batch
_MOST_CLOSE = 512  # tokens; larger capture sizes are further apart, and only for uniform batches


class GraphConfigError(RunnerError):
    """The graph options that the user set cannot be satisfied."""


@dataclass(frozen=True)
class ModeDecision:
    """The mode of a forward pass, and the query lengths for which uniform batches run as FULL."""

    mode: CUDAGraphMode
    uniform_token_counts: tuple[int, ...]
    reason: str = ""  # why it is less than what was wanted; "" = it is what was wanted


# --- capture sizes --------------------------------------------------------------------------------


def default_capture_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """The token counts 1, 2, 4, then multiples of 8 to 32, of 16 to 512 and of 128 to 1,024.

    The last one is `max_num_tokens` if that is smaller than 1,024. Kernels process 16, 32 or 64
    rows at once, so closer sizes would save little time, and with drafts each size is captured up
    to five times. The largest sizes serve many requests that verify drafts: without a graph, such a
    step waits for hundreds of launches.
    """
    largest = min(max_num_tokens, DEFAULT_MAX_CAPTURE_SIZE)
    close = range(48, _MOST_CLOSE + 1, 16)
    sizes = [1, 2, 4, *range(8, 33, 8), *close, *range(_MOST_CLOSE + 128, largest, 128)]
    return (*(size for size in sizes if size < largest), largest)


def mixed_capture_sizes(
    wanted: Sequence[int] | None, max_num_tokens: int, mode: CUDAGraphMode
) -> tuple[int, ...]:
    """The token counts of mixed batches to capture: the user's, else few, unless `mode` is FULL.

    Padding costs little up to about 256 tokens, where the step's duration is that of reading the
    weights; above, 60 rows more cost a tenth of a step of 500 rows. The largest sizes are for
    prompts beside many decodes: without a graph, the host needs longer for the launches of such a
    step than the GPU for the step.
    """
    if wanted is not None:
        return capture_sizes(wanted, max_num_tokens)
    sizes = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, *range(256, _MOST_CLOSE + 1, 64)]
    if mode is CUDAGraphMode.FULL:  # one graph a size: closer ones, and larger ones
        sizes += [*range(160, 256, 32), *range(256, 768, 16), *range(768, 1024, 32)]
        sizes += range(1024, _MOST_MIXED + 1, 64)
    return tuple(sorted({size for size in sizes if size <= max_num_tokens}))


def capture_sizes(wanted: Sequence[int] | None, max_num_tokens: int) -> tuple[int, ...]:
    """The token counts to capture, ascending: the user's, or the default ones.

    Raises GraphConfigError for a size that no step can have.
    """
    if wanted is None:
        return default_capture_sizes(max_num_tokens)
    for size in wanted:
        if not 1 <= size <= max_num_tokens:
            raise GraphConfigError(
                f"--cudagraph-capture-sizes contains {size}, but a step has 1 to {max_num_tokens} "
                "tokens (--max-num-batched-tokens)"
            )
    return tuple(sorted(set(wanted)))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def uniform_descriptors(
    sizes: Iterable[int], uniform_token_count: int, max_num_reqs: int, max_num_tokens: int
) -> list[BatchExecutionDescriptor]:
    """FULL descriptors of uniform batches with query length L: M* = N* x L."""
    length = uniform_token_count
    limit = min(max_num_reqs * length, max_num_tokens)
    counts = sorted({_round_up(size, length) for size in sizes})
    fitting = [count for count in counts if count <= limit]
    # The largest batch needs a graph even if no size rounds to it exactly.
    largest = limit // length * length
    if counts and counts[-1] > largest > 0 and largest not in fitting:
        fitting.append(largest)
    return [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, count, count // length, length)
        for count in fitting
    ]


def mixed_descriptors(
    sizes: Iterable[int],
    mode: CUDAGraphMode,
    alignment: int,
    max_num_reqs: int,
    max_num_tokens: int,
) -> list[BatchExecutionDescriptor]:
    """Descriptors of batches with any query lengths. In PIECEWISE mode requests are not padded,
    because attention runs on the real rows."""
    counts = {_round_up(size, alignment) for size in sizes}
    counts = {count if count <= max_num_tokens else max_num_tokens for count in counts}
    return [
        BatchExecutionDescriptor(
            mode, count, min(count, max_num_reqs) if mode is CUDAGraphMode.FULL else None
        )
        for count in sorted(counts)
    ]


def descriptors(
    mode: CUDAGraphMode,
    uniform_token_counts: Sequence[int],
    sizes: Sequence[int],
    max_num_reqs: int,
    max_num_tokens: int,
    mixed_sizes: Sequence[int] | None = None,  # None: `sizes`
) -> list[BatchExecutionDescriptor]:
    """All descriptors to capture in this mode, in capture order: PIECEWISE before FULL, largest
    first."""
    found: set[BatchExecutionDescriptor] = set()
    if mode.decode_mode() is CUDAGraphMode.FULL and mode.separate_routine():
        for length in uniform_token_counts:
            of_length = uniform_descriptors(sizes, length, max_num_reqs, max_num_tokens)
            is_chosen = len(uniform_token_counts) > 2 and length > min(uniform_token_counts)
            found.update(thinned(of_length) if is_chosen else of_length)
    if (mixed := mode.mixed_mode()) is not CUDAGraphMode.NONE:
        alignment = max(uniform_token_counts, default=1)
        own = sizes if mixed_sizes is None else mixed_sizes
        found.update(mixed_descriptors(own, mixed, alignment, max_num_reqs, max_num_tokens))
    return sorted(found, key=_capture_order)


def thinned(descs: list[BatchExecutionDescriptor]) -> list[BatchExecutionDescriptor]:
    """Keep about two sizes per doubling, and the largest one.

    It is used for query lengths that only the draft controller selects: the memory and start-up
    time of all sizes would cost more than closer sizes save.
    """
    kept, last = [], 0
    for desc in descs[:-1]:
        requests = desc.num_reqs or 0
        if requests >= last * 4 / 3:
            kept.append(desc)
            last = requests
    return [*kept, *descs[-1:]]


def _capture_order(desc: BatchExecutionDescriptor) -> tuple[int, int, int]:
    return (desc.mode is CUDAGraphMode.FULL, -desc.num_tokens, desc.uniform_token_count or 0)


# --- dispatch -------------------------------------------------------------------------------------


def eager_descriptor(
    num_tokens: int, num_reqs: int, uniform_token_count: int | None
) -> BatchExecutionDescriptor:
    """The descriptor of a batch that runs without a graph: nothing is padded."""
    return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs, uniform_token_count)


def dispatch(
    captured: Iterable[BatchExecutionDescriptor],
    num_tokens: int,
    num_reqs: int,
    uniform_token_count: int | None,
    best: CUDAGraphMode = CUDAGraphMode.FULL,
) -> BatchExecutionDescriptor:
    """The captured descriptor that runs a batch at least cost, or an eager one.

    It prefers FULL to PIECEWISE, then a uniform query length to any, then the smallest padded size.
    `best` limits the mode: with data parallelism the rank with the lowest mode decides.
    """
    fitting = [
        desc
        for desc in captured
        if desc.mode.value <= best.value and desc.serves(num_tokens, num_reqs, uniform_token_count)
    ]
    if num_tokens == 0 or not fitting:
        return eager_descriptor(num_tokens, num_reqs, uniform_token_count)
    return min(
        fitting,
        key=lambda desc: (
            desc.mode is not CUDAGraphMode.FULL,
            desc.uniform_token_count is None,
            desc.num_tokens,
        ),
    )


# --- modes ----------------------------------------------------------------------------------------


def wanted_mode(config: GraphConfig, device_type: str) -> CUDAGraphMode:
    """The mode set by `--cudagraph-mode` and `--enforce-eager` on this kind of device."""
    if config.enforce_eager or device_type != "cuda":
        return CUDAGraphMode.NONE
    if config.cudagraph_mode == "auto":
        return CUDAGraphMode.FULL_AND_FULL
    return CUDAGraphMode[config.cudagraph_mode.upper()]


def supports_uniform(support: AttentionCGSupport, uniform_token_count: int) -> bool:
    """Whether a back end with this claim can run uniform batches of this query length in a
    graph."""
    if uniform_token_count == 1:
        return support >= AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return support >= AttentionCGSupport.UNIFORM_BATCH


def resolve_target(
    wanted: CUDAGraphMode, support: AttentionCGSupport, uniform_token_counts: Sequence[int]
) -> ModeDecision:
    """The target's mode: `wanted` as far as `support`, the least claim of its KV groups, allows.

    Raises GraphConfigError if the user asked for full graphs and attention supports none.
    """
    lengths = tuple(sorted(set(uniform_token_counts)))
    mode, reasons = wanted, []
    if mode.mixed_mode() is CUDAGraphMode.FULL and support < AttentionCGSupport.ALWAYS:
        if support is AttentionCGSupport.NEVER and wanted is CUDAGraphMode.FULL:
            raise GraphConfigError(
                "--cudagraph-mode full: the attention back end can never run inside a graph; use "
                "piecewise or none"
            )
        mode = CUDAGraphMode.FULL_AND_PIECEWISE
        reasons.append(f"attention claims {support.name}, so mixed batches run PIECEWISE")
    if mode.decode_mode() is CUDAGraphMode.FULL and mode.separate_routine():
        allowed = tuple(length for length in lengths if supports_uniform(support, length))
        if refused := [str(length) for length in lengths if length not in allowed]:
            reasons.append(
                f"attention claims {support.name}, so query length {', '.join(refused)} runs "
                "PIECEWISE"
            )
            # Query lengths that are left stay FULL; without any, no batch is FULL.
            mode = CUDAGraphMode.FULL_AND_PIECEWISE if allowed else CUDAGraphMode.PIECEWISE
            lengths = allowed
    return ModeDecision(mode, lengths, "; ".join(reasons))


def resolve_draft_decode(wanted: CUDAGraphMode, support: AttentionCGSupport) -> ModeDecision:
    """The mode of draft decodes: `wanted` as far as `support`, the least claim of the drafter's KV
    groups, allows. Raises GraphConfigError for PIECEWISE."""
    if CUDAGraphMode.PIECEWISE in (wanted, wanted.decode_mode()):
        raise GraphConfigError(
            "draft decodes run as one whole graph or without graphs, never piecewise: use "
            "full_decode_only or none for them"
        )
    if wanted.decode_mode() is CUDAGraphMode.NONE:
        return ModeDecision(CUDAGraphMode.NONE, ())
    if not supports_uniform(support, 1):
        return ModeDecision(CUDAGraphMode.NONE, (), f"attention claims {support.name}")
    return ModeDecision(CUDAGraphMode.FULL_DECODE_ONLY, (1,))
