"""Starts a process that compiles kernels while the worker loads, and waits for it stage by stage.

The process starts at once, so that its imports and compilations run in parallel with the worker's
loading. At each stage the worker waits only for the kernels that it launches next. If an equal
start has run before, all kernels are in Triton's cache and no process is needed.
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
OFF = "SLIPSTREAM_COMPILE_AHEAD"  # environment variable; 0 = compile kernels at first launch
MAX_WAIT_SECONDS = 90.0
# The stages of a start, in order: tests of attention claims; memory profile, warm-up and captures;
# first steps. Kernels that only requests may launch are compiled last.
ATTENTION, GRAPHS, STEPS = STAGES = ("attention", "graphs", "steps")
_MIN_CORES = 4  # with fewer, the two processes only slow each other down
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_SOURCES = ("kernels", "runner", "speculators")
# Environment variables that turn kernels off.
_SWITCHES = ("SLIPSTREAM_PDL", "SLIPSTREAM_HOPPER_PREFILL", "SLIPSTREAM_ROW_LAYER")
# Keys of a model's config.json that no kernel depends on.
_NO_SHAPES = (
    "_name_or_path",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class DryReport(msgspec.Struct):
    """The result of a dry start, which writes it to its standard output as one line of JSON."""

    num_compiled: int = 0
    num_cached: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    error: str = ""  # why it stopped early


class CompileAhead:
    """A dry start in another process (see `dry_start`).

    If it fails, the worker starts nonetheless.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._stamp: Path | None = None  # a file that exists once this start is fully compiled
        # stage -> read end of a pipe that closes when it is compiled
        self._gates: dict[str, int] = {}
        self.seconds = 0.0  # time spent waiting
        self._key = start_key(config)
        self.num_processes = len(os.sched_getaffinity(0))
        if not any(triton_cache().glob(f"{self._key}-*")):
            self._start()

    def tell(self, card: Card) -> None:
        """Let it compile for this GPU, or stop it if everything has been compiled before."""
        facts = {
            "name": card.name,
            "capability": card.capability,
            "num_processors": card.num_processors,
        }
        of_card = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
        self._stamp = triton_cache() / f"{self._key}-{of_card}"
        others = {"num_processes": self.num_processes, "memory_bytes": card.memory_bytes}
        line = json.dumps(facts | others).encode()
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
            pass  # the process died; `wait` reports it

    @property
    def is_compiling(self) -> bool:
        """True if there may be compilations to wait for."""
        return self._process is not None and self._stamp is not None

    def wait_for(self, stage: str) -> None:
        """Wait until the kernels of `STAGES` up to this one are compiled, or the time is over."""
        if not self.is_compiling or stage not in self._gates:
            return
        began = time.monotonic()
        ends = select.poll()
        ends.register(self._gates[stage])  # the pipe carries no data: it only hangs up
        ends.poll(1e3 * self._patience())
        self.seconds += time.monotonic() - began

    def wait(self) -> DryReport | None:
        """Wait until everything is compiled and return the report; None if there was nothing to
        do."""
        if self._process is None or self._stamp is None:
            return None
        began = time.monotonic()
        report = self._result()
        self.stop()
        self.seconds += time.monotonic() - began
        if report.error or report.num_failed:
            reason = report.error or f"{report.num_failed} kernels failed to compile"
            logger.warning("not all kernels were compiled ahead: %s", reason)
        else:
            _touch(self._stamp)
        logger.info(
            "compiled %d kernels ahead on %d cores in %.1f s (%d were cached), waited %.1f s",
            report.num_compiled, self.num_processes, report.seconds, report.num_cached,
            self.seconds,
        )  # fmt: skip
        return report

    def _patience(self) -> float:
        return max(0.0, MAX_WAIT_SECONDS - self.seconds)

    def stop(self) -> None:
        """Kill the process and its children if they still run."""
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
            "CUDA_VISIBLE_DEVICES": "",  # it must not use GPU memory
            "OMP_NUM_THREADS": "1",  # it must have one thread when it forks
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
    """A context with a dry start in parallel, or None if none would help; stopped at the end."""
    ahead = CompileAhead(config) if is_wanted(config) else None
    try:
        yield ahead
    finally:
        if ahead is not None:
            ahead.stop()


def is_wanted(config: Config) -> bool:
    """True if this start probably launches Triton kernels and the machine can compile ahead.

    Decided without importing torch.
    """
    return (
        config.model.device != "cpu"
        and os.environ.get(OFF) != "0"
        and any(os.path.exists(path) for path in _DRIVERS)
        and hasattr(os, "sched_getaffinity")
        and len(os.sched_getaffinity(0)) >= _MIN_CORES
        and _has_async_compilation()
    )


def _has_async_compilation() -> bool:
    """True if Triton is installed and can compile without launching (3.6 and later)."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 6)


def start_key(config: Config) -> str:
    """A name for the set of kernels that a start launches.

    It covers the models' shapes, our source code, and the versions of torch and Triton. It leaves
    out memory and batch limits, seeds and names, because the dry start assumes limits of its own.
    If that turns out wrong, a kernel is compiled at its first launch.
    """
    model, drafts, graph = config.model, config.speculative, config.graph
    parts = (
        _shapes_of(model.model, model.revision),
        (model.dtype, model.max_model_len, model.hf_overrides),
        (config.cache.block_size, config.cache.kv_cache_dtype),
        None if drafts.method == "off" else _without(drafts, "model", "watchdog", "load_format"),
        None if drafts.model is None else _shapes_of(drafts.model),
        _without(graph, "cudagraph_capture_sizes", "debug_compare_eager"),
        [os.environ.get(name, "") for name in _SWITCHES],
        _without(config.parallel),
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
    """A section's fields without those named."""
    return {
        field.name: getattr(section, field.name)
        for field in dataclasses.fields(section)
        if field.name not in names
    }


def _shapes_of(model: str, revision: str | None = None) -> Any:
    """The shapes in a local model's config.json; for a model on the hub, its name and revision."""
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_bytes())
        kept = {key: value for key, value in found.items() if key not in _NO_SHAPES}
        return json.dumps(kept, sort_keys=True)
    except (OSError, ValueError, AttributeError):
        return model, revision


def triton_cache() -> Path:
    """The folder of Triton's compiled kernels."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(home) / ".triton" / "cache"


def _touch(stamp: Path) -> None:
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    except OSError as error:
        logger.warning("cannot record in %s that kernels are compiled: %s", stamp.parent, error)
