"""Measures what a prompt's step consists of besides products, on a GPU, in less than a minute:
attention by each of its kernels beside torch's over contiguous keys, and the elementwise kernels.

    PYTHONPATH=.src python tests/lab/measure_prefill.py [NAME ...]

Each form of attention has a process of its own, which first compiles and then waits for its turn on
the GPU; one that hangs is ended after some seconds. Prints, for a layer of Llama-8B's shape, the
relative error, microseconds and TFLOP/s, counting visible keys only, and of elementwise kernels the
ratio to the time of their bytes at 4.2 TB/s.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from linear_tune import time_in_graph
from torch import Tensor
from triton.runtime.jit import JITFunction

from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.kernels.attention.triton.hopper_prefill import Form, hopper_prefill
from slipstream.kernels.attention.triton.prefill import Tiles, prefill_attention
from slipstream.kernels.linear.rotation import Rotation
from slipstream.kernels.linear.triton.activation import silu_and_mul
from slipstream.kernels.linear.triton.norm_rope import fused_add_rms_norm, rotary_store_kv

HEADS, KV_HEADS, DIM, PAGE, HIDDEN, INNER = 32, 8, 128, 16, 4096, 14336
BANDWIDTH = 4.2e6  # bytes a microsecond
HALVES = [(8, 2), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8)]  # heads and warps of a program
SECONDS_OF_A_TURN, SECONDS_OF_TURNS, SECONDS_OF_ALL = 8.0, 25.0, 58.0
FORMS: dict[str, Tiles | Form | None] = {
    "today": Tiles(64, 64, 4, 2),
    "roles 128x2": Form(128, 2),
    "roles 128x2 alternate": Form(128, 2, alternate=True),
    "roles 64x4": Form(64, 4),
    "roles 64x4 alternate": Form(64, 4, alternate=True),
    "torch": None,
}
CASES: dict[str, list[tuple[int, int]]] = {  # (new tokens, tokens in all) by request
    "1,024": [(1024, 1024)],
    "3,000": [(3000, 3000)],
    "8,192": [(8192, 8192)],
    "8 of 1,024": [(1024, 1024)] * 8,
    "2,048 after 6,000": [(2048, 8048)],
    "2,048 beside 64 decodes": [(1, 500)] * 32 + [(2048, 2048)] + [(1, 500)] * 32,
}


class Case:
    """Random query rows, a shuffled KV cache, and the rows that describe them."""

    def __init__(self, lengths: list[tuple[int, int]]) -> None:
        torch.manual_seed(len(lengths))
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        new, total = zip(*lengths, strict=True)
        blocks = [-(-n // PAGE) for n in total]
        table = torch.zeros(len(lengths), 256 if max(blocks) <= 256 else 1024, dtype=torch.int32)
        free = torch.randperm(sum(blocks)).int() + 1
        start = 0
        for row, count in enumerate(blocks):
            table[row, :count] = free[start : start + count]
            start += count
        self.lengths, self.longer_than = lengths, 1 if min(new) == 1 else 0
        self.cache = torch.randn(2, start + 1, PAGE, KV_HEADS, DIM, **options)
        # as in a step, queries are a part of the rows of a product
        self.query = torch.randn(sum(new), HEADS + 2 * KV_HEADS, DIM, **options)[:, :HEADS]
        self.rows = PagedRows(
            table.cuda(), torch.tensor([0, *new]).cumsum(0).int().cuda(),
            torch.tensor(total).int().cuda(), max(new),
            torch.zeros(sum(new), dtype=torch.int64, device="cuda"), longer_than=self.longer_than,
        )  # fmt: skip
        self.out = torch.zeros(sum(new), HEADS, DIM, **options)

    @property
    def flops(self) -> float:
        """Floating-point operations over the visible keys of long requests."""
        long = [(new, total) for new, total in self.lengths if new > self.longer_than]
        return 4.0 * DIM * HEADS * sum(new * (2 * total - new + 1) // 2 for new, total in long)

    def exact(self) -> Tensor:
        """Torch's attention of long requests; the rows of others are zeros."""
        result, start = torch.zeros_like(self.out), 0
        for row, (new, total) in enumerate(self.lengths):
            if new > self.longer_than:
                pages = self.rows.block_table[row, : -(-total // PAGE)].long()
                keys, values = (
                    self.cache[part, pages].flatten(0, 1)[:total].transpose(0, 1)
                    .repeat_interleave(HEADS // KV_HEADS, 0).unsqueeze(0)
                    for part in (0, 1)
                )  # fmt: skip
                mask = None
                if new != total:
                    mask = torch.ones(new, total, dtype=torch.bool, device="cuda")
                    mask = mask.tril(total - new)
                query = self.query[start : start + new].transpose(0, 1).unsqueeze(0)
                attended = F.scaled_dot_product_attention(
                    query, keys, values, attn_mask=mask, is_causal=mask is None
                )
                result[start : start + new] = attended[0].transpose(0, 1)
            start += new
        return result

    def call(self, form: Tiles | Form | None) -> Callable[[], object] | None:
        """A launch of the form; None if it cannot run this case."""
        rule = AttentionRule(scale=DIM**-0.5)
        arguments = (self.query, self.cache, self.rows, rule, self.out, form)
        if isinstance(form, Tiles):
            return partial(prefill_attention, *arguments)
        if isinstance(form, Form):
            return partial(hopper_prefill, *arguments)
        if len(self.lengths) > 1 or self.lengths[0][0] != self.lengths[0][1]:
            return None
        query = self.query.transpose(0, 1).unsqueeze(0)
        keys = torch.randn(1, KV_HEADS, len(self.query), DIM, device="cuda", dtype=query.dtype)
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return lambda: attend(query, keys, keys)


def compile_only(call: Callable[[], object]) -> None:
    """Compile the kernel that a call launches."""
    launch = JITFunction.run

    def warm_up(self: Any, *args: Any, warmup: bool, **options: Any) -> object:
        return launch(self, *args, warmup=True, **options)

    with patch.object(JITFunction, "run", warm_up):
        call()


def measure_attention(name: str, cases: dict[str, Case]) -> None:
    for title, case in cases.items():
        call = case.call(FORMS[name])
        if call is None:
            continue
        call()
        error = "      -"
        if name != "torch":
            exact = case.exact().float()
            error = f"{float((case.out.float() - exact).norm() / exact.norm()):.1e}"
            case.out.zero_()
        microseconds = time_in_graph([call] * 8)
        rate = case.flops / microseconds / 1e6
        print(f"{title:24} {microseconds:8.1f} us {rate:6.1f} TFLOP/s  error {error}  {name}",
              flush=True)  # fmt: skip


def elementwise(rows: int) -> dict[str, tuple[Callable[[], object], int]]:
    """The kernels between the products of a layer, each with the bytes that it moves."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, residual = torch.randn(rows, HIDDEN, **options), torch.randn(rows, HIDDEN, **options)
    weight, both = torch.ones(HIDDEN, **options), torch.randn(rows, 2 * INNER, **options)
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM, **options)
    positions = torch.arange(rows, device="cuda")
    rotation = Rotation(positions, torch.randn(rows, DIM, device="cuda"))
    cache = torch.zeros(2, rows // PAGE + 1, PAGE, KV_HEADS, DIM, **options)
    parts = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)

    def rotate(halves: tuple[int, int] | None) -> Callable[[], object]:
        return lambda: rotary_store_kv(*parts, rotation, cache, positions, halves=halves)

    return {
        "SwiGLU": (lambda: silu_and_mul(both), 6 * rows * INNER),
        "residual and norm": (
            lambda: fused_add_rms_norm(x, residual, weight, 1e-5),
            8 * rows * HIDDEN,
        ),
        "rotary and KV write": (rotate(None), 4 * qkv.numel()),
        **{
            f"by {heads} heads, {warps} warps": (rotate((heads, warps)), 4 * qkv.numel())
            for heads, warps in HALVES
        },
    }


def measure_elementwise(kernels: dict[int, dict[str, tuple[Callable[[], object], int]]]) -> None:
    for rows, of_rows in kernels.items():
        for title, (call, num_bytes) in of_rows.items():
            microseconds = time_in_graph([call] * 8)
            ideal = num_bytes / BANDWIDTH
            print(f"{title:24} {microseconds:8.1f} us, {rows} rows, {microseconds / ideal:.2f} x "
                  "the time of its bytes", flush=True)  # fmt: skip


def take_turn(name: str, lock: str) -> None:
    """Compile, then measure while no other process does."""
    if name == "elementwise":
        kernels = {rows: elementwise(rows) for rows in (3000, 8192)}
        for call, _ in (kernel for of_rows in kernels.values() for kernel in of_rows.values()):
            compile_only(call)
        measure: Callable[[], None] = partial(measure_elementwise, kernels)
    else:
        cases = {title: Case(lengths) for title, lengths in CASES.items()}
        calls = [case.call(FORMS[name]) for case in cases.values()]
        if name != "torch":
            for call in filter(None, calls):
                compile_only(call)
        measure = partial(measure_attention, name, cases)
    torch.cuda.synchronize()
    Path(lock).with_name(name).touch()
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        limit = Timer(SECONDS_OF_A_TURN, _give_up, [name])
        limit.daemon = True
        limit.start()
        measure()
        limit.cancel()


def _give_up(name: str) -> None:
    print(f"{name}: no result after {SECONDS_OF_A_TURN:.0f} s; it may hang", flush=True)
    os._exit(1)


def main() -> None:
    """Start a process for each form, and end those that need too long."""
    names = sys.argv[1:] or [*FORMS, "elementwise"]
    ends = time.monotonic() + SECONDS_OF_ALL
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # nobody measures while others prepare
        command = [sys.executable, __file__, "--turn", lock.name]
        processes = {name: subprocess.Popen([*command, name]) for name in names}
        waiting = processes
        while waiting and time.monotonic() < ends - SECONDS_OF_TURNS:
            time.sleep(0.1)
            waiting = {
                name: process
                for name, process in processes.items()
                if process.poll() is None and not (Path(folder) / name).exists()
            }
        fcntl.flock(lock, fcntl.LOCK_UN)
        for name, process in processes.items():
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{name}: ended after {SECONDS_OF_ALL:.0f} s", flush=True)
                process.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        take_turn(sys.argv[3], sys.argv[2])
    else:
        main()
