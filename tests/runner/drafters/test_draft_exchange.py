"""The weights of two heads are swapped completely or not at all, whatever fails."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.runner.drafters import heads as draft_heads
from slipstream.runner.drafters.exchange import Exchange, load_other
from slipstream.runner.errors import RunnerError
from slipstream.runner.models.formats.weight_format import WeightFormat, packing_available
from slipstream.runner.models.layers import Linear

from ...speculators.tiny_engine import VOCAB, TinyEngine
from ..exchanging import content, engine, head, model


class NoMemory(TorchDispatchMode):
    """Fails if an operation creates a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func._schema.is_mutable:
            raise torch.OutOfMemoryError(f"no memory for {func}")
        return func(*args, **(kwargs or {}))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_without_memory_nothing_has_changed(
    running: TinyEngine, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculator = running.engine._runner.speculator
    other = engine(heads, 2)
    room, old, new = 0, content(running), content(other)
    other.close()
    exchange, told, real = None, [], torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal room
        if room == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB.")
        room -= 1
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    while exchange is None:
        room = len(told)
        try:
            exchange = load_other(speculator, str(heads / "head2"))
        except RunnerError as error:
            told.append(str(error))
        assert same(content(running), old)
    assert len(told) > 10 and set(told) == {
        "not enough memory for a second drafter beside the running one, which is unchanged: "
        "CUDA out of memory"
    }
    for wanted in (new, old, new):
        with torch.inference_mode(), NoMemory():
            exchange.swap()
        assert same(content(running), wanted)


def test_a_head_that_shares_what_the_running_one_has_is_refused(
    heads: Path, tmp_path: Path
) -> None:
    own = head(tmp_path / "head1", 1, draft_vocab_size=VOCAB)
    shared = head(tmp_path / "shared", 2, draft_vocab_size=VOCAB)
    tensors = load_file(shared / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, shared / "model.safetensors")
    (tmp_path / "target").symlink_to(heads / "target")
    made = engine(tmp_path)
    speculator = made.engine._runner.speculator
    assert load_other(speculator, str(own)) is not None
    with pytest.raises(RunnerError, match=r"its projection lm_head is missing, .* is \(61, 32\)"):
        load_other(speculator, str(shared))
    assert model(made).lm_head is not None
    made.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": 64}, "its projection layers.0.mlp.down_proj is "),
        ({"draft_vocab_size": 30}, "its draft_vocab_size is 30"),
        (["lm_head.weight"], "lacks tensors: lm_head.weight"),
        (["midlayer.mlp.up_proj.weight"], "tensor midlayer.mlp.up_proj.weight of .* has shape"),
        (["odd"], "has unexpected tensors: odd"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_it_takes_memory(
    running: TinyEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any] | list[str],
    words: str,
) -> None:
    path = head(tmp_path, 3, **(change if isinstance(change, dict) else {}))
    if isinstance(change, list):
        tensors, name = load_file(path / "model.safetensors"), change[0]
        if tensors.pop(name, None) is None or name.startswith("midlayer"):
            tensors[name] = torch.zeros(3)
        save_file(tensors, path / "model.safetensors")
    filled, real = set(), draft_heads._fill

    def fill(made: Any, *args: Any, **kwargs: Any) -> None:
        filled.update(tensor.device.type for tensor in made.buffers())
        real(made, *args, **kwargs)

    monkeypatch.setattr(draft_heads, "_fill", fill)
    with pytest.raises(RunnerError, match=words):
        load_other(running.engine._runner.speculator, str(path))
    assert filled == {"meta"}


class Layer(nn.Module):
    """A projection with a bias, as a checkpoint fills it; packed unless too large for that."""

    def __init__(self, seed: int, pack: bool, scale: float = 1.0) -> None:
        super().__init__()
        fmt = WeightFormat(torch.device("cpu"), torch.float32, pack_fp16=pack)
        self.proj = Linear(16, 8, fmt, bias=True)
        generator = torch.Generator().manual_seed(seed)
        for _, slot in self.proj.checkpoint_slots("", "proj"):
            slot.load(scale * torch.randn(slot.shape, generator=generator))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e6])  # weights that fp16 cannot hold are not packed
def test_a_bias_comes_with_its_weights(pack: bool, scale: float) -> None:
    if pack and not packing_available():
        pytest.skip("this CPU has no packed linear layer")
    ours, other = Layer(1, pack), Layer(2, pack, scale)
    x = torch.randn(3, 16)
    outputs = [layer.proj(x) for layer in (ours, other)]
    exchange = Exchange(ours, other)
    exchange.swap()
    assert torch.equal(ours.proj(x), outputs[1]) and torch.equal(other.proj(x), outputs[0])
    exchange.swap()
    assert torch.equal(ours.proj(x), outputs[0]) and torch.equal(other.proj(x), outputs[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(
    running: TinyEngine, heads: Path, tmp_path: Path, value: float
) -> None:
    """NaN in the KV cache would outlast the trial, and running requests would get no more
    drafts."""
    shutil.copytree(heads / "head2", tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    weights, old = load_file(file), content(running)
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name][3, 5] = value
    save_file(weights, file)
    speculator = running.engine._runner.speculator
    with pytest.raises(RunnerError, match="down_proj.weight contains NaN or infinity"):
        load_other(speculator, str(tmp_path / "head"))
    assert same(content(running), old)


@pytest.mark.parametrize("change", [{"dtype": torch.float64}, {"size": 9}])
def test_what_a_copy_would_have_to_convert_is_refused(change: dict[str, Any]) -> None:
    def norm(size: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
        module = nn.Module()
        module.register_buffer("weight", torch.ones(size, dtype=dtype))
        return module

    with pytest.raises(RunnerError, match="its tensor weight is"):
        Exchange(norm(), norm(**change))
