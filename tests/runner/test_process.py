"""The worker as a process: it ends when told, when its parent dies, and it ignores signals."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from slipstream.configs.schema import Config
from slipstream.runner.process import WorkerOrders, WorkerProcess, describe_exit

FAKE = Path(__file__).parents[1] / "server"  # fake_engine.py


@pytest.fixture(autouse=True)
def fake_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))


def orders(parent_pid: int | None = None) -> WorkerOrders:
    return WorkerOrders(
        endpoint=f"ipc:///tmp/slipstream-nobody-{os.getpid()}",
        parent_pid=parent_pid or os.getpid(),
        config=Config(),
        engine="fake_engine:build",
    )


def wait_for_name(pid: int, seconds: float = 10.0) -> None:
    """Until the child has read its orders: it then has the name they give it."""
    deadline = time.monotonic() + seconds
    while psutil.Process(pid).name() != "slip-worker":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def limit_address_space(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """As `ulimit -v` would, but without making this process fail."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))


async def test_a_cancelled_kill_leaves_no_dead_process() -> None:
    worker = WorkerProcess(orders())
    killing = asyncio.create_task(worker.kill())
    await asyncio.sleep(0)  # killed, and about to wait
    killing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killing
    assert worker._process.returncode == -signal.SIGKILL and not psutil.pid_exists(worker.pid)


def test_too_small_an_address_space_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the dynamic linker complains about a library of torch."""
    limit_address_space(monkeypatch, 600 << 20)
    monkeypatch.setattr(subprocess, "Popen", None)  # not even tried
    with pytest.raises(OSError, match=r"limited to 600 MiB \(ulimit -v\), and it needs at least"):
        WorkerProcess(orders())


def test_a_crash_in_a_limited_address_space_names_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    limit_address_space(monkeypatch, 1500 << 20)
    assert describe_exit(-signal.SIGSEGV) == (
        "was killed by SIGSEGV; its address space is limited to 1500 MiB (ulimit -v)"
    )
    assert describe_exit(-signal.SIGTERM) == "was killed by SIGTERM"


async def test_signals_to_the_whole_group_leave_the_worker_alive() -> None:
    worker = WorkerProcess(orders())
    wait_for_name(worker.pid)
    assert os.getpgid(worker.pid) != os.getpgid(0)
    for sig in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, sig)
    time.sleep(0.1)
    assert psutil.Process(worker.pid).is_running()
    assert await worker.kill() == -signal.SIGKILL


async def test_stop_closes_the_input_when_the_grace_is_over() -> None:
    worker = WorkerProcess(orders())
    wait_for_name(worker.pid)
    began = time.monotonic()
    assert await worker.stop(grace=0.1) == 1
    assert time.monotonic() - began < 1.0


async def test_worker_of_another_parent_ends_at_once() -> None:
    worker = WorkerProcess(orders(parent_pid=1))
    assert await worker.stop(grace=10) == 1


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_worker_dies_with_its_parent(sig: signal.Signals) -> None:
    code = f"""
        import asyncio, os
        from slipstream.configs.schema import Config
        from slipstream.runner.process import WorkerOrders, WorkerProcess
        worker = WorkerProcess(WorkerOrders(
            endpoint="ipc:///tmp/slipstream-nobody-{os.getpid()}", parent_pid=os.getpid(),
            config=Config(), engine="fake_engine:build"))
        print(worker.pid, flush=True)
        asyncio.run(worker.wait())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for_name(pid)
    worker = psutil.Process(pid)
    parent.send_signal(sig)
    parent.wait(5)
    parent.stdout.close()
    assert worker in psutil.wait_procs([worker], timeout=2)[0]


def test_exits_are_described() -> None:
    assert describe_exit(1) == "ended with status 1"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-250) == "was killed by signal 250"


def test_child_imports_nothing_from_its_working_folder(tmp_path: Path) -> None:
    """A file there may have the name of a module; -P keeps it out."""
    (tmp_path / "zmq.py").write_text("raise SystemExit('imported from the working folder')")
    code = f"""
        import asyncio, os
        from slipstream.configs.schema import Config
        from slipstream.runner.process import WorkerOrders, WorkerProcess
        os.chdir({str(tmp_path)!r})
        worker = WorkerProcess(WorkerOrders(
            endpoint="ipc:///tmp/slipstream-nobody-{os.getpid()}", parent_pid=1, config=Config()))
        print(asyncio.run(worker.stop(10)))
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.stdout == "1\n" and "working folder" not in done.stderr, done.stderr
