"""The command line: fast help without heavy imports, errors of one sentence, Ctrl-C."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.server.commands import build_parser, command_names, main

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "zmq", "numpy", "tokenizers", "pydantic")


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_is_quick_and_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from slipstream.server.commands import main
try:
    main({arguments!r})
except SystemExit as end:
    assert end.code == 0
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
"""
    seconds = []
    for _ in range(3):  # the first run fills the bytecode cache
        began = cpu_seconds_of_children()  # unlike elapsed time, not affected by other processes
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        seconds.append(cpu_seconds_of_children() - began)
        assert done.returncode == 0, done.stderr
        assert "slipstream" in done.stdout
    assert min(seconds) < 1.0


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("name", command_names())
def test_every_command_has_help_and_a_summary(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"slipstream {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert name in capsys.readouterr().out


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "9"], "unknown flag --prot (did you mean --port?)"),
        (["serve", "--prot=9"], "unknown flag --prot (did you mean --port?)"),
        (["serve", "a/b", "extra"], "error: unexpected argument 'extra'\n"),
        (["serve", "a/b", "prot"], "unexpected argument 'prot' (did you mean --port?)"),
        (["bench", "serve", "--bakend"], "unknown flag --bakend (did you mean --backend?)"),
        (["serve", "--max-model"], "unknown flag --max-model"),
        (["serve", "--port"], "--port"),
        (["srve"], "srve"),
        (["serve", "--port", "high"], "--port must be an integer, not 'high'"),
        (["serve", "--ssl-keyfile", __file__, "--ssl-certfile", __file__], "--ssl-certfile /"),
        (["serve", "--api-key", ""], "error: --api-key is empty; leave it out"),
        (["serve", "--otlp-traces-endpoint", "foo"], "--otlp-traces-endpoint 'foo': must be a URL"),
        (["serve", "/no/such/model"], "/no/such/model"),
        (["serve", "smollm"], "a preset (smollm2-135m) (did you mean smollm2-135m?)"),
        (["serve", "-sc", '{"method":"eagle3","model":"/no/such"}'], "drafter '/no/such' does not"),
        (["serve", "--reasoning-parser", "foo"], "--reasoning-parser must be one of auto, none, "),
    ],
)
def test_wrong_command_lines_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    shown = capsys.readouterr().err
    assert status == 2
    assert words in shown
    assert shown.startswith("slipstream") and len(shown.splitlines()) == 1


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.server.commands.serve.run", interrupted)
    assert main(["serve"]) == 130


INTERRUPTED = {
    "while the command line is read": (
        "commands.build_parser = lambda only: interrupt() or time.sleep(20)",
        130,
    ),
    "while threads end their work": (
        "commands._run = lambda argv: Thread(target=late).start() or 0",
        130,
    ),
    "while Python ends": ("atexit.register(interrupt)\ncommands._run = lambda argv: 0", 0),
}


@pytest.mark.parametrize("moment", INTERRUPTED)
def test_ctrl_c_prints_nothing_at_any_moment(moment: str) -> None:
    prepare, status = INTERRUPTED[moment]
    code = f"""
import atexit, os, signal, sys, time
from threading import Thread
from slipstream.server import commands

# what a shell runs in the background ignores Ctrl-C, and so do its children
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def late():
    time.sleep(0.3)
    interrupt()
    time.sleep(20)

{prepare}
sys.argv = ["slipstream", "serve"]
sys.exit(commands.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_environment_reaches_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_PORT", "70000")
    assert main(["serve"]) == 2
    assert "--port 70000: must be at most 65535" in capsys.readouterr().err


def test_one_command_is_parsed_without_importing_the_others() -> None:
    parser = build_parser("serve")
    assert parser.parse_args(["serve", "--port", "1"]).command == "serve"


def test_module_runs_as_the_console_script() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slipstream.server.commands", "--version"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0 and done.stdout.startswith("slipstream ")
