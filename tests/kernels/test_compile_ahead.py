"""Without a GPU: every kernel compiles for an H100 (sm_90a) and fits its shared memory, a dry start
compiles all kernels, and later steps launch no others."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.kernels.compile_log import CompileLog, watch_compilations

from ..cases import some
from ..lab.shapes import EAGLE3_8B, LLAMA_8B

LAB = Path(__file__).parents[1] / "lab"
KERNELS = LAB.parents[1] / "kernels"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
TARGET = LLAMA_8B | {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DRAFTER = EAGLE3_8B | TARGET | {
    "architectures": EAGLE3_8B["architectures"], "num_hidden_layers": 1, "draft_vocab_size": 128,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "num_attention_heads": 16,  # so that its attention is not the target's
}  # fmt: skip


DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 512,
    "hidden_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 16, "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
    "sliding_window": 128, "o_groups": 4, "o_lora_rank": 32, "index_n_heads": 16,
    "index_head_dim": 64, "index_topk": 64, "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 1, "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "vocab_size": 512,
    "hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": 64, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 4096,
    "index_n_heads": 16, "index_head_dim": 64, "index_topk": 64, "eos_token_id": 2,
    "dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {name: value for name, value in DEEPSEEK_V32.items() if "index" not in name} | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_shared_experts": 1,
}  # fmt: skip
GLM = TARGET | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5,
    "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip


CASES = (
    *(("alone", 70), ("drafting", 100), ("eager", 90), ("fp8", 100), ("ranks", 90)),
    ("invariant", 60),
)
LAUNCH = r"^\s*(?:self\._launch\(|kernel = )?(_\w+_kernel)(?:\[|, |\.run\()"
Script = Callable[..., str]


@pytest.fixture(scope="module")
def run_script() -> Iterator[Script]:
    """Run a script of `tests/lab`, which must succeed, and return its standard output.

    All scripts are forks of one process that has imported torch and Triton."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    server = subprocess.Popen(
        [sys.executable, str(LAB / "fork_server.py")],
        env=inherited | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    requests, answers = server.stdin, server.stdout

    def run(script: str, *arguments: str, **environment: str) -> str:
        request = {"script": script, "arguments": arguments, "environment": environment}
        print(json.dumps(request), file=requests, flush=True)
        found = json.loads(answers.readline())
        assert found["code"] == 0, found["errors"][-2000:]
        return str(found["output"])

    with server:
        yield run
        requests.close()
    assert server.returncode == 0


def save_configs(folder: Path) -> list[str]:
    """Write the configs of the target and the drafter; returns their folders."""
    folders = [folder / name for name in ("target", "drafter")]
    for path, config in zip(folders, (TARGET, DRAFTER), strict=True):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
    return list(map(str, folders))


@needs_triton
@pytest.mark.parametrize(
    ("case", "extent", "fewest"),
    some(
        [(case, extent, fewest) for case, fewest in CASES for extent in ("all", "few")],
        kept=[("drafting", "few", 100)],
    ),
)
def test_no_step_after_the_start_launches_a_kernel_that_the_start_did_not(
    case: str, extent: str, fewest: int, run_script: Script, tmp_path: Path
) -> None:
    """This also holds for a server with other limits than the dry start assumes."""
    output = run_script("dry_launches.py", *save_configs(tmp_path), case, extent)
    found = json.loads(output.splitlines()[-1])
    assert found["later"] == found["early"] == []
    assert found["started"] >= fewest


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("config", [DEEPSEEK_V4, DEEPSEEK_V32], ids=lambda it: it["model_type"])
def test_sparse_attention_launches_no_kernel_after_the_start(
    config: dict[str, Any], run_script: Script, tmp_path: Path
) -> None:
    """DeepSeek V3.2 and V4 with their modules: groups of other block sizes, and own kernels."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = run_script("dry_launches.py", str(tmp_path), "", "mtp", "few")
    found = json.loads(output.splitlines()[-1])
    assert found["later"] == [] and found["started"] >= 100
    # How experts are computed depends on more than the powers of two that a dry start tries.
    assert not [
        kind for kind in found["early"] if "_list_kernel" not in kind and "_tile" not in kind
    ]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("case", ["engines", "exchange"])
def test_engines_that_share_experts_launch_no_kernel_after_the_start(
    case: str, run_script: Script, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V32))
    output = run_script("dry_launches.py", str(tmp_path), "", case, "few")
    found = json.loads(output.splitlines()[-1])
    assert found["later"] == found["early"] == [] and found["started"] >= 80


@needs_triton
@pytest.mark.slow
def test_no_kernel_that_is_chosen_for_ggufs_types_spills(run_script: Script) -> None:
    run_script("compile_packed.py", "chosen", SLIPSTREAM_PDL="1")


@needs_triton
@pytest.mark.parametrize("forms", [(), pytest.param(("all",), marks=pytest.mark.slow)], ids=str)
def test_every_kernel_compiles_for_sm_90a(forms: tuple[str, ...], run_script: Script) -> None:
    compiled: set[str] = set()
    more = ("more",) if forms else ()
    scripts = (
        ("compile_sm90.py", *forms),
        ("compile_linear.py", *more),
        ("compile_packed.py", *more),
    )
    for script, *arguments in scripts:
        output = run_script(script, *arguments, SLIPSTREAM_PDL="1")  # each with dependent launch
        compiled |= {line.split()[0] for line in output.splitlines()}
    launched = {
        name
        for path in KERNELS.glob("**/triton/*.py")
        for name in re.findall(LAUNCH, path.read_text(), re.MULTILINE)
    }
    assert len(launched) >= 10
    assert compiled == launched


@needs_triton
def test_no_graph_of_a_cycle_launches_torchs_operations_but_products(
    run_script: Script, tmp_path: Path
) -> None:
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


# Torch's operations that are left in the target's graph of a step of 1 or 4 rows without drafts.
# The shared expert's product is torch's here, so it adds nothing itself.
LEFT = {"aten::linear", "aten::add"}
EXPERTS: list[tuple[dict[str, Any], str, set[str]]] = [
    *((DEEPSEEK_V3, rows, LEFT | {"aten::cat"}) for rows in ("1", "4")),
    *((GLM, rows, LEFT) for rows in ("1", "4")),
]


@needs_triton
@pytest.mark.parametrize(("config", "rows", "left"), some(EXPERTS, EXPERTS[:1]))
def test_layers_with_experts_launch_no_operations_of_torch(
    config: dict[str, Any], rows: str, left: set[str], run_script: Script, tmp_path: Path
) -> None:
    """Neither the router nor the sum of routed and shared experts; products may be torch's."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = run_script("cycle_launches.py", str(tmp_path), "off", rows)
    launches: dict[str, list[str]] = json.loads(output.splitlines()[-1])
    (names,) = (names for label, names in launches.items() if label.startswith("target FULL"))
    assert names.count("_select_kernel") == 1 and len(names) > 20
    assert {name for name in names if name.startswith("aten")} == left


@needs_triton
def test_what_was_launched_before_does_not_change_a_kernels_name_on_disk(
    run_script: Script,
) -> None:
    """Triton's hash of a kernel covers a function's constants only if that was hashed before."""
    first, last = map(json.loads, run_script("hash_kernels.py").splitlines())
    assert len(first) > 80
    assert first == last


@needs_triton
def test_launches_are_compiled_elsewhere_once_each_and_then_found(
    run_script: Script, tmp_path: Path
) -> None:
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
