"""Measures attention of many decodes, whose contexts are equal or differ, on a GPU.

`PYTHONPATH=.src:tests/lab python tests/lab/measure_ragged.py` prints microseconds for a layer of
Llama-8B's shape by form of the launch and number of requests. "even" contexts have the same length,
"chat" ones the lengths of requests that decode under `closed_loop.py`. A form is named by its keys
of a tile, stages and warps. `--help` lists other shapes and cases.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch
from linear_tune import time_in_graph

from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.kernels.attention.triton.attention_plan import Launch, plan_launch
from slipstream.kernels.attention.triton.prefill import prefill_attention
from slipstream.kernels.attention.triton.rotary_attention import rotary_attention
from slipstream.kernels.device import num_processors
from slipstream.kernels.linear import head_sample
from slipstream.kernels.linear.linear import GATED
from slipstream.kernels.linear.norm_rope import fused_add_rms_norm
from slipstream.kernels.linear.rotation import Rotation
from slipstream.kernels.linear.triton import head_sample as picks

PAGE, NUM_BLOCKS, LAYERS = 16, 256, 4
PEAK = 4.24e6  # bytes a microsecond
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Shape:
    """The attention layers of a model."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    sinks: bool = False

    @property
    def rule(self) -> AttentionRule:
        sinks = torch.ones(self.heads, device=CUDA, dtype=torch.bfloat16) if self.sinks else None
        return AttentionRule(scale=self.dim**-0.5, sliding_window=self.window, sinks=sinks)

    def plan(self, num_reqs: int, width: int) -> Launch:
        """The plan in use for requests with `width` new tokens each."""
        sizes = (self.kv_heads, self.heads // self.kv_heads, self.dim, width, NUM_BLOCKS * PAGE)
        args = (num_reqs, num_reqs * width, *sizes, num_processors(CUDA))
        return plan_launch(*args)


SHAPES = {
    "llama-8b": Shape(32, 8, 128),
    "qwen3-30b": Shape(32, 4, 128),
    "gpt-oss": Shape(64, 8, 64, None, True),
    "gpt-oss-window": Shape(64, 8, 64, 128, True),
}
TILES = {  # keys of a tile, stages, warps, register limit, rows (0: those in use)
    "16,4,1": (16, 4, 1, None, 0),
    "16,4,1r": (16, 4, 1, None, 16),
    "64,2,4": (64, 2, 4, 128, 0),
}
SMALL_TILES = {  # for heads of 64 values
    "32,3,1": (32, 3, 1, None, 0),
    "64,3,2r": (64, 3, 2, None, 16),
    "128,3,4": (128, 3, 4, None, 0),
}


def forms(base: Launch, is_small: bool) -> Iterator[tuple[str, Launch]]:
    """The plan in use and others without splits, by name; `is_small`: heads of 64 values."""
    yield "in use", base
    if base.block_m != 16:
        return
    for name, (block_n, stages, warps, registers, rows) in (
        SMALL_TILES if is_small else TILES
    ).items():
        yield name, replace(
            base, block_n=block_n, num_stages=stages, num_warps=warps, registers=registers,
            rows=rows or base.rows, splits=1, last_sums=0, least_keys=1, alone=0,
        )  # fmt: skip


def chat_lengths(count: int) -> list[int]:
    """Contexts of running requests: long replies are seen more often, anywhere in the reply."""
    draw = random.Random(3)

    def length(median: float, sigma: float) -> int:
        return max(4, min(1024, round(draw.lognormvariate(math.log(median), sigma))))

    pairs = [(length(110, 1.2), length(145, 0.8)) for _ in range(20000)]
    chosen = draw.choices(pairs, [reply for _, reply in pairs], k=count)
    return [prompt + draw.randrange(reply) + 1 for prompt, reply in chosen]


class Case:
    """Requests with `new` tokens each after contexts that together have `total` tokens."""

    def __init__(self, shape: Shape, new: list[int], total: list[int]) -> None:
        self.shape, self.new, self.total, self.rule = shape, new, total, shape.rule
        blocks = [-(-length // PAGE) for length in total]
        table = torch.zeros(len(total), NUM_BLOCKS, dtype=torch.int32)
        free = torch.randperm(sum(blocks)).int() + 1  # pages in random order
        start = 0
        slots, positions = [], []
        for row, count in enumerate(blocks):
            table[row, :count] = free[start : start + count]
            start += count
            for at in range(total[row] - new[row], total[row]):
                slots.append(int(table[row, at // PAGE]) * PAGE + at % PAGE)
                positions.append(at)
        sizes = (LAYERS, 2, start + 1, PAGE, shape.kv_heads, shape.dim)
        self.cache = torch.randn(sizes, device=CUDA, dtype=torch.bfloat16)
        self.starts = torch.tensor([0, *new]).cumsum(0).tolist()
        self.rows = PagedRows(
            table.to(CUDA), torch.tensor(self.starts).int().to(CUDA),
            torch.tensor(total).int().to(CUDA), new[0], torch.tensor(slots).to(CUDA),
            torch.zeros(len(total) * shape.kv_heads, device=CUDA).int(),
        )  # fmt: skip
        # These cosines and sines rotate nothing, so that the reference need not rotate.
        half = torch.ones(8192, shape.dim // 2, device=CUDA, dtype=torch.bfloat16)
        angles = torch.cat((half, torch.zeros_like(half)), 1)
        self.rotation = Rotation(torch.tensor(positions).to(CUDA), angles)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        self.qkv = [
            torch.randn(sum(new), count, shape.dim, device=CUDA, dtype=torch.bfloat16)
            for count in heads
        ]
        self.out = torch.empty_like(self.qkv[0])
        self.kept = torch.zeros(256, device=CUDA)

    def run(self, plan: Launch, layer: int = 0) -> None:
        """One layer."""
        args = (self.rotation, self.cache[layer], self.rows, self.rule, plan, self.out)
        rotary_attention(*self.qkv, *args)

    def run_apart(self, plan: Launch, layer: int) -> None:
        """One layer after a small kernel, before whose end nothing of the layer begins."""
        self.kept.add_(1.0)
        self.run(plan, layer)

    def with_prompts(self, plan: Launch, layer: int) -> None:
        """One layer of decodes, and the launch of long queries after it."""
        self.run(plan, layer)
        long = replace(self.rows, max_query_len=8192, arrivals=None, longer_than=1)
        prefill_attention(self.qkv[0], self.cache[layer], long, self.rule, self.out)

    def read(self) -> float:
        """The bytes of the keys and values that decodes read."""
        width, most = self.new[0], self.shape.window or 1 << 30
        lengths = [min(t, most) for n, t in zip(self.new, self.total, strict=True) if n == width]
        return sum(lengths) * 2.0 * self.shape.kv_heads * self.shape.dim * 2

    def error(self) -> float:
        """The largest error of `out` in the shortest and longest contexts, against float32."""
        decodes = [i for i, count in enumerate(self.new) if count == self.new[0]]
        order = sorted(decodes, key=lambda i: self.total[i])
        return max(self._error_of(index) for index in {*order[:2], *order[-2:]})

    def _error_of(self, index: int) -> float:
        shape, length = self.shape, self.total[index]
        pages = self.rows.block_table[index, : -(-length // PAGE)].long()
        k, v = (self.cache[0, part, pages].flatten(0, 1)[:length].float() for part in (0, 1))
        first, end = self.starts[index : index + 2]
        q = self.qkv[0][first:end].float().unflatten(1, (shape.kv_heads, -1))
        scores = torch.einsum("tkgd,nkd->kgtn", q, k) * self.rule.scale
        at = torch.arange(length, device=CUDA)
        behind = torch.arange(length - (end - first), length, device=CUDA)[:, None] - at
        hidden = (behind < 0) | (behind >= (shape.window or length + 1))
        scores = scores.masked_fill(hidden, -math.inf)
        if self.rule.sinks is not None:
            sinks = self.rule.sinks.float().view(shape.kv_heads, -1, 1, 1)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        expected = torch.einsum("kgtn,nkd->tkgd", weights, v).flatten(1, 2)
        return float((expected - self.out[first:end].float()).abs().max())


def table(shape: Shape, name: str, lengths: Callable[[int], list[int]], width: int,
          counts: list[int], apart: bool) -> None:  # fmt: skip
    """Print the times of all forms by number of requests."""
    found: dict[str, list[str]] = {}
    least: list[str] = []
    for count in counts:
        total = [length + width - 1 for length in lengths(count)]
        case = Case(shape, [width] * count, total)
        least.append(f"{case.read() / PEAK:7.1f} ")
        spent = {}
        for form, plan in forms(shape.plan(count, width), shape.dim == 64):
            case.out.fill_(math.nan)
            try:
                case.run(plan)
                error = case.error()
                call = case.run_apart if apart else case.run
                calls = [partial(call, plan, layer) for layer in range(LAYERS)] * 2
                spent[form] = time_in_graph(calls, 3)
            except Exception as problem:  # one form that cannot run must not end the others
                print(f"{form}: {problem!r}"[:300])
                continue
            if not error < 0.02:
                print(f"WRONG by {error:.1e}: {name}, {count} requests, {form}")
        best = min(spent.values())
        for form, value in spent.items():
            mark = "*" if value == best else "-" if value < 1.01 * best else " "
            found.setdefault(form, []).append(f"{value:7.1f}{mark}")
        del case
    drafts = f", {width - 1} drafts" if width > 1 else ""
    print(f"\n{name}{drafts}; us a layer{' and a small kernel' if apart else ''}")
    print(f"{'requests':>26} " + "".join(f"{count:7} " for count in counts))
    print(f"{'bytes at 4.24 TB/s':>26} " + "".join(least))
    for form, cells in found.items():
        print(f"{form:>26} " + "".join(cells), flush=True)


def compile_form(job: tuple[str, int, int, list[int]]) -> None:
    """Compile one form's kernels, so that the cache on disk has them."""
    name, width, index, counts = job
    shape = SHAPES[name]
    for count in counts:
        chosen = list(forms(shape.plan(count, width), shape.dim == 64))
        if index < len(chosen):
            case = Case(shape, [width] * 32, [100] * 32)
            plan = chosen[index][1]
            case.run(plan)
    torch.cuda.synchronize()


def prompts_beside(shape: Shape) -> None:
    """Print the times of decodes and of a prompt's launch after them."""
    chat = chat_lengths(250)
    for prompt in (300, 1000):
        new, total = [1] * 250 + [prompt] + [0] * 5, [*chat, prompt] + [0] * 5
        case, plan = Case(shape, new, total), shape.plan(256, 1)
        times = [
            time_in_graph([partial(call, plan, layer) for layer in range(LAYERS)] * 2)
            for call in (case.run, case.with_prompts)
        ]
        print(f"250 chat beside a prompt of {prompt}: {times[0]:.1f} us, with it {times[1]:.1f}")


def others(rows: int) -> None:
    """Print the time of the kernels beside products and attention in a step of many rows."""
    hidden = torch.randn(rows, 4096, device=CUDA, dtype=torch.bfloat16)
    stream, gain = torch.randn_like(hidden), torch.rand(4096, device=CUDA, dtype=torch.bfloat16)
    wide = torch.randn(rows, 28672, device=CUDA, dtype=torch.bfloat16)
    norm = time_in_graph([lambda: fused_add_rms_norm(hidden, stream, gain, 1e-5)] * 16)
    gated = time_in_graph([lambda: GATED["silu"](wide)] * 16)
    print(f"{rows} rows: norm with residual {norm:.1f} us, gated activation {gated:.1f} us")
    logits = torch.randn(rows, 128256, device=CUDA, dtype=torch.bfloat16)
    seeds, zeros = torch.zeros(rows, device=CUDA).long(), torch.zeros(rows, device=CUDA)
    in_use, expected = picks.BEST_OF_BLOCK, logits.argmax(-1)
    print(f"tokens of {rows} rows of logits, {logits.numel() * 2 / PEAK:.1f} us by their bytes:")
    sizes = ((8, None), (8, 64), (16, None), (16, 40), (16, 32))
    for form in dict.fromkeys((in_use, *((*size, tiles) for size in sizes for tiles in (1, 4)))):
        picks.BEST_OF_BLOCK = form
        line = []
        for is_greedy in (True, False):
            greedy = torch.full_like(zeros, is_greedy, dtype=torch.bool)
            draws = head_sample.Draws(seeds, seeds, greedy, zeros + (0.0 if is_greedy else 1.0))
            tokens, _ = head_sample.pick_rows(logits, draws)
            if is_greedy and not torch.equal(tokens, expected):
                print(f"WRONG tokens by {form}")
            spent = time_in_graph([partial(head_sample.pick_rows, logits, draws)] * 4)
            line.append(f"{'greedy' if is_greedy else 'drawn'} {spent:.1f}")
        print(f"  {form}: {', '.join(line)}{' (in use)' if form == in_use else ''}", flush=True)
    picks.BEST_OF_BLOCK = in_use


def main() -> None:
    """Measure the cases of the command line."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--counts", type=numbers, default=[32, 64, 128, 192, 256])
    parser.add_argument("--even", type=numbers, default=[192, 256], help="lengths of even contexts")
    parser.add_argument("--drafts", type=numbers, default=[0, 3])
    parser.add_argument("--apart", action="store_true", help="a small kernel before each layer")
    parser.add_argument("--others", type=int, default=0, help="measure other kernels of such rows")
    parser.add_argument("--prompts", action="store_true", help="measure a prompt beside decodes")
    args = parser.parse_args()
    shape, began = SHAPES[args.shape], time.monotonic()
    if args.others:
        others(args.others)
        return
    if args.prompts:
        prompts_beside(shape)
        return
    sizes = [(drafts + 1, index) for index in range(4) for drafts in args.drafts]
    jobs = [(args.shape, width, index, args.counts) for width, index in sizes]
    with ProcessPoolExecutor(12, get_context("spawn")) as pool:
        list(pool.map(compile_form, jobs))
    print(f"compiled after {time.monotonic() - began:.0f} s")
    chat = chat_lengths(max(args.counts))
    print(f"chat: mean {sum(chat) / len(chat):.0f}, longest {max(chat)}")
    for drafts in args.drafts:
        for length in args.even:
            even = partial(lambda length, count: [length] * count, length)
            table(shape, f"even {length}", even, drafts + 1, args.counts, args.apart)
        table(shape, "chat", lambda count: chat[:count], drafts + 1, args.counts, args.apart)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
