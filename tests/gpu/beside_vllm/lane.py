"""Measures one side, ours or vLLM's, on some GPUs and cores of a machine.

    python tests/gpu/beside_vllm/lane.py SIDE OUT.jsonl --gpus 0 --cores 0-15 --seconds 300
        --models FOLDER [--logs FOLDER] ITEM ... [/ ITEM ...]

SIDE is `ours` or `vllm`. An ITEM is `served` (the loads over HTTP, without drafts and with),
`verify` (`slipstream verify --url` against two of vLLM's servers) or a name in `items.OFFLINE`.
The items between two `/` start at once and are measured one after the other, each alone on its
GPU. OUT.jsonl gets a line for each figure as soon as it is known, and one for each failure.
After `--seconds` nothing new begins. FOLDER is what `tests/lab/shapes.py` has written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the tests import this file as a module
from items import (
    EAGLE_8B,
    LOADS,
    OFFLINE,
    SLIPSTREAM,
    load_command,
    offline_command,
    server_command,
)
from started import Started, all_ready, answers, cores_of

_ROUNDS, _LEAST_S = 2, 12  # runs of each load; seconds that a run needs at least
_START_S = 330  # a start that takes longer has failed
_LEAST_WAVE_S = {"ours": 40, "vllm": 150}  # what a start and a first figure take
_SERVERS = ("off", "eagle3")
_ROW = re.compile(r"^ *(\d+) +([\d,]+\.\d) .*\n", re.M)  # of the table of `bench offline`


class Lane:
    """One side on its GPUs and cores. Servers start on all cores; under load they have the first
    half of them, and the client has the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.side, self.gpus, self.out = args.side, args.gpus, Path(args.out)
        self.copies = [Path(args.copy)] if args.copy else []
        self.models, self.logs = Path(args.models), Path(args.logs)
        self.cores = cores_of(args.cores)
        half = max(1, len(self.cores) // 2)
        self.server_cores, self.client_cores = self.cores[:half], self.cores[half:] or self.cores
        self.port = 8000 + 100 * int(args.gpus[0]) + (50 if self.side == "vllm" else 0)
        self.until = time.monotonic() + args.seconds
        self.scratch = self.logs / f"{self.side}{args.gpus[0]}"
        self.scratch.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def report(self, item: str, **figures: Any) -> None:
        """Write one line, at once."""
        line = {"side": self.side, "item": item} | figures
        for path in (self.out, *self.copies):
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def start(self, name: str, command: Sequence[str], cores: Sequence[int], **env: str) -> Started:
        return Started(name, command, self.scratch / f"{name}.log", cores, self.gpus, **env)


class Item:
    """Something that is started, becomes ready, and is measured alone."""

    def __init__(self, name: str, lane: Lane) -> None:
        self.name, self.lane = name, lane
        self.processes: list[Started] = []

    def ready(self, process: Started) -> bool:
        raise NotImplementedError

    def measure(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        for process in self.processes:
            process.end()


class Decoding(Item):
    """`bench offline`, or `bench_vllm.py`, which waits until it may measure."""

    def __init__(self, name: str, lane: Lane) -> None:
        super().__init__(name, lane)
        self.gate = lane.scratch / f"gate-{name}"
        shutil.rmtree(self.gate, ignore_errors=True)
        self.figures = lane.scratch / f"{name}.json"
        command = offline_command(lane.side, OFFLINE[name], lane.models, self.figures, self.gate)
        in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self.processes = [lane.start(name, command, lane.cores, **in_process)]

    def ready(self, process: Started) -> bool:
        # Ours measures as soon as it has started, alone.
        return self.lane.side == "ours" or (self.gate / "measured.ready").exists()

    def rows(self) -> list[dict[str, Any]]:
        """The batch sizes measured so far."""
        text = self.processes[0].log.read_text(errors="replace")
        if self.lane.side == "ours":
            return [
                {"batch": int(batch), "decode_tok_s": float(speed.replace(",", ""))}
                for batch, speed in _ROW.findall(text)
            ]
        found = [
            json.loads(line) for line in text.splitlines() if line.startswith('{"name": "measured"')
        ]
        return [line for line in found if "batch" in line]

    def measure(self) -> None:
        [process] = self.processes
        if self.lane.side == "vllm":
            (self.gate / "measured.go").touch()
        seen = 0
        while True:
            runs = process.runs
            rows = self.rows()
            for row in rows[seen:]:
                self.lane.report(self.name, batch=row["batch"], value=row["decode_tok_s"])
            seen = max(seen, len(rows))
            if not runs or self.lane.left < 0:
                break
            time.sleep(0.2)
        if seen < len(OFFLINE[self.name].batches):
            self.lane.report(self.name, error=process.last_words())


class Served(Item):
    """The loads over HTTP, on two servers that start at once. While one is loaded, the other is
    paused or has ended, so that it takes nothing from the cores of the first."""

    def __init__(self, name: str, lane: Lane) -> None:
        super().__init__(name, lane)
        self.data = lane.scratch / "shared.jsonl"
        self.ports = {server: lane.port + number for number, server in enumerate(_SERVERS)}
        for server, port in self.ports.items():
            drafts = EAGLE_8B.config(lane.models, lane.side, chosen=True)
            command = server_command(
                lane.side, lane.models / "llama-8b", port, drafts if server == "eagle3" else None
            )
            self.processes.append(lane.start(server, command, lane.cores))

    def ready(self, process: Started) -> bool:
        path = "health" if self.lane.side == "vllm" else "ready"
        return answers(f"http://127.0.0.1:{self.ports[process.name]}/{path}")

    def measure(self) -> None:
        for server in self.processes:
            server.confine(self.lane.server_cores)
            server.pause()
        for server in self.processes:
            server.resume()
            for round_, load in itertools.product(range(_ROUNDS), LOADS):
                if load.server != server.name:
                    continue
                if not server.runs:
                    if not round_:
                        self.lane.report(load.name, server=load.server, error=server.last_words())
                elif self.lane.left > max(_LEAST_S, load.about_s):
                    self.run(load, round_)
            server.end()

    def run(self, load: Any, round_: int) -> None:
        """Run a load and report its figures; each round has other prompts."""
        write_shared(self.data, round_)
        output = self.lane.scratch / f"{load.server}-{round_}.json"
        output.unlink(missing_ok=True)
        url = f"http://127.0.0.1:{self.ports[load.server]}"
        clients = min(4, len(self.lane.client_cores))
        seed = 1 + LOADS.index(load) + len(LOADS) * round_
        command = load_command(load, url, seed, output, self.data, clients)
        process = self.lane.start("client", command, self.lane.client_cores)
        status = process.wait(min(self.lane.until, time.monotonic() + 100))
        process.end(0.5)
        where = {"server": load.server, "run": round_}
        if status != 0 or not output.exists():
            self.lane.report(load.name, **where, error=process.last_words())
            return
        found = json.loads(output.read_text())
        details = {key: found[key] for key in ("failed", "duration_s", "ttft_ms", "tpot_ms")}
        details |= {"client_cpu_share": found["client_cpu_share"], "drafts": found["speculation"]}
        for figure in load.figures:
            key, _, part = figure.partition(" ")
            value = (found[key] or {}).get(part) if part else found[key]
            self.lane.report(load.name, **where, figure=figure, value=value, **details)
            details = {}


class Verified(Item):
    """`slipstream verify --url` against vLLM's servers, with a draft model and without."""

    def __init__(self, name: str, lane: Lane) -> None:
        super().__init__(name, lane)
        folder = lane.scratch / "tiny"
        script = str(Path(__file__).with_name("tiny_pair.py"))
        subprocess.run([sys.executable, script, str(folder)], check=True)
        self.prompts = folder / "prompts.jsonl"
        drafts = {"model": str(folder / "draft"), "method": "draft_model"}
        self.ports = {"verify-on": lane.port + 10, "verify-off": lane.port + 11}
        for server, port in self.ports.items():
            spec = drafts | {"num_speculative_tokens": 3} if server == "verify-on" else None
            command = server_command(lane.side, folder / "target", port, spec)
            self.processes.append(lane.start(server, command, lane.cores))

    def ready(self, process: Started) -> bool:
        path = "health" if self.lane.side == "vllm" else "ready"
        return answers(f"http://127.0.0.1:{self.ports[process.name]}/{path}")

    def measure(self) -> None:
        urls = [f"http://127.0.0.1:{port}" for port in self.ports.values()]
        for server in self.processes:
            if not server.runs:
                self.lane.report(self.name, server=server.name, error=server.last_words())
                urls.remove(f"http://127.0.0.1:{self.ports[server.name]}")
        output = self.lane.scratch / "verify.json"
        command = [
            *SLIPSTREAM, "verify", *(word for url in urls for word in ("--url", url)),
            "--data", str(self.prompts), "--num-prompts", "12", "--max-tokens", "48",
            "--samples", "400", "--sample-tokens", "8", "--minutes", "0.5",
            "--output", str(output), "--html", str(output.with_suffix(".html")),
        ]  # fmt: skip
        process = self.lane.start("verify", command, self.lane.client_cores)
        status = process.wait(min(self.lane.until, time.monotonic() + 90))
        process.end(0.5)
        if not output.exists():
            self.lane.report(self.name, error=process.last_words(), status=status)
            return
        self.lane.report(self.name, status=status, servers=len(urls),
                         report=json.loads(output.read_text()))  # fmt: skip


def write_shared(file: Path, seed: int, count: int = 801) -> None:
    """Requests with the same 2,000 tokens before a chat's own, lengths as in `bench serve`'s
    dataset mixed; another seed gives another prefix."""
    draw = random.Random(seed)
    prefix = [draw.randrange(1000, 10000) for _ in range(2000)]

    def length(median: float, sigma: float) -> int:
        return max(4, min(1024, round(median * draw.lognormvariate(0.0, sigma))))

    with file.open("w") as lines:
        for _ in range(count):
            own = [draw.randrange(1000, 10000) for _ in range(length(110.0, 1.2))]
            line = {"prompt": prefix + own, "output_len": length(145.0, 0.8)}
            lines.write(json.dumps(line) + "\n")


def waves(words: Sequence[str]) -> Iterator[list[str]]:
    """The items between the words `/`."""
    for is_end, group in itertools.groupby(words, lambda word: word == "/"):
        if not is_end:
            yield list(group)


def run_wave(names: Sequence[str], lane: Lane) -> None:
    """Start these items at once and measure one after the other."""
    kinds = {"served": Served, "verify": Verified}
    began = time.monotonic()
    items: list[Item] = []
    try:
        for name in names:
            try:
                items.append(kinds.get(name, Decoding)(name, lane))
            except Exception as error:  # the others are worth measuring
                lane.report(name, error=f"{type(error).__name__}: {error}")
        owner = {id(process): item for item in items for process in item.processes}
        processes = [process for item in items for process in item.processes]
        until = min(lane.until - _LEAST_S, began + _START_S)
        found = all_ready(processes, lambda one: owner[id(one)].ready(one), until)
        lane.report("start", items=list(names), ready=[one.name for one in found],
                    seconds=round(time.monotonic() - began, 1))  # fmt: skip
        for one in found if len(items) > 1 else ():
            one.pause()  # what waits must take nothing from what is measured
        for item in items:
            if any(process in found for process in item.processes):
                for one in item.processes:
                    one.resume()
                item.measure()
            else:
                lane.report(item.name, error=item.processes[0].last_words())
            item.end()
    finally:
        for item in items:
            item.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("ours", "vllm"))
    parser.add_argument("out")
    parser.add_argument("items", nargs="+", help=f"served, verify, {', '.join(OFFLINE)}, or /")
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--cores", default="0-15")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--models", required=True)
    parser.add_argument("--copy", help="a second file with the same lines")
    parser.add_argument("--logs", default="/tmp/beside_vllm")
    args = parser.parse_args()
    lane = Lane(args)
    for names in waves(args.items):
        if lane.left < _LEAST_WAVE_S[lane.side]:
            lane.report("start", items=names, error="left out, no time")
            continue
        try:
            run_wave(names, lane)
        except Exception as error:  # the next wave does not depend on it
            lane.report("start", items=names, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
