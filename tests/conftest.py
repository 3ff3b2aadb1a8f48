"""Before any test module imports triton: without a GPU, kernels run in Triton's interpreter.

The interpreter is chosen when triton is imported, so this cannot wait for the kernels' own tests.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


SERVERS = ("tests/end_to_end/", "tests/reliability/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How `--dist loadgroup` shares tests: a file's go to one process, and so do all that start
    real servers. (xdist 3.8 marks groups in a way that pytest 9 ignores.)"""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "servers" if nodeid.startswith(SERVERS) else nodeid.partition("::")[0]

    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where tests are shared, the group that takes longest comes first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(SERVERS))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test, and what is made for it first, draws its own numbers, the same in every run.

    SLIPSTREAM_TEST_SEED=1, or any other text, gives others. Garbage collections, of which captures
    of graphs do many, walk what the tests make and not all that was imported.
    """
    if not gc.get_freeze_count():  # at first, and after a test that undid it
        gc.collect()
        gc.freeze()
    if (torch := sys.modules.get("torch")) is not None:
        text = item.nodeid + os.environ.get("SLIPSTREAM_TEST_SEED", "")
        torch.manual_seed(crc32(text.encode()))


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """What a command sets up in this process writes to a stream that ends with the test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(before):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def triton_interpreter() -> None:
    """Skips where the interpreter is not in use; mends it for numpy 2.4, which takes only 0-d
    arrays for integers, where triton 3.6 hands over a loop's bounds as arrays of one element."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("tests/gpu runs the compiled kernels")
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """The default server; one per test session. It ends by Ctrl-C, with a stream open."""
    from .end_to_end.running_server import RunningServer

    running = RunningServer()
    # what a shell runs in the background ignores Ctrl-C, and so do its children
    deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        yield running.wait_ready()
        status = running.drain(signal.SIGTERM if deaf else signal.SIGINT)
        assert status in (0, 130), "".join(running.log)
    finally:
        assert running.stop() in (0, 130), "".join(running.log)
