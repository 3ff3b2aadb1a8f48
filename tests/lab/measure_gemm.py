"""Measures products of many rows on a Hopper GPU, in less than a minute: torch's beside those of
`hopper_product.py` in several forms, with and without the activation between them.

    PYTHONPATH=.src:tests/lab python tests/lab/measure_gemm.py [FORM ...]

Each form has a process of its own, which first compiles and then waits for its turn on the GPU; one
that hangs is ended after some seconds. Prints microseconds and TFLOP/s of Llama-8B's layers by
number of rows. Operands are random, since the GPU's clock depends on them, and every result is
compared with torch's. "silu" is gate_up with its activation: torch's product and the kernel for
SwiGLU, or one kernel.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Timer

import torch
from linear_tune import time_in_graph
from measure_prefill import compile_only
from torch import Tensor

from slipstream.kernels.linear.linear_choice import Wide
from slipstream.kernels.linear.wide.products import multiply_reference

SECONDS_OF_A_TURN, SECONDS_UNTIL_TURNS, SECONDS_OF_ALL = 14.0, 25.0, 58.0
MICROSECONDS = 25e3  # of a measurement, in one replay of its graph
COLD_BYTES = 256 << 20  # of weights, so that none stays in the cache
LARGEST_ERROR = 6e-3  # relative, beside torch's result of 16 bits
ROWS = (256, 480, 1024, 2048, 3000, 8192)
LAYERS = {  # outputs, inputs, the activation
    "qkv": (6144, 4096, None),
    "o": (4096, 4096, None),
    "gate_up": (28672, 4096, None),
    "down": (4096, 14336, None),
    "silu": (28672, 4096, "silu"),
}
FORMS: dict[str, Wide | None] = {
    "torch": None,
    "256x4": Wide(),
    "256x4 lag": Wide(lag=1),
    "undivided": Wide(halves=0),
    "128x6": Wide(128, 6),
    "group 8": Wide(group=8),
    "group 32": Wide(group=32),
}
SOME = {"group 8", "group 32"}  # only of layers and rows where they may matter


class Layer:
    """Random rows and copies of random weights."""

    def __init__(self, name: str) -> None:
        outputs, self.inputs, self.activation = LAYERS[name]
        count = -(-COLD_BYTES // (2 * outputs * self.inputs))
        scale = self.inputs**-0.5
        self.weights = [
            torch.empty(outputs, self.inputs, device="cuda", dtype=torch.bfloat16).normal_(0, scale)
            for _ in range(count)
        ]
        self.x = torch.randn(ROWS[-1], self.inputs, device="cuda", dtype=torch.bfloat16)

    def call(self, form: Wide | None, rows: int, weight: Tensor) -> Callable[[], Tensor]:
        if form is None:
            form, multiply = Wide(), multiply_reference
        else:
            from slipstream.kernels.linear.wide.triton.hopper_product import multiply
        return partial(multiply, self.x[:rows], weight, form, self.activation)

    def measure(self, form: Wide | None, rows: int) -> tuple[float, float]:
        """(microseconds of a product, TFLOP/s)."""
        call = self.call(form, rows, self.weights[0])
        got = call().float()
        if form is not None:
            exact = self.call(None, rows, self.weights[0])().float()
            error = float((got - exact).norm() / exact.norm())
            assert error < LARGEST_ERROR, f"relative error {error:.1e}"
        del got
        flops = 2.0 * rows * self.weights[0].numel()
        calls = [self.call(form, rows, weight) for weight in self.weights]
        wanted = max(2, int(MICROSECONDS / (flops / 600e6)))
        calls *= -(-wanted // len(calls))
        microseconds = time_in_graph(calls[: max(wanted, len(self.weights))], 1)
        return microseconds, flops / microseconds / 1e6


def wanted(form: str, layer: str, rows: int) -> bool:
    """Whether a form is worth its time for this layer."""
    return form not in SOME or (layer in ("silu", "down") and rows > 1024)


def take_turn(name: str, folder: Path) -> None:
    """Compile, then measure while no other process does; one line of JSON for each measurement."""
    form = FORMS[name]
    layers = {layer: Layer(layer) for layer in LAYERS}
    for layer in layers.values():
        compile_only(layer.call(form, 512, layer.weights[0]))
    torch.cuda.synchronize()
    (folder / name).touch()
    with open(folder / "lock", "w") as lock, open(folder / f"{name}.json", "w") as found:
        fcntl.flock(lock, fcntl.LOCK_EX)
        limit = Timer(SECONDS_OF_A_TURN, _give_up, [name])
        limit.daemon = True
        limit.start()
        wrong = 0
        for rows, title in itertools.product(ROWS, layers):
            if wrong == 3 or not wanted(name, title, rows):
                continue
            try:
                print(json.dumps([title, rows, *layers[title].measure(form, rows)]), file=found)
                found.flush()
            except AssertionError as error:
                print(f"{name}: {title}, {rows} rows: {error}", flush=True)
                wrong += 1
        limit.cancel()


def _give_up(name: str) -> None:
    print(f"{name}: no result after {SECONDS_OF_A_TURN:.0f} s; it may hang", flush=True)
    os._exit(1)


def report(folder: Path) -> None:
    """Print what was found, a line for each layer and number of rows."""
    found: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    for name in FORMS:
        path = folder / f"{name}.json"
        for line in path.read_text().splitlines() if path.exists() else ():
            layer, rows, *measured = json.loads(line)
            found.setdefault((layer, rows), {})[name] = measured
    print(f"{'microseconds, TFLOP/s':16}", *(f"{name:>13}" for name in FORMS))
    for layer in LAYERS:
        for rows in ROWS:
            of_form = found.get((layer, rows), {})
            cells = (
                f"{of_form[name][0]:8.1f} {of_form[name][1]:4.0f}" if name in of_form else "-"
                for name in FORMS
            )
            print(f"{layer:8} {rows:7,}     ", *(f"{cell:>13}" for cell in cells))


def main() -> None:
    """Start a process for each form, and end those that need too long."""
    names = sys.argv[1:] or [*FORMS]
    ends = time.monotonic() + SECONDS_OF_ALL
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # nobody measures while others prepare
            command = [sys.executable, __file__, "--turn", temporary]
            processes = {name: subprocess.Popen([*command, name]) for name in names}
            latest = time.monotonic() + SECONDS_UNTIL_TURNS
            while time.monotonic() < latest and any(
                process.poll() is None and not (folder / name).exists()
                for name, process in processes.items()
            ):
                time.sleep(0.1)
            fcntl.flock(lock, fcntl.LOCK_UN)
            for name, process in processes.items():
                try:
                    process.wait(max(0.0, ends - time.monotonic()))
                except subprocess.TimeoutExpired:
                    print(f"{name}: ended after {SECONDS_OF_ALL:.0f} s", flush=True)
                    process.kill()
        report(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        try:
            take_turn(sys.argv[3], Path(sys.argv[2]))
        except Exception as error:
            text = " ".join(str(error).split())
            print(f"{sys.argv[3]}: {type(error).__name__}: {text[:200]}", flush=True)
            os._exit(1)
    else:
        main()
