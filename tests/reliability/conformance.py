"""Checks the server's answers against its OpenAPI document, with requests made by schemathesis.

Run `python tests/reliability/conformance.py --examples 200`. No answer may be a 5xx. The document
must describe the status, content type and body of every answer. A wrong method must get a 405 that
lists the allowed methods.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from traffic import RunningServer, at_rest  # noqa: E402

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "allow_header_conformance", "unsupported_method"),
)
FLAGS = (
    "--max-model-len",
    "512",
)  # bounds the replies, since generated requests may set no max_tokens


def run(
    server: RunningServer,
    examples: int,
    seconds: int | None = None,
    seed: int = 1,
    phases: str = "fuzzing",
) -> list[str]:
    """Run schemathesis against a server; returns the faults, one string each.

    It sends `examples` requests to each operation, and with `seconds` more until these are over.
    It runs as a command, because its warnings and plugins would disturb the process of the tests.
    """
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--phases", phases, "--seed", str(seed)]
    command += ["--max-examples", str(examples), "--no-color"]
    if seconds is not None:
        command += ["--max-time", str(seconds)]
    command += ["--continue-on-failure", "--request-timeout", "60", "--suppress-health-check=all"]
    worker = server.worker
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(done.stdout[-1500:])
    faults = [done.stdout + done.stderr] if done.returncode else []
    counts = [
        re.search(pattern, done.stdout)
        for pattern in (r"Selected: (\d+)/\1\b", r"Tested: (\d+)", r"(\d+) generated, \d+ passed")
    ]
    selected, tested, sent = (0 if found is None else int(found[1]) for found in counts)
    if not 0 < selected == tested <= sent:
        faults.append(f"schemathesis sent {sent} requests to {tested} of {selected} operations")
    if left := at_rest(server, 5):
        faults.append(f"still in use after all requests: {left}")
    if server.worker != worker:
        faults.append("the worker died")
    return faults


def main() -> int:
    """Run the long check on a server of its own; returns 0 if there were no faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=200, help="for each operation")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    server = RunningServer(*FLAGS).wait_ready()
    try:
        faults = run(
            server, options.examples, int(options.minutes * 60), options.seed, "coverage,fuzzing"
        )
    finally:
        status = server.stop()
    print("\n".join(faults) or "no faults")
    return bool(faults or status)


if __name__ == "__main__":
    sys.exit(main())
