"""A dry start without a GPU compiles all kernels; later steps launch no others."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.kernels.compile_log import CompileLog, watch_compilations

from ..cases import some

FOLDER = Path(__file__).parents[1] / "lab"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
DRAFTER = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 128,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}  # fmt: skip


def run_script(script: str, *arguments: str, **environment: str) -> str:
    """Run a script of `tests/lab`, which must succeed, and return its standard output."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        env=inherited | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def save_configs(folder: Path) -> list[str]:
    """Write the configs of the target and the drafter; returns their folders."""
    folders = [folder / name for name in ("target", "drafter")]
    for path, config in zip(folders, (TARGET, DRAFTER), strict=True):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
    return list(map(str, folders))


@needs_triton
@pytest.mark.parametrize(
    ("case", "fewest"),
    some([("alone", 80), ("drafting", 120), ("eager", 100)], [("drafting", 120)]),
)
def test_no_step_after_the_start_launches_a_kernel_that_the_start_did_not(
    case: str, fewest: int, tmp_path: Path
) -> None:
    """This also holds for a server with other limits than the dry start assumes."""
    output = run_script("dry_launches.py", *save_configs(tmp_path), case)
    found = json.loads(output.splitlines()[-1])
    assert found["later"] == found["early"] == []
    assert found["started"] >= fewest


@needs_triton
def test_no_graph_of_a_cycle_launches_torchs_operations_but_products(tmp_path: Path) -> None:
    """Torch's operations do not start early, so each one among dependent launches costs a wait."""
    output = run_script("cycle_launches.py", *save_configs(tmp_path))
    launches: dict[str, list[str]] = json.loads(output.splitlines()[-1])
    roles = (
        "target FULL",
        "token selection",
        "draft rejection",
        "draft prefill",
        "draft decodes x 2",
    )
    for role in roles:
        found = [names for label, names in launches.items() if label.startswith(role)]
        assert found and all(len(names) > 5 for names in found), role
        of_torch = {name for names in found for name in names if name.startswith("aten")}
        assert of_torch <= {"aten::linear"}, role


@needs_triton
def test_what_was_launched_before_does_not_change_a_kernels_name_on_disk() -> None:
    """Triton's hash of a kernel covers a function's constants only if that was hashed before."""
    first, last = map(json.loads, run_script("hash_kernels.py").splitlines())
    assert len(first) > 80
    assert first == last


@needs_triton
def test_launches_are_compiled_elsewhere_once_each_and_then_found(tmp_path: Path) -> None:
    found = json.loads(run_script("compile_few.py", TRITON_CACHE_DIR=str(tmp_path)))
    assert found["forks"] == {"kinds": 2, "failed": 0, "compiled": 2}
    assert found["again"] == found["threads"] == {"kinds": 2, "failed": 0, "compiled": 0}
    # A failing job affects only its own future; a job that compiled nothing returns False.
    assert found["jobs"] == ["RuntimeError", "NoneType", "RuntimeError", "False"]


def test_a_kernel_compiled_while_serving_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Times:
        total = 1_500_000

    class Source:
        name = "_some_kernel"

    log = CompileLog()
    for hit in (False, True):
        log(src=Source(), metadata=None, metadata_group=None, times=Times(), cache_hit=hit)
    assert (log.compiled, log.num_cached, log.seconds) == (["_some_kernel"], 1, 1.5)
    assert not caplog.records
    assert log.line() == (
        "kernels: 1 compiled by the worker itself in 1.5 s, 1 from Triton's cache"
    )
    log.is_ready = True
    log(src=Source(), metadata=None, metadata_group=None, times=Times(), cache_hit=False)
    assert "_some_kernel was compiled while serving" in caplog.text
    assert watch_compilations() is watch_compilations()
