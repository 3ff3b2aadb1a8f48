"""`slipstream verify MODEL` as a user runs it: its own engine, a table, JSON, HTML, a status."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from .conftest import environment, slipstream

LETTERS = "abcdefghijklmnopqrstuvwx"  # one is one token
SIZES = ("--num-prompts", "4", "--max-tokens", "24", "--sample-tokens", "4", "--dtype", "float32")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny target with a tokenizer, and a head that was trained for it."""
    from ..speculators.tiny_engine import stated
    from ..speculators.verify.trained_head import Trained

    found = Trained(tmp_path_factory.mktemp("pair"))
    stated(found.target)
    words = {letter: place for place, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(found.target / "tokenizer.json"))
    ending = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": LETTERS[17]}  # a rare one
    (found.target / "tokenizer_config.json").write_text(json.dumps(ending))
    return found


def verify(pair: Any, head: Path, folder: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the report's JSON, and all that was printed."""
    from ..speculators.verify.trained_head import prompts

    data, output = folder / "prompts.jsonl", folder / "report.json"
    texts = [" ".join(LETTERS[i] for i in ids) for ids in prompts(24, 0)]
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    method = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    method |= {"draft_sampling": "greedy"}
    command = [slipstream(), "verify", str(pair.target), "-sc", json.dumps(method), *SIZES, *flags]
    done = subprocess.run(
        [*command, "--data", str(data), "--output", str(output)],
        env=environment(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    assert output.exists(), shown
    return done.returncode, json.loads(output.read_text()), shown


@pytest.mark.slow
def test_a_sound_pair_passes_and_the_report_has_all_groups(pair: Any, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    flags = ("--samples", "6", "--html", str(page))
    status, report, shown = verify(pair, pair.head("sound"), tmp_path, *flags)
    assert status == 0 and report["passes"], shown
    groups = {check["group"] for check in report["checks"]}
    assert groups == {
        "Log probabilities", "Greedy text", "Drafts", "Sampled text", "Text", "Diagnosis",
    }, shown  # fmt: skip
    names = {check["name"]: check for check in report["checks"]}
    for name in ("temperature 1", "top-k", "top-p", "penalties", "seed", "grammar is obeyed"):
        assert names[name]["status"] in ("pass", "note"), names[name]
    assert names["acceptance, greedy"]["figures"]["acceptance"][0] > 0.4
    assert "speed-up, one at a time" in names and "min-p" in shown
    assert "greedy text:" in shown and "sampled text:" in shown  # progress
    assert "No check failed." in shown and "<svg" in page.read_text()


@pytest.mark.slow
def test_wrong_auxiliary_layers_are_found_by_starting_other_engines(
    pair: Any, tmp_path: Path
) -> None:
    head = pair.head("wrong", eagle_aux_hidden_state_layer_ids=[0, 1, 8])
    status, report, shown = verify(pair, head, tmp_path, "--samples", "0", "--num-prompts", "16")
    found = {check["name"]: check["summary"] for check in report["checks"]}
    assert status == 0 and "[2, 4, 5]" in found["Auxiliary layers"], shown
