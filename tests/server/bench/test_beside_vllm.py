"""The scripts of tests/gpu/beside_vllm, with a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "tests/gpu/beside_vllm"
sys.path.insert(0, str(SCRIPTS))
import blank_kernels  # noqa: E402
import items  # noqa: E402
import lane  # noqa: E402
import started  # noqa: E402
import table  # noqa: E402

from slipstream.server.bench import offline  # noqa: E402
from slipstream.server.commands import build_parser  # noqa: E402

sys.path.remove(str(SCRIPTS))
# An engine whose steps take no time, and a server of one word a token.
STAND_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace as Some
def SamplingParams(**given): return Some(**given)
class LLM:
    def __init__(self, **given):
        assert given["load_format"] == "dummy", given
        self.model_config = Some(get_vocab_size=lambda: 1000)
        print("started with", json.dumps(given), flush=True)
    def generate(self, prompts, params, use_tqdm):
        import time; time.sleep(0.001 * params.max_tokens)
        ids = [0] * params.max_tokens
        return [Some(outputs=[Some(token_ids=ids)]) for _ in prompts]
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *given): pass
    def answer(self, data, kind="application/json"):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer(b'{"data": [{"id": "m"}]}')
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        words, given = asked["max_tokens"], len(asked["prompt"])
        usage = dict(prompt_tokens=given, completion_tokens=words, total_tokens=given + words)
        token = 'data: {"choices": [{"index": 0, "text": " w1"}]}\\n\\n'
        end = json.dumps(dict(choices=[], usage=usage))
        text = token * words + f"data: {end}\\n\\ndata: [DONE]\\n\\n"
        self.answer(text.encode(), "text/event-stream")
class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 1024
def main():
    port = int(sys.argv[sys.argv.index("--port") + 1])
    Server(("127.0.0.1", port), Handler).serve_forever()
"""


def stand_in(folder: Path) -> Path:
    """A package named vllm in `folder`; returns what to put on PYTHONPATH."""
    package = folder / "site" / "vllm"
    (package / "entrypoints" / "cli").mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    for inner in ("entrypoints", "entrypoints/cli"):
        (package / inner / "__init__.py").touch()
    (package / "entrypoints/cli/main.py").write_text("from vllm import main\nmain()\n")
    return folder / "site"


def run_lane(folder: Path, *words: str) -> list[dict[str, object]]:
    """The lines that `lane.py` writes of vLLM's side."""
    out, models = folder / "out.jsonl", folder / "models"
    for name in ("llama-8b", "llama-8b-fp8"):
        (models / name).mkdir(parents=True)
    path = os.pathsep.join([str(ROOT / ".src"), str(stand_in(folder))])
    subprocess.run(
        [
            sys.executable, str(SCRIPTS / "lane.py"), "vllm", str(out), *words, "--cores", "0-1",
            "--models", str(models), "--logs", str(folder / "logs"), "--gpus", "7",
        ],
        env=os.environ | {"PYTHONPATH": path}, check=True, timeout=280, capture_output=True,
    )  # fmt: skip
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_engines_start_at_once_and_are_measured_in_turn(tmp_path: Path) -> None:
    lines = run_lane(tmp_path, "unknown", "llama-8b", "llama-8b-fp8+eagle3", "--seconds", "200")
    assert lines.pop(0) == {"side": "vllm", "item": "unknown", "error": "KeyError: 'unknown'"}
    assert lines[0]["ready"] == ["llama-8b", "llama-8b-fp8+eagle3"]
    assert [(line["item"], line["batch"]) for line in lines[1:]] == [
        (name, batch) for name in lines[0]["ready"] for batch in items.ALL
    ]
    assert all(float(str(line["value"])) > 0 for line in lines[1:])
    log = (tmp_path / "logs/vllm7/llama-8b-fp8+eagle3.log").read_text()
    given = json.loads(log.partition("started with ")[2].splitlines()[0])
    assert given["speculative_config"]["rejection_sample_method"] == "synthetic"
    assert given["compilation_config"]["cudagraph_capture_sizes"] == [
        *(1, 4, 8, 32, 64, 128, 256, 512)
    ]


@pytest.mark.slow
def test_each_load_is_run_twice_over_http(tmp_path: Path) -> None:
    lines = run_lane(tmp_path, "served", "--seconds", "250")
    assert not [line for line in lines if "error" in line], lines
    seen = {(line["item"], line["server"], line["run"]) for line in lines[1:]}
    first = {(load.name, load.server, 0) for load in items.LOADS}
    assert first <= seen
    assert all(line["value"] is not None for line in lines[1:])


def test_the_threads_of_a_physical_core_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for core in range(8):
        folder = tmp_path / f"cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert started.core_sets(2, tmp_path) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert started.core_sets(2, tmp_path / "unknown") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert started.cores_of(started.named([0, 4, 1, 5])) == [0, 4, 1, 5]
    assert started.cores_of("0-3,7") == [0, 1, 2, 3, 7]


def test_a_paused_process_takes_no_time_and_can_be_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "while True: pass"]
    one = started.Started("busy", command, tmp_path / "log", [0], "7")
    own = started.psutil.Process(one.process.pid)
    stopped = started.psutil.STATUS_STOPPED

    def becomes(is_stopped: bool) -> bool:  # a signal reaches a running process at its next tick
        until = time.monotonic() + 10
        while (own.status() == stopped) != is_stopped and time.monotonic() < until:
            time.sleep(0.01)
        return (own.status() == stopped) == is_stopped

    one.pause()
    assert becomes(True)
    one.resume()
    assert becomes(False)
    one.pause()
    began = time.monotonic()
    one.end(grace=60.0)
    assert not one.runs
    assert time.monotonic() - began < 50  # SIGTERM ended it, which a paused process does not see


def test_commands_have_flags_that_exist(tmp_path: Path) -> None:
    parser, skipped = build_parser(), len(items.SLIPSTREAM)
    commands = [
        items.offline_command("ours", item, tmp_path, tmp_path / "f", tmp_path)
        for item in items.OFFLINE.values()
    ]
    commands += [
        items.load_command(load, "http://a", 1, tmp_path / "f", tmp_path, 4) for load in items.LOADS
    ]
    drafts = items.EAGLE_8B.config(tmp_path, "ours", chosen=True)
    commands += [items.server_command("ours", tmp_path, 1, one) for one in (None, drafts)]
    for command in commands:
        parser.parse_args(command[skipped:])  # exits where a flag is unknown


def test_rows_of_our_table_are_read() -> None:
    row = {"batch": 32, "decode_tok_s": 12345.6, "per_user_tok_s": 385.8, "step_ms": 2.5}
    row |= {"tokens_per_step": 1.0, "spread": 0.01, "roofline": None}
    log = f"m: start-up 3.2 s\n{offline.heading(4e12)}\n{offline.line(row)}\n"
    assert lane._ROW.findall(log) == [("32", "12,345.6")]


def fat_binary(*images: tuple[int, int, bytes]) -> bytes:
    """A library's part with kernel images: kind (1 PTX, 2 machine code), architecture, bytes."""
    body = b""
    for kind, arch, data in images:
        head = struct.pack("<HHIQIIHHI", kind, 0, 64, len(data), 0, 0, 0, 0, arch)
        body += head.ljust(64, b"\0") + data
    return struct.pack("<4sHHQ", b"\x50\xed\x55\xba", 1, 16, len(body)) + body


def test_only_kernels_of_other_gpus_are_blanked() -> None:
    library = b"code" + fat_binary((2, 80, b"old!"), (1, 90, b"ptx!"), (2, 90, b"ours"))
    library += fat_binary((2, 120, b"new!"), (1, 80, b"text")) + b"\x50\xed\x55\xbaend"
    second = len(b"code" + fat_binary((2, 80, b"old!"), (1, 90, b"ptx!"), (2, 90, b"ours")))
    library += fat_binary((2, 100, b"long kernel!"), (2, 120, b"tiny"))
    kept = blank_kernels.blanked(library)
    assert len(kept) == len(library)
    # As a library that was built for one GPU alone, and nothing has moved.
    assert kept.startswith(b"code" + fat_binary((2, 90, b"ours")))
    assert kept[second:].startswith(fat_binary((1, 80, b"text")))
    blank = fat_binary((2, 100, bytes(12)), (2, 120, bytes(4)))
    assert kept.endswith(b"\x50\xed\x55\xbaend" + blank)
    assert not [word for word in (b"old!", b"ptx!", b"new!") if word in kept]


def test_the_table_compares_means() -> None:
    served = {"item": "lognormal, 4 x 64", "server": "off"}
    waits = {"item": "open loop, 56 requests/s", "server": "off", "figure": "ttft_ms p99"}
    lines = [
        {"side": "ours", **served, "figure": "output_throughput", "value": 13.0},
        {"side": "ours", **served, "figure": "output_throughput", "value": 11.0},
        {"side": "vllm", **served, "figure": "output_throughput", "value": 10.0},
        {"side": "ours", **waits, "value": 50.0},
        {"side": "vllm", **waits, "value": 40.0},
        {"side": "ours", "item": "gpt-oss-20b", "batch": 8, "value": 5.0},
        {"side": "vllm", "item": "gpt-oss-20b", "error": "out of memory"},
    ]
    shown = table.table(lines).splitlines()
    assert shown[1].split()[-4:] == ["12.0", "10.0", "1.200", "1.15"]
    assert shown[2].split()[-5:] == ["50.0", "40.0", "0.800", "1.00", "*"]
    assert shown[3].split() == ["gpt-oss-20b", "8", "5.0"]
    assert shown[4] == "failed, vllm, gpt-oss-20b: out of memory"
