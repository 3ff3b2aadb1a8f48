"""Prints what the graphs of a speculative cycle launch: Triton kernels and torch's operations.

It replays a start for one request on meta tensors, so it needs no GPU and computes nothing:

    PYTHONPATH=.src python tests/lab/cycle_launches.py TARGET DRAFTER [--lines] [ROWS]

DRAFTER is an EAGLE-3 head, or off for a step of ROWS requests (1 by default) without drafts.

Duplicate layers are left out. So are operations that only make views or allocate memory, since they
launch nothing. `test_compile_ahead.py` runs it in a process of its own, since Triton decides at
import whether it compiles or interprets.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from dry_launches import H100
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    GraphConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.kernels.compile_ahead import without_gpu
from slipstream.runner.graphs import manager as cuda_graphs
from slipstream.runner.startup import dry_start

_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh"}
_OURS = ("/kernels/", "/runner/", "/speculators/")


def _line() -> str:
    """The innermost lines of this project's code on the call stack."""
    frames = [
        f"{frame.filename.rsplit('/', 2)[-2]}/{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if any(part in frame.filename for part in _OURS) and "tests" not in frame.filename
    ]
    return " < ".join(frames[:-4:-1])


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Launches(TorchDispatchMode):
    """Records the name and code line of each launch between `begin` and `end` of a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[str, list[tuple[str, str, bool]]] = {}
        self.now: list[tuple[str, str, bool]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.now is not None and name not in _FREE and isinstance(result, torch.Tensor):
            is_view = func.is_view and any(
                isinstance(arg, torch.Tensor) and _storage(arg) == _storage(result) for arg in args
            )
            if result.is_meta and not is_view:
                self.now.append((f"aten::{name}", _line(), False))
        return result

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, launches of Triton kernels are recorded and do nothing."""

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            if self.now is not None:
                self.now.append((kernel.fn.__name__, _line(), bool(kwargs.get("launch_pdl"))))

        capture = cuda_graphs.CudaGraphManager._capture_one

        def capture_one(manager: Any, desc: Any, create: Any) -> None:
            self.label = f"{manager.name} {desc.mode.name} {desc.num_tokens} x {desc.num_reqs}"
            capture(manager, desc, create)

        def begin(_: Any, pool: Any) -> Any:
            self.now = self.graphs[self.label] = []
            return dry_start._DryGraph()

        def end(_: Any, graph: Any) -> None:
            self.now = None

        with (
            patch.object(JITFunction, "run", launch),
            patch.object(cuda_graphs.CudaGraphManager, "_capture_one", capture_one),
            patch.object(dry_start._DryGraphs, "begin", begin),
            patch.object(dry_start._DryGraphs, "end", end),
            self,
        ):
            yield


def cycle(model: str, drafter: str, rows: int = 1) -> Launches:
    """Collect the launches of all graphs of a server with one request and three drafts, or of one
    with `rows` requests and no drafter."""
    head = SpeculativeConfig(
        method="eagle3", model=drafter, num_speculative_tokens=3, load_format="dummy"
    )
    size = rows if drafter == "off" else 4
    config = Config(
        model=ModelConfig(model=model, load_format="dummy", device="cuda"),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(64, rows)),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 40, num_gpu_blocks_override=1 << 12),
        speculative=SpeculativeConfig(method="off") if drafter == "off" else head,
        graph=GraphConfig(linear_backend="auto", cudagraph_capture_sizes=(size,)),
    )
    launches = Launches()
    with launches.watch():
        assembly = dry_start._DryAssembly(config, lambda stage: None, config.scheduler)
        runner = dry_start._DryRunner(assembly.run())
        runner.warm_up()
        runner.capture()
    return launches


def main(model: str, drafter: str, *flags: str) -> None:
    rows = [int(flag) for flag in flags if flag.isdigit()]
    with without_gpu(H100):
        launches = cycle(model, drafter, *rows)
    for label, found in launches.graphs.items():
        torchs = sum(name.startswith("aten") for name, _, _ in found)
        plain = sum(not pdl and not name.startswith("aten") for name, _, pdl in found)
        print(f"{label}: {len(found)}, torch {torchs}, without PDL {plain}")
        if "--lines" in flags:
            for (name, line, pdl), count in Counter(found).items():
                print(f"    {count} {name}{'' if pdl else ' (no PDL)'}  {line}")
    names = {label: [name for name, _, _ in found] for label, found in launches.graphs.items()}
    print(json.dumps(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
