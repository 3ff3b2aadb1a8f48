"""Starts an engine and prints the log of its start-up: graphs, memory and seconds by phase.

Run `python tests/lab/startup.py MODEL [DRAFTER [K [REQUESTS]]]` with a target and an EAGLE-3 head
from `shapes.py`; the weights are random. K is a number (default 3) or `auto`; REQUESTS is the
maximal number of concurrent requests. The last line is JSON: the seconds by phase, until the engine
is ready and until the first token; how many kernels the worker compiled, and how many it found in
Triton's cache; and the kernels compiled after the engine was ready, which should be none. For a
cold start, use an empty cache: `TRITON_CACHE_DIR=$(mktemp -d)`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from slipstream.configs.schema import Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from slipstream.kernels.compile_log import watch_compilations
from slipstream.runner.engine.engine import build_engine
from slipstream.runner.messages import AddRequest, SamplingParams


def main(
    model: str, drafter: str | None = None, k: str = "3", device: str = "auto", **scheduler: Any
) -> None:
    """Build an engine, generate one token and print the figures."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    speculative = SpeculativeConfig()
    if drafter is not None:
        speculative = SpeculativeConfig(
            method="eagle3",
            model=drafter,
            num_speculative_tokens=None if k == "auto" else int(k),
            load_format="dummy",
        )
    start = time.monotonic()
    engine = build_engine(
        Config(
            model=ModelConfig(model=model, load_format="dummy", device=device),
            scheduler=SchedulerConfig(**scheduler),
            speculative=speculative,
        ),
        lambda _: None,
    )
    ready = time.monotonic() - start
    kernels = watch_compilations()
    compiled, cached = len(kernels.compiled), kernels.num_cached
    engine.handle([AddRequest("0", [1, 2, 3], SamplingParams(seed=0, max_tokens=1))])
    while engine.has_work():
        engine.step()
    first_token = time.monotonic() - start
    engine.shutdown()
    phases = {phase: round(spent, 2) for phase, spent in engine.ready.startup_seconds.items()}
    figures = {"ready": round(ready, 2), "first_token": round(first_token, 2)} | phases
    counts = {"compiled": compiled, "cached": cached, "late": kernels.compiled[compiled:]}
    print(json.dumps(figures | counts))


if __name__ == "__main__":
    sizes = {"max_num_seqs": int(sys.argv[4])} if len(sys.argv) > 4 else {}
    main(*sys.argv[1:4], **sizes)
