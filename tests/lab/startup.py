"""Starts a worker's model runner and prints what start-up says: graphs, memory, seconds by phase.

`python tests/lab/startup.py MODEL [DRAFTER [K [REQUESTS]]]`: MODEL and an EAGLE-3 head as
`shapes.py` writes them, random weights; K is 3, or auto; REQUESTS at once, 64. Ends with one line
of JSON: seconds by phase, and from the import's end to ready; kernels that the worker compiled
itself, that it found in Triton's cache (empty for a cold start: `TRITON_CACHE_DIR=$(mktemp -d)`),
and that were compiled after ready, which must be none.
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
    """Build an engine and wait for its first token."""
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
