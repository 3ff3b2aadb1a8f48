"""Starts the process that compiles kernels while the worker loads, and waits for it.

It begins at once, so that its imports, like its compilations, run beside those of the worker, which
waits, stage by stage, for no more than it launches next. A start that was gone through before finds
all in Triton's cache, and needs no such process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...configs.schema import Config

if TYPE_CHECKING:
    from ...kernels.device import Card

logger = logging.getLogger(__name__)
OFF = "SLIPSTREAM_COMPILE_AHEAD"  # environment variable; 0 = every kernel at its first launch
MAX_WAIT_SECONDS = 90.0
# What a start launches, in its order: the tests of attention's claims; memory profile, warm-up and
# captures; first steps. What it does not launch itself, though requests may, comes last.
ATTENTION, GRAPHS, STEPS = STAGES = ("attention", "graphs", "steps")
_MIN_CORES = 4  # with fewer the two processes only take time from each other
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_SOURCES = ("kernels", "runner", "speculators")
# Of a model's config.json: what no kernel depends on.
_NO_SHAPES = (
    "_name_or_path",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class DryReport(msgspec.Struct):
    """What a dry start says on its standard output, one line of JSON."""

    num_compiled: int = 0
    num_cached: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    error: str = ""  # why it did not get to its end


class CompileAhead:
    """A dry start in a process of its own (see `dry_start`); none of its failures fails a start."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._stamp: Path | None = None  # exists once all of this start was compiled
        self._gates: dict[str, int] = {}  # stage -> read end of a pipe, which ends when it does
        self.seconds = 0.0  # that were waited
        self._key = start_key(config)
        self.num_processes = len(os.sched_getaffinity(0))
        if not any(triton_cache().glob(f"{self._key}-*")):
            self._start()

    def tell(self, card: Card) -> None:
        """Let it begin, now that the card is known; or end it, if nothing is to be compiled."""
        facts = {
            "name": card.name,
            "capability": card.capability,
            "num_processors": card.num_processors,
        }
        of_card = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
        self._stamp = triton_cache() / f"{self._key}-{of_card}"
        line = json.dumps(facts | {"num_processes": self.num_processes}).encode()
        if self._stamp.exists():
            self.stop()
            return
        if self._process is None:
            self._start()
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it died: `wait` tells

    @property
    def is_compiling(self) -> bool:
        """Whether there is, or may be, something to wait for."""
        return self._process is not None and self._stamp is not None

    def wait_for(self, stage: str) -> None:
        """Wait until what a start launches up to the end of this one of `STAGES` is compiled, or
        cannot be."""
        if not self.is_compiling or stage not in self._gates:
            return
        began = time.monotonic()
        ends = select.poll()
        ends.register(self._gates[stage])  # nothing is written: it only hangs up
        ends.poll(1e3 * self._patience())
        self.seconds += time.monotonic() - began

    def wait(self) -> DryReport | None:
        """Wait until all is compiled; None if nothing was to be."""
        if self._process is None or self._stamp is None:
            return None
        began = time.monotonic()
        report = self._result()
        self.stop()
        self.seconds += time.monotonic() - began
        if report.error or report.num_failed:
            reason = report.error or f"{report.num_failed} kernels do not compile"
            logger.warning("not all kernels were compiled ahead: %s", reason)
        else:
            _touch(self._stamp)
        logger.info(
            "compiled %d kernels ahead on %d cores in %.1f s (%d were there), waited %.1f s",
            report.num_compiled, self.num_processes, report.seconds, report.num_cached,
            self.seconds,
        )  # fmt: skip
        return report

    def _patience(self) -> float:
        return max(0.0, MAX_WAIT_SECONDS - self.seconds)

    def stop(self) -> None:
        """End it, if it still runs, with all that it started."""
        while self._gates:
            os.close(self._gates.popitem()[1])
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.communicate()

    def _start(self) -> None:
        package = __package__ or ""
        root = sys.modules[package.partition(".")[0]].__path__[0]
        paths = [str(Path(root).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CUDA_VISIBLE_DEVICES": "",  # it must not take memory of the card
            "OMP_NUM_THREADS": "1",  # nor have threads when it forks
        }
        gates = {stage: os.pipe() for stage in STAGES}
        self._gates = {stage: ends[0] for stage, ends in gates.items()}
        inherited = [ends[1] for ends in gates.values()]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{package}.dry_start", *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            logger.warning("no kernels are compiled ahead: %s", error)
            self.stop()
            return
        finally:
            for end in inherited:
                os.close(end)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass

    def _result(self) -> DryReport:
        assert self._process is not None
        try:
            output, _ = self._process.communicate(timeout=self._patience())
            return msgspec.json.decode(output, type=DryReport)
        except subprocess.TimeoutExpired:
            return DryReport(error=f"it took more than {MAX_WAIT_SECONDS:.0f} s")
        except (msgspec.DecodeError, OSError):
            return DryReport(error=f"its process ended with status {self._process.poll()}")


@contextmanager
def start_ahead(config: Config) -> Iterator[CompileAhead | None]:
    """The dry start beside this start, where one is of use; it does not outlive the block."""
    ahead = CompileAhead(config) if is_wanted(config) else None
    try:
        yield ahead
    finally:
        if ahead is not None:
            ahead.stop()


def is_wanted(config: Config) -> bool:
    """Whether this start may launch Triton kernels, as far as one can tell without torch."""
    return (
        config.model.device != "cpu"
        and os.environ.get(OFF) != "0"
        and any(os.path.exists(path) for path in _DRIVERS)
        and hasattr(os, "sched_getaffinity")
        and len(os.sched_getaffinity(0)) >= _MIN_CORES
        and _has_async_compilation()
    )


def _has_async_compilation() -> bool:
    """Whether this Triton is there and can compile without launching (3.6 and later)."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 6)


def start_key(config: Config) -> str:
    """Names what a start launches: shapes of the models, our sources, the versions of others'.

    Limits of memory and of batches, seeds and names are not in it: the dry start assumes limits of
    its own. Where that is wrong, a kernel is compiled at its first launch.
    """
    model, drafts, graph = config.model, config.speculative, config.graph
    parts = (
        _shapes_of(model.model, model.revision),
        (model.dtype, model.max_model_len, model.hf_overrides, config.cache.block_size),
        None if drafts.method == "off" else _without(drafts, "model", "watchdog", "load_format"),
        None if drafts.model is None else _shapes_of(drafts.model),
        _without(graph, "cudagraph_capture_sizes", "debug_compare_eager"),
        os.environ.get("SLIPSTREAM_PDL", ""),
    )
    digest = hashlib.sha256(msgspec.json.encode(parts))
    for name in ("torch", "triton"):
        try:
            digest.update(importlib.metadata.version(name).encode())
        except importlib.metadata.PackageNotFoundError:
            pass
    folder = Path(__file__).parents[2]
    for source in _SOURCES:
        for path in sorted((folder / source).rglob("*.py")):
            digest.update(path.read_bytes())
    return f"slipstream-{digest.hexdigest()[:16]}"


def _without(section: Any, *names: str) -> dict[str, Any]:
    """Fields of a section, but these."""
    return {
        field.name: getattr(section, field.name)
        for field in dataclasses.fields(section)
        if field.name not in names
    }


def _shapes_of(model: str, revision: str | None = None) -> Any:
    """What a model's folder says of its shapes; elsewhere its name stands for them."""
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_bytes())
        kept = {key: value for key, value in found.items() if key not in _NO_SHAPES}
        return json.dumps(kept, sort_keys=True)
    except (OSError, ValueError, AttributeError):
        return model, revision


def triton_cache() -> Path:
    """Where Triton keeps compiled kernels."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(home) / ".triton" / "cache"


def _touch(stamp: Path) -> None:
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    except OSError as error:
        logger.warning("cannot note in %s that kernels were compiled: %s", stamp.parent, error)
