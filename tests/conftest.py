"""Fixtures and hooks that all tests share.

Without a GPU, Triton kernels run in Triton's interpreter. Triton reads TRITON_INTERPRET when it is
imported, so this file sets the variable before any test module imports Triton.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest

HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


with contextlib.suppress(ImportError):  # a GPU machine may do without it
    from hypothesis import settings

    # `make pytest ARGS="--hypothesis-profile long"` tries many more examples, other ones each time.
    settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, database=None)
    settings.register_profile("long", max_examples=1000, deadline=None)
    settings.load_profile("ci")

# Folders and files of `tests` that each process of `make test` runs; the last one has all others. A
# file or folder in another's folder goes to its own process. The first process waits for servers
# until the kernels' tests, and the second for workers and clients for a third of its time, so that
# three keep two cores busy. The second imports no model of transformers, and the last forks all
# workers that are forks (`forked_workers`), because both take seconds to import.
PARTS: tuple[tuple[str, ...], ...] = (
    ("end_to_end", "reliability", "kernels", "configs", "deployment", "runner/step"),
    ("server", "runner/grammars", "runner/loading"),
    (
        "server/chat_templates/test_transformers_equality.py",
        "server/engine/test_sharing_engines.py",
        "server/hosts/test_sharing_nodes.py",
    ),
)
PROCESSES = len(PARTS)
# So much do the others give way to the servers, whose tests measure times.
NICENESS = 3


def pytest_configure(config: pytest.Config) -> None:
    """Collect no garbage while tests are imported, because what they make stays, and let the
    processes that start no shared servers give way to the one that does."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # until `freeze_imports`, which xdist's own process never reaches
    part = part_of_this_process(config)
    if part:
        os.nice(NICENESS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With three processes, let each run what it has collected: see `pytest_ignore_collect`."""
    if config.getoption("dist") != "loadgroup" or config.getoption("numprocesses") != PROCESSES:
        return None
    from xdist.scheduler import EachScheduling

    class Parts(EachScheduling):
        def schedule(self) -> None:
            # xdist expects the same tests in all and would show a progress of up to 300 %
            session = config.pluginmanager.get_plugin("dsession")._session
            session.testscollected = sum(map(len, self.node2collection.values()))
            super().schedule()

    return Parts(config, log)


def part_of_this_process(config: pytest.Config) -> int | None:
    """The place of this process in `PARTS`, None unless there are as many processes as parts."""
    workers = getattr(config, "workerinput", None)
    if workers is None or workers["workercount"] != PROCESSES:
        return None
    return int(workers["workerid"].removeprefix("gw"))


@functools.cache
def parts_of(name: str) -> set[int]:
    """The parts that have tests in this file or folder, a path relative to `tests`."""
    places = {place: index for index, part in enumerate(PARTS) for place in part}
    around = [place for place in places if f"{name}/".startswith(f"{place}/")]
    own = places[max(around, key=len)] if around else len(PARTS) - 1
    return {own} | {part for place, part in places.items() if place.startswith(f"{name}/")}


def is_for_another(path: Path, config: pytest.Config) -> bool:
    """Whether only other processes run tests of this file or folder."""
    part = part_of_this_process(config)
    name = path.relative_to(Path(__file__).parent).as_posix()
    return part is not None and name != "." and part not in parts_of(name)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Split the tests between the processes, since collecting all in each would take long."""
    return True if is_for_another(collection_path, config) else None  # None: pytest decides


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other processes run."""
    if hasattr(config, "workerinput"):
        # pytest asks `pytest_ignore_collect` for no path of its command line
        items[:] = [item for item in items if not is_for_another(item.path, config)]


def pytest_collection_finish(session: pytest.Session) -> None:
    if part_of_this_process(session.config) is not None:
        report_once(session.config)
    if "httpx" in sys.modules:
        share_tls_context()
    if "torch" in sys.modules and not HAS_GPU:
        seed_the_cpu_alone()
        let_torchs_logs_propagate()
    freeze_imports()


def report_once(config: pytest.Config) -> None:
    """Send one message about a test that passes, where nobody asked for times or details.

    Its start, its end and a setup and a teardown that pass are four more, which take two processes
    longer than many a test."""
    options = ("durations", "xmlpath", "verbose")
    if any(config.getoption(option, None) for option in options):
        return
    plugins = config.pluginmanager.get_plugins()
    (worker,) = (plugin for plugin in plugins if type(plugin).__name__ == "WorkerInteractor")
    send = worker.sendevent

    def send_needed(name: str, **event: Any) -> None:
        if name == "testreport":
            if event["data"]["outcome"] == "passed" and event["data"]["when"] != "call":
                return
        elif name in ("logstart", "logfinish"):
            return
        send(name, **event)

    worker.sendevent = send_needed


def share_tls_context() -> None:
    """Let httpx's clients share one TLS context, of which no test changes anything.

    Each would read the system's certificates anew, even to speak plain HTTP. That takes longer than
    most requests, and the tests make a client for nearly every request."""
    transports = importlib.import_module("httpx._transports.default")
    transports.__dict__["create_ssl_context"] = functools.cache(transports.create_ssl_context)


def seed_the_cpu_alone() -> None:
    """Let `torch.manual_seed` seed the CPU's generator, without a word to other devices.

    For each of three kinds of devices that are absent it would keep the seed and the printed stack
    of its caller, which takes longer than most tests."""
    torch = sys.modules["torch"]
    torch.random._manual_seed_impl = torch.default_generator.manual_seed


def let_torchs_logs_propagate() -> None:
    """Let pytest catch the logs of torch at the root, where it catches all others.

    It adds its handlers six times for each test to the root and to each logger that does not
    propagate, and torch has about forty of these."""
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def freeze_imports() -> None:
    """Exclude imported objects from garbage collection, since graph captures collect often, and
    let new ones cause it as seldom as in a worker."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="module")
def frozen_again() -> Iterator[None]:
    """Repeats `freeze_imports` after a module whose tests call `gc.unfreeze`.

    A check before each test would be slow, because `gc.get_freeze_count` visits every object.
    """
    yield
    freeze_imports()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch from the test's name.

    Each test draws the same random numbers in every run. Set SLIPSTREAM_TEST_SEED to any text to
    draw others.
    """
    if (torch := sys.modules.get("torch")) is not None:
        text = item.nodeid + os.environ.get("SLIPSTREAM_TEST_SEED", "")
        torch.manual_seed(crc32(text.encode()))


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """Remove the log handlers that a test installed: their stream is closed when the test ends."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(before):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def triton_interpreter() -> None:
    """Skip the test unless Triton's interpreter is in use; see `interpreter.patch`."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("tests/gpu runs the compiled kernels")
    from . import interpreter

    interpreter.patch()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Any]:
    """Forks the workers of the tests that use `forked_workers`."""
    from .forked_workers import Nursery

    with Nursery() as found:
        yield found


@pytest.fixture
def forked_workers(nursery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers that this process starts be forks, which spares each of them its imports."""
    from slipstream.runner import process

    popen = SimpleNamespace(**{**vars(process.subprocess), "Popen": nursery.start})
    monkeypatch.setattr(process, "subprocess", popen)


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """The default server, one per session; at the end, Ctrl-C must let an open stream finish."""
    from .end_to_end.running_server import RunningServer

    running = RunningServer()
    # a shell's background jobs and their children ignore Ctrl-C, so SIGTERM replaces it there
    ignores_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        yield running.wait_ready()
        status = running.drain(signal.SIGTERM if ignores_sigint else signal.SIGINT)
        assert status in (0, 130), "".join(running.log)
    finally:
        assert running.stop() in (0, 130), "".join(running.log)


@pytest.fixture(scope="session")
def hardened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A second server, one per session: it has a tiny model, short timeouts, a small KV cache and a
    fixed draft length. At the end, SIGTERM must let an open stream finish and leave no process
    behind."""
    from .end_to_end.running_server import RunningServer
    from .reliability import slow_clients, tiny_model

    drafts = '{"method":"ngram","num_speculative_tokens":3}'
    model = tiny_model.save(tmp_path_factory.mktemp("tiny"))
    flags = (*tiny_model.FLAGS, *tiny_model.SMALL_CACHE, *slow_clients.FLAGS)
    running = RunningServer(str(model), *flags, "-sc", drafts)
    try:
        yield running.wait_ready()
        children = running.descendants()
        assert children
        status = running.drain(signal.SIGTERM, max_tokens=200)
        assert status in (0, -signal.SIGTERM, 128 + signal.SIGTERM), "".join(running.log)
        assert not [each for each in children if running.is_alive(each)]
    finally:
        assert running.stop() in (0, -signal.SIGTERM, 128 + signal.SIGTERM), "".join(running.log)
