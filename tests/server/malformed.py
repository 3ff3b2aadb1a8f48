"""Asks the server's check and the worker's loading about a model, within bounds."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slipstream.configs.schema import Config, ModelConfig
from slipstream.runner.errors import RunnerError
from slipstream.runner.startup.load_target import load_target
from slipstream.server.startup.model_files import ModelFilesError, check_model_files

CPU = torch.device("cpu")


@contextmanager
def bounded(megabytes: int = 64, seconds: float = 2.0) -> Iterator[None]:
    """Fails if the block takes more memory or processor time."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < megabytes, f"{grown:.0f} MB"
    assert time.process_time() - began < seconds


def sentences(model: Path, **settings: Any) -> tuple[str | None, str | None]:
    """What the server's check and the worker's loading say, None if nothing; the worker is asked
    even where the server has refused, since other commands start it without that check."""
    config = Config(model=ModelConfig(model=str(model), dtype="float32", **settings))
    said: list[str | None] = []
    for ask in (
        lambda: check_model_files(config),
        lambda: load_target(config, CPU, lambda done, total: None),
    ):
        with bounded():
            try:
                ask()
                said.append(None)
            except (ModelFilesError, RunnerError) as error:
                said.append(str(error))
                assert "\n" not in said[-1] and len(said[-1]) < 1000
                assert "Traceback" not in said[-1] and not said[-1].startswith("[enforce")
    return said[0], said[1]
