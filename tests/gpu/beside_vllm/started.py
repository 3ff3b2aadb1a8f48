"""Processes of a lane: started in a session of their own, bound to cores and GPUs, ended with all
that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip", "PYTHONUNBUFFERED": "1",
    # NVLink multicast can put the GPUs of a shared host out of service.
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}  # fmt: skip


def cores_of(text: str) -> list[int]:
    """The cores of a list such as 0-7,16,17, in its order."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def core_sets(count: int, system: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """This machine's cores in `count` sets of equal size; the two threads of one physical core
    stay together, also where such a set is halved."""
    physical: dict[tuple[int, ...], None] = {}
    for core in sorted(os.sched_getaffinity(0)):
        file = system / f"cpu{core}/topology/thread_siblings_list"
        physical[tuple(cores_of(file.read_text().strip())) if file.exists() else (core,)] = None
    every = [core for siblings in physical for core in siblings]
    size = len(every) // count
    return [every[size * number : size * (number + 1)] for number in range(count)]


def named(cores: Sequence[int]) -> str:
    """A list of cores as taskset takes it."""
    return ",".join(map(str, cores))


class Started:
    """A process with a log, on some cores and GPUs."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        cores: Sequence[int],
        gpus: str,
        **env: str,
    ) -> None:
        self.name, self.log, self.began = name, log, time.monotonic()
        own = os.environ | _QUIET | {"CUDA_VISIBLE_DEVICES": gpus} | env
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["taskset", "-c", named(cores), *command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=own, start_new_session=True,
            )  # fmt: skip

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def last_words(self) -> str:
        """What a failed process said last: its last line with an error, or its last line."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "error:" in line]
        return (told or lines or ["nothing was written"])[-1].strip()[-300:]

    def wait(self, until: float) -> int | None:
        """Its exit status; None if it still runs at `until`, of `time.monotonic`."""
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def confine(self, cores: Sequence[int]) -> None:
        """Bind all its threads and those of its children to other cores."""
        try:
            own = psutil.Process(self.process.pid)
            every = [own, *own.children(recursive=True)]
            threads = [thread.id for one in every for thread in one.threads()]
        except psutil.NoSuchProcess:
            return
        for thread in threads:
            try:
                os.sched_setaffinity(thread, cores)
            except OSError:
                pass  # it has ended

    def pause(self) -> None:
        """Stop it and all its children until `resume`, so that they take nothing from others."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._send(signal.SIGCONT)

    def _send(self, sign: signal.Signals) -> list[psutil.Process]:
        """Send a signal to it and to all its children, which are returned with it."""
        try:
            own = psutil.Process(self.process.pid)
            every = [*own.children(recursive=True), own]
        except psutil.NoSuchProcess:
            return []
        for one in every:
            try:
                one.send_signal(sign)
            except psutil.NoSuchProcess:
                pass
        return every

    def end(self, grace: float = 6.0) -> None:
        """End it and all its children; returns when the memory of their GPUs is free."""
        every = self._send(signal.SIGCONT)  # one that is paused would not see the next signal
        for sign, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            for one in every:
                try:
                    one.send_signal(sign)
                except psutil.NoSuchProcess:
                    pass
            _, every = psutil.wait_procs(every, seconds)
        try:  # those whose parent had ended before
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait(10)


def answers(url: str) -> bool:
    """Whether a GET of `url` is answered with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def all_ready(
    processes: Sequence[Started],
    ready: Callable[[Started], bool],
    until: float,
    patience: float = 180.0,
) -> list[Started]:
    """Wait until each process is ready or has failed, and end those that are neither in time.

    That is at `until`, or `patience` seconds after the first was ready. Returns those that are."""
    waiting, found = list(processes), []
    while waiting and time.monotonic() < until:
        for one in list(waiting):
            if ready(one):
                if not found:
                    until = min(until, time.monotonic() + patience)
                found.append(one)
                waiting.remove(one)
            elif not one.runs:
                waiting.remove(one)
        time.sleep(0.2)
    for one in waiting:
        one.end(1.0)
    return [one for one in processes if one in found]
