"""Loads another checkpoint in the shape of the running draft head, and swaps their weights.

Weights are copied from tensor to tensor, because graphs hold the addresses of the running head's.
Everything that can fail happens before the first tensor changes, so a head is never a mixture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RunnerError, first_line
from ..models.formats.packed import Packed
from ..models.layers import Linear
from .heads import find_checkpoint, load_head, outline

_CONSTANTS = ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
_HEAD = (
    *("aux_boundaries", "draft_vocab_size", "target_hidden_size"),
    *("norm_before_residual", "norm_before_fc", "fc_bias", "para_norm"),
)


class Exchange:
    """Swaps the weights of the running head and another one, any number of times.

    The constructor raises RunnerError if they do not match, or torch.OutOfMemoryError; `swap`
    allocates nothing.
    """

    def __init__(self, ours: nn.Module, other: nn.Module) -> None:
        _same_projections(ours, other)
        parts, their_parts = _linears(ours), _linears(other)
        # Packed weights exist only on a CPU, without graphs. They include the bias.
        packed = {
            name
            for name, part in parts.items()
            if part._packed is not None or their_parts[name]._packed is not None
        }
        self._packed = [(parts[name], their_parts[name]) for name in sorted(packed)]
        tensors, theirs = _tensors(ours, packed), _tensors(other, packed)
        for name in sorted(tensors.keys() | theirs.keys()):
            _same(f"tensor {name}", _kind(tensors.get(name)), _kind(theirs.get(name)))
        pairs = [(tensor, theirs[name]) for name, tensor in tensors.items()]
        self._trios = [(a, b, kept) for (a, b), kept in zip(pairs, _spare(pairs), strict=True)]

    def swap(self) -> None:
        """Swap the weights of the two heads; the running head's tensors keep their addresses."""
        for a, b, kept in self._trios:
            kept.copy_(a)
            a.copy_(b)
            b.copy_(kept)
        for part, other in self._packed:
            for name in ("_packed", "weight", "bias"):
                ours, theirs = getattr(part, name), getattr(other, name)
                setattr(part, name, theirs)
                setattr(other, name, ours)


def load_other(speculator: Any, model: str) -> Exchange:
    """Load the head `model`, to be swapped with the running one, which stays unchanged.

    Raises RunnerError if their shapes differ or memory does not suffice.
    """
    try:
        exchange = _load(speculator, model)
        if (device := speculator.host.device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # raises what failed asynchronously
    except torch.OutOfMemoryError as error:
        raise RunnerError(
            "not enough memory for a second drafter beside the running one, which is unchanged: "
            + first_line(error).rstrip(".")
        ) from None
    return exchange


def _load(speculator: Any, model: str) -> Exchange:
    ours = speculator.model
    ranks = ours.format.ranks  # which divide the running head, and this one likewise
    size = 1 if ranks is None else ranks.size
    config = replace(speculator.config, model=model, draft_tensor_parallel_size=size)
    method, host = config.method, speculator.host
    found = find_checkpoint(method, config, host.target_model.config, host.target_resolved)
    _same_shape(ours, outline(method, config, host, found))  # before any memory is allocated
    layer_id = ours.attention_layers()[0].layer_id
    other = load_head(method, config, host, layer_id, found)
    _finite(other)
    return Exchange(ours, other)


def _same_shape(ours: Any, other: Any) -> None:
    for name in _HEAD:
        _same(name, getattr(ours.head, name), getattr(other.head, name))
    for name in _CONSTANTS:
        _same(name, getattr(ours.config, name), getattr(other.config, name))
    _same_projections(ours, other)
    parts = set(_linears(ours))  # compared above; packed ones have no tensors
    tensors, theirs = _tensors(ours, parts), _tensors(other, parts)
    for name in sorted(tensors.keys() | theirs.keys()):
        shapes = [_shape(found.get(name)) for found in (tensors, theirs)]
        _same(f"tensor {name}", *shapes)


def _same_projections(ours: nn.Module, other: nn.Module) -> None:
    parts, theirs = _linears(ours), _linears(other)
    for name in sorted(parts.keys() | theirs.keys()):
        _same(f"projection {name}", _size(parts.get(name)), _size(theirs.get(name)))
    formats, their_formats = _formats(ours), _formats(other)
    for name in sorted(formats.keys() | their_formats.keys()):
        _same(f"format of {name}", formats.get(name), their_formats.get(name))


def _finite(head: nn.Module) -> None:
    """Raise RunnerError if a weight is not finite: NaN in the KV cache would outlast a trial."""
    found = dict(head.named_buffers())
    for name, part in _linears(head).items():
        if part.weight is None and part.packed is None:
            # Packed for a CPU: any product shows a number that is not finite. That of this rank's
            # part alone, since the ranks load in threads, beside the collectives of steps.
            found[f"{name}.weight"] = Linear.forward(part, torch.zeros(1, part.in_features))
    for name, tensor in found.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise RunnerError(f"the drafter's {name} contains NaN or infinity")


def _same(what: str, ours: object, other: object) -> None:
    if ours != other:
        its, the_running = ("missing" if x is None else x for x in (other, ours))
        raise RunnerError(
            f"the drafter does not have the shape of the running one: its {what} is {its}, the "
            f"running one's is {the_running}"
        )


def _linears(head: nn.Module) -> dict[str, Linear]:
    return {name: part for name, part in head.named_modules() if isinstance(part, Linear)}


def _size(part: Linear | None) -> tuple[int, int] | None:
    return None if part is None else (part.out_features, part.in_features)


def _formats(head: nn.Module) -> dict[str, str]:
    """The formats of quantised matrices by the names of their modules."""
    return {name: part.format for name, part in head.named_modules() if isinstance(part, Packed)}


def _tensors(head: nn.Module, packed: set[str]) -> dict[str, Tensor]:
    """All tensors except those of packed projections."""
    found = head.named_buffers()
    return {name: tensor for name, tensor in found if name.rpartition(".")[0] not in packed}


def _shape(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else list(tensor.shape)


def _kind(tensor: Tensor | None) -> str | None:
    """Shape, type and device, which must match for a plain copy."""
    if tensor is None:
        return None
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} of {dtype} on {tensor.device}"


def _spare(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A scratch tensor for each pair, in its shape; all share the same memory."""
    if not pairs:
        return []
    largest = max((a for a, _ in pairs), key=lambda tensor: tensor.nbytes)
    memory = torch.empty(largest.nbytes, dtype=torch.uint8, device=largest.device)
    return [memory[: a.nbytes].view(a.dtype).view(a.shape) for a, _ in pairs]
