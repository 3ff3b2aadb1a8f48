"""Measures attention of many decodes whose contexts differ, alone and beside prompts, on a GPU.

`PYTHONPATH=.src python tests/lab/measure_ragged.py` prints microseconds for a layer of Llama-8B's
shape and the rate at which keys and values are read. "even" contexts have the same length, "chat"
ones the lengths of requests that decode under `closed_loop.py`. Each plan is named by its splits,
the keys up to which a request is not split, the keys of a tile, stages and warps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import torch
from linear_tune import time_in_graph
from torch import Tensor

from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.kernels.attention.triton.attention_plan import Launch, num_processors, plan_launch
from slipstream.kernels.attention.triton.prefill import prefill_attention
from slipstream.kernels.attention.triton.rotary_attention import rotary_attention
from slipstream.kernels.linear.linear import GATED
from slipstream.kernels.linear.norm_rope import fused_add_rms_norm
from slipstream.kernels.linear.rotation import Rotation

HEADS, KV_HEADS, DIM, PAGE, NUM_BLOCKS, LAYERS = 32, 8, 128, 16, 256, 4
RULE = AttentionRule(scale=DIM**-0.5)
CUDA = torch.device("cuda")
COUNTS = (16, 24, 32, 48, 64, 96, 128, 192, 256)


def chat_lengths(count: int) -> list[int]:
    """Contexts of running requests: long replies are seen more often, anywhere in the reply."""
    draw = random.Random(3)

    def length(median: float, sigma: float) -> int:
        return max(4, min(1024, round(draw.lognormvariate(math.log(median), sigma))))

    pairs = [(length(110, 1.2), length(145, 0.8)) for _ in range(20000)]
    chosen = draw.choices(pairs, [reply for _, reply in pairs], k=count)
    return [prompt + draw.randrange(reply) + 1 for prompt, reply in chosen]


def make_rows(new: list[int], total: list[int]) -> tuple[PagedRows, Tensor, Tensor]:
    """The rows, the KV cache of all layers and the positions; pages are in random order."""
    blocks = [-(-length // PAGE) for length in total]
    table = torch.zeros(len(total), NUM_BLOCKS, dtype=torch.int32)
    free = torch.randperm(sum(blocks)).int() + 1
    start = 0
    slots, positions = [], []
    for row, count in enumerate(blocks):
        table[row, :count] = free[start : start + count]
        start += count
        for at in range(total[row] - new[row], total[row]):
            slots.append(int(table[row, at // PAGE]) * PAGE + at % PAGE)
            positions.append(at)
    shape = (LAYERS, 2, start + 1, PAGE, KV_HEADS, DIM)
    cache = torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
    starts = torch.tensor([0, *new]).cumsum(0).int().to(CUDA)
    rows = PagedRows(
        table.to(CUDA), starts, torch.tensor(total).int().to(CUDA), 1,
        torch.tensor(slots).to(CUDA), torch.zeros(len(total) * KV_HEADS, device=CUDA).int(),
    )  # fmt: skip
    return rows, cache, torch.tensor(positions).to(CUDA)


def plans(base: Launch) -> list[Launch]:
    """The plan in use and others."""
    tiles = [(64, 2, 4, 128), (32, 3, 4, 128), (32, 4, 4, 128), (64, 2, 4, 96), (128, 2, 4, 128)]
    keys = ("block_n", "num_stages", "num_warps", "registers")
    wide = [replace(base, **dict(zip(keys, sizes, strict=True))) for sizes in tiles]
    split = [
        replace(plan, splits=splits, alone=alone, least_keys=least, last_sums=base.rows)
        for plan in (base, *wide[:2])
        for splits, alone, least in ((2, 512, 256), (4, 512, 256), (4, 512, 512), (4, 256, 128))
        if base.rows * DIM <= 2048
    ]
    return [base, *wide, *split]


def label(plan: Launch) -> str:
    tile = f"{plan.block_n},{plan.num_stages},{plan.num_warps},{plan.registers}"
    return f"{plan.splits}x>{plan.alone}/{plan.least_keys} {tile}"


def one_case(name: str, new: list[int], total: list[int], prompts_too: bool) -> None:
    rows, cache, positions = make_rows(new, total)
    tokens = sum(new)
    cos_sin = torch.randn(8192, DIM, device=CUDA, dtype=torch.bfloat16)
    q = torch.randn(tokens, HEADS, DIM, device=CUDA, dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, KV_HEADS, DIM, device=CUDA, dtype=torch.bfloat16) for _ in "kv")
    rotation = Rotation(positions, cos_sin)
    out = torch.empty_like(q)
    width = new[0]
    rows = replace(rows, max_query_len=width)
    base = base_plan(len(total), width)
    read = sum(t for n, t in zip(new, total, strict=True) if n == width) * 2 * KV_HEADS * DIM * 2

    def run(plan: Launch, layer: int) -> None:
        rotary_attention(q, k, v, rotation, cache[layer], rows, RULE, plan, out)

    def both(plan: Launch, layer: int) -> None:
        run(plan, layer)
        long = replace(rows, max_query_len=8192, arrivals=None, longer_than=1)
        prefill_attention(q, cache[layer], long, RULE, out)

    expected = None
    calls: list[tuple[str, Callable[[Launch, int], None]]] = [("decodes", run)]
    if prompts_too:
        calls.append(("and prompts", both))
    for what, call in calls:
        line = []
        for plan in plans(base) if what == "decodes" and not prompts_too else [base]:
            call(plan, 0)
            if expected is None:
                expected = out.clone()
            short = rows.query_start_loc[:-1][torch.tensor(new, device=CUDA) == width].long()
            error = float((out[short].float() - expected[short].float()).abs().max())
            spent = time_in_graph([partial(call, plan, layer) for layer in range(LAYERS)] * 2)
            wrong = "" if error < 0.05 else f" WRONG by {error:.0e}"
            line.append((spent, f"{spent:.1f} us {read / spent / 1e6:.2f} {label(plan)}{wrong}"))
        best = "; ".join(text for _, text in sorted(line[1:])[:6])
        print(f"{name}, {what}: in use {line[0][1]}; {best}", flush=True)


def base_plan(num_reqs: int, width: int) -> Launch:
    """The plan in use for requests with `width` new tokens each."""
    shape = (KV_HEADS, HEADS // KV_HEADS, DIM, width, NUM_BLOCKS * PAGE, num_processors(CUDA))
    return plan_launch(num_reqs, num_reqs * width, *shape)


def compile_plan(index: int) -> None:
    """Compile one plan's kernel, so that the cache on disk has it."""
    rows, cache, positions = make_rows([1] * 64, [100] * 64)
    cos_sin = torch.randn(8192, DIM, device=CUDA, dtype=torch.bfloat16)
    q = torch.randn(64, HEADS, DIM, device=CUDA, dtype=torch.bfloat16)
    k, v = (torch.randn(64, KV_HEADS, DIM, device=CUDA, dtype=torch.bfloat16) for _ in "kv")
    for count in COUNTS:
        for width in (1, 4):
            chosen = plans(base_plan(count, width))
            if index < len(chosen):
                rotary_attention(
                    q, k, v, Rotation(positions, cos_sin), cache[0], rows, RULE, chosen[index]
                )
    torch.cuda.synchronize()


def others(rows: int = 560) -> None:
    """Print the time of the kernels beside products and attention in a mixed step."""
    hidden = torch.randn(rows, 4096, device=CUDA, dtype=torch.bfloat16)
    stream, gain = torch.randn_like(hidden), torch.rand(4096, device=CUDA, dtype=torch.bfloat16)
    wide = torch.randn(rows, 28672, device=CUDA, dtype=torch.bfloat16)
    norm = time_in_graph([lambda: fused_add_rms_norm(hidden, stream, gain, 1e-5)] * 16)
    gated = time_in_graph([lambda: GATED["silu"](wide)] * 16)
    print(f"{rows} rows: norm with residual {norm:.1f} us, gated activation {gated:.1f} us")


def main() -> None:
    """Measure all cases."""
    with ProcessPoolExecutor(12, get_context("spawn")) as pool:
        list(pool.map(compile_plan, range(18)))
    others()
    chat = chat_lengths(256)
    print(f"chat: mean {sum(chat) / 256:.0f}, longest {max(chat)}")
    for count in COUNTS:
        one_case(f"{count} even 256", [1] * count, [256] * count, False)
        one_case(f"{count} chat", [1] * count, chat[:count], False)
        if count in (32, 64, 128):
            one_case(f"{count} chat, 3 drafts", [4] * count, [n + 3 for n in chat[:count]], False)
    for prompts in ([300], [1000]):
        new, total = [1] * 250 + prompts, chat[:250] + prompts
        new, total = new + [0] * (256 - len(new)), total + [0] * (256 - len(total))
        one_case(f"250 chat and prompts {prompts}", new, total, True)


if __name__ == "__main__":
    main()
