"""Loading a head while another runs: one that does not fit, or hangs, leaves nothing behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.runner.drafters import exchange as draft_exchange
from slipstream.runner.drafters import heads as draft_heads
from slipstream.runner.engine import swap as draft_swap
from slipstream.runner.errors import RunnerError, why_unreadable
from slipstream.runner.loading import weights
from slipstream.runner.messages import ChangeSpeculator, SpeculatorChanged

from ...configs.odd_paths import odd_paths
from ...speculators.random_hidden_states import GEOMETRY
from ...speculators.tiny_engine import TinyEngine
from ..exchanging import REQUESTS, ask, content, head, told


def test_what_does_not_fit_is_refused_and_changes_nothing(
    heads: Path, tmp_path: Path, running: TinyEngine
) -> None:
    before = content(running)
    for name, changes, what in (
        ("mlp", {"intermediate_size": 64}, "projection"),
        ("vocabulary", {"draft_vocab_size": 30}, "draft_vocab_size"),
        ("taps", {"taps": (1, 4, 5)}, "aux_boundaries"),
        ("eps", {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
    ):
        error = ask(running, "try", head(tmp_path / name, 3, **changes))
        assert error is not None and what in error
    error = ask(running, "try", tmp_path / "nowhere")
    assert error is not None and "does not exist" in error
    assert ask(running, "keep") == ask(running, "revert") == "no drafter is being tried"
    for name, tensor in content(running).items():
        assert torch.equal(tensor, before[name]), name


@pytest.fixture
def made_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[torch.Tensor]]]:
    """Record the tensors of every head that is built, with the garbage collector off."""
    made: list[weakref.ref[torch.Tensor]] = []

    def fill(model: Any, *args: Any, **kwargs: Any) -> None:
        made.extend(weakref.ref(tensor) for tensor in model.buffers())
        real(model, *args, **kwargs)
        made.extend(weakref.ref(tensor) for tensor in model.buffers())

    real = draft_heads._fill
    monkeypatch.setattr(draft_heads, "_fill", fill)
    gc.disable()
    yield made
    gc.enable()


def no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def broken(*_: object) -> None:
    raise KeyError("layers")


@pytest.mark.parametrize(
    ("words", "where", "fails"),
    [
        ("its projection", None, None),
        ("not enough memory for a second drafter", (weights, "_load"), no_memory),
        ("not enough memory for a second drafter", (draft_exchange, "_spare"), no_memory),
        ("cannot be loaded (KeyError: 'layers')", (draft_exchange, "_spare"), broken),
    ],
)
def test_no_tensor_of_a_refused_head_stays_alive(
    tmp_path: Path,
    running: TinyEngine,
    monkeypatch: pytest.MonkeyPatch,
    made_tensors: list[weakref.ref[torch.Tensor]],
    words: str,
    where: tuple[Any, str] | None,
    fails: Any,
) -> None:
    """The next head, which may fit, needs the memory."""
    if where is not None:
        monkeypatch.setattr(*where, fails)
    path = head(tmp_path, 3, intermediate_size=GEOMETRY.intermediate_size + 16 * (where is None))
    error = ask(running, "load", path)
    assert error is not None and words in error
    assert len(made_tensors) > 10
    assert [tensor() for tensor in made_tensors if tensor() is not None] == []


@pytest.mark.parametrize("action", ["keep", "revert"])
def test_no_tensor_of_the_losing_head_stays_alive(
    heads: Path,
    running: TinyEngine,
    made_tensors: list[weakref.ref[torch.Tensor]],
    action: str,
) -> None:
    assert ask(running, "try", heads / "head2") is None
    assert any(tensor() is not None for tensor in made_tensors)
    assert ask(running, action) is None
    assert [tensor() for tensor in made_tensors if tensor() is not None] == []


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RunnerError("\n  Why.\nmore"), "Why"),
        (OSError("\n"), "OSError('\\n')"),
        (RuntimeError("CUDA error: it is off.\nA hint."), "CUDA error: it is off"),
        (
            ValueError("for 'x':\n    it is odd."),
            "the drafter cannot be loaded (ValueError: for 'x': it is odd)",
        ),
        (RecursionError("too deep"), "the drafter cannot be loaded (RecursionError: too deep)"),
        (KeyError(), "the drafter cannot be loaded (KeyError)"),
    ],
)
def test_errors_with_any_number_of_lines_become_a_sentence(error: Exception, sentence: str) -> None:
    assert why_unreadable(error) == sentence


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b""),
        ("config.json", b"[]"),
        ("config.json", b'{"hidden_size": "wide", "vocab_size": 61}'),
        ("config.json", b'{"hidden_size": 32, "vocab_size": 61, "transformer_layer_config": 5}'),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 64),
        ("model.safetensors", (12).to_bytes(8, "little") + b'{"fc": null}'),
    ],
)
def test_no_malformed_checkpoint_ends_the_worker(
    running: TinyEngine, heads: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    head(tmp_path, 3)
    (tmp_path / name).write_bytes(content)
    assert ask(running, "load", tmp_path)
    assert ask(running, "load", heads / "head2") is None


def test_a_head_cancelled_while_it_is_read_leaves_nothing(running: TinyEngine, heads: Path) -> None:
    running.engine.handle([ChangeSpeculator("load", str(heads / "head2"))])
    assert ask(running, "revert") is None  # the answer to the first
    while running.engine.has_work():
        for outputs in running.engine.step():
            assert outputs.speculator == SpeculatorChanged(None)
    assert ask(running, "revert") == "no drafter is being tried"
    assert ask(running, "try", heads / "head2") is None


def test_invalid_paths_are_refused_in_a_sentence_and_never_block_the_worker(
    running: TinyEngine, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_swap, "_LOAD_SECONDS", 5.0)
    for name, words in odd_paths(tmp_path).items():
        answer = told(running, "load", name).speculator
        assert answer is not None and answer.error is not None and words in answer.error
    (tmp_path / "a.gguf").touch()
    answer = told(running, "load", tmp_path / "a.gguf").speculator
    assert answer is not None and "a.gguf has no config.json" in (answer.error or "")
    assert ask(running, "load", heads / "head2") is None


def test_a_hanging_load_is_cancelled_and_the_next_one_works(
    running: TinyEngine,
    heads: Path,
    monkeypatch: pytest.MonkeyPatch,
    made_tensors: list[weakref.ref[torch.Tensor]],
) -> None:
    before, real, released = content(running), draft_exchange.load_other, threading.Event()

    def hang(*args: Any) -> Any:
        assert released.wait(20)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(draft_exchange, "load_other", hang)
        patch.setattr(draft_swap, "_LOAD_SECONDS", 0.1)
        answer = told(running, "load", heads / "head2").speculator
        assert answer == SpeculatorChanged(
            "loading the drafter took more than 0.1 s and was cancelled"
        )
    [hung] = [thread for thread in threading.enumerate() if thread.name == "load-drafter"]
    assert running.run(REQUESTS, max_tokens=5).drafted > 0
    assert hung.is_alive() and not running.engine.has_work()
    assert ask(running, "try", heads / "head2") is None
    assert ask(running, "revert") is None
    released.set()
    hung.join(20)
    assert not hung.is_alive() and not running.engine.has_work()
    for name, tensor in content(running).items():
        assert torch.equal(tensor, before[name]), name
    assert [tensor() for tensor in made_tensors if tensor() is not None] == []
