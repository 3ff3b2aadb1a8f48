"""Says in plain words why few drafts are accepted.

Each function looks for one kind of fault, in the head's files or in what was measured, and returns
sentences. It claims nothing that it has not seen: a difference that may be harmless is worded so.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...drafters.acceptance import Tally
from ..report import percent
from ..statistics import fisher

LOW = 0.4  # acceptance of the first draft below which a diagnosis is made
_CLEAR = 1e-4  # p-value below which two acceptances differ
_LEAST_COVERAGE = 0.8  # of the emitted tokens, by the draft vocabulary
_FRESH = 1.5  # see `_is_fresh`


def first_acceptance(tally: Tally) -> float:
    """The share of first drafts that were accepted; 0 without drafts."""
    return tally.acceptance[0] if tally.acceptance else 0.0


def is_worse(low: Tally, high: Tally) -> bool:
    """Whether the first drafts of one are accepted clearly less often than those of the other."""
    if not low.drafted or not high.drafted or first_acceptance(low) >= first_acceptance(high):
        return False
    p = fisher(low.accepted[0], low.drafted[0], high.accepted[0], high.drafted[0])
    return p < _CLEAR and first_acceptance(low) < 0.75 * first_acceptance(high)


# --- the head's files -----------------------------------------------------------------------------


def vocabulary(head: HeadFiles, vocab_size: int, emitted: Mapping[int, int]) -> list[str]:
    """Faults of the map from the draft vocabulary to the target's. `emitted` counts the tokens
    that the model emits."""
    offsets, mask = head.all_of("d2t"), head.all_of("t2d")
    if offsets is None:
        return []
    ids = offsets.astype(np.int64) + np.arange(len(offsets))
    inside = (ids >= 0) & (ids < vocab_size)
    if not inside.all():
        absolute = offsets.astype(np.int64)
        hint = ""
        if ((absolute >= 0) & (absolute < vocab_size)).all() and len(np.unique(absolute)) == len(
            absolute
        ):
            hint = "; it seems to hold token ids where offsets are expected"
        return [
            f"Vocabulary: {int((~inside).sum())} of {len(ids)} entries of d2t point outside the "
            f"{vocab_size} tokens of the model{hint}."
        ]
    found = []
    if len(np.unique(ids)) != len(ids):
        twice = len(ids) - len(np.unique(ids))
        found.append(f"Vocabulary: d2t maps {twice} draft tokens to a token that another one has.")
    if mask is not None and not np.array_equal(np.flatnonzero(mask.astype(bool)), np.unique(ids)):
        found.append("Vocabulary: d2t and t2d of the head name different tokens.")
    covered = sum(count for token, count in emitted.items() if token in set(ids.tolist()))
    whole = sum(emitted.values())
    if whole and covered < _LEAST_COVERAGE * whole:
        found.append(
            f"Vocabulary: only {percent(covered / whole)} of the tokens that the model emits are "
            f"among the {len(ids)} of the draft vocabulary, so d2t belongs to another tokenizer or "
            "to other texts."
        )
    return found


def weights(head: HeadFiles) -> list[str]:
    """Tensors that seem never to have been trained, or hold no numbers."""
    found = []
    for name in sorted(head.tensors):
        matrix = head.read(name)
        if matrix is None or matrix.dtype.kind != "f" or matrix.size == 0:
            continue
        values = matrix.astype(np.float64)
        if not np.isfinite(values).all():
            found.append(f"Weights: {name} holds NaN or infinity.")
        elif not values.any():
            found.append(f"Weights: {name} is all zeros.")
        elif _is_fresh(values):
            found.append(
                f"Weights: {name} looks randomly initialised (its rows and columns are as even as "
                "independent random numbers), so it was not trained or not saved."
            )
    return found


def _is_fresh(values: NDArray[Any]) -> bool:
    """Whether a matrix looks like independent random numbers.

    The mean square of each row of such numbers varies by a known amount, sqrt((kurtosis - 1) / n)
    of its mean; training makes rows and columns far more unequal.
    """
    if values.ndim != 2 or min(values.shape) < 32:
        return False
    squares = values**2
    spread = squares.var() / squares.mean() ** 2  # kurtosis - 1
    for axis in (0, 1):
        means = squares.mean(axis=axis)
        expected = spread / values.shape[axis]
        if means.var() / means.mean() ** 2 > _FRESH**2 * expected:
            return False
    return True


def config(head: HeadFiles, target: Mapping[str, Any]) -> list[str]:
    """Settings in which the head and its target differ, and need not."""
    layer = head.config.get("transformer_layer_config") or head.config
    ours, theirs = _rope(layer), _rope(target)
    found = []
    for key, what in (("rope_theta", "RoPE's base"), ("rope_scaling", "RoPE's scaling")):
        is_said = "rope_parameters" in layer or key in layer
        if is_said and theirs["rope_theta"] is not None and ours[key] != theirs[key]:
            found.append(
                f"RoPE: the head's {key} is {ours[key]} and the model's is {theirs[key]}. {what} "
                "may differ, but a head that was trained with the model's must say so in its "
                "config."
            )
    return found


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's base and scaling. Transformers 5 writes both as `rope_parameters`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else {kind: rope}}


# --- what was measured ----------------------------------------------------------------------------


def context(short: Tally, long: Tally, length: int, head: HeadFiles | None) -> list[str]:
    """Whether acceptance falls with the length of the text; `length` is that of the long ones."""
    if not is_worse(long, short):
        return []
    text = (
        f"Context: after about {length} tokens, {percent(first_acceptance(long))} of the first "
        f"drafts are accepted, and {percent(first_acceptance(short))} in short texts"
    )
    trained = head and (head.config.get("transformer_layer_config") or head.config)
    most = trained.get("max_position_embeddings") if trained else None
    if isinstance(most, int) and most < length:
        text += f"; the head was made for {most} tokens"
    return [
        f"{text}. It was trained on shorter texts, or with another RoPE; the key max_model_len of "
        "--speculative-config stops drafts beyond a length."
    ]


def template(chats: Tally, plain: Tally) -> list[str]:
    """Whether the head does better without the chat template."""
    if not is_worse(chats, plain):
        return []
    return [
        f"Chat template: {percent(first_acceptance(chats))} of the first drafts are accepted after "
        f"chats and {percent(first_acceptance(plain))} after the same texts without the template, "
        "so the head was trained with another template or none."
    ]


def boundaries(present: Sequence[int], measured: Mapping[tuple[int, ...], Tally]) -> list[str]:
    """Whether other auxiliary hidden states would do better; `measured` includes the present."""
    now = measured[tuple(present)]
    best = max(measured, key=lambda key: first_acceptance(measured[key]))
    if not is_worse(now, measured[best]):
        return []
    return [
        f"Auxiliary layers: with aux_hidden_state_boundaries {list(best)}, "
        f"{percent(first_acceptance(measured[best]))} of the first drafts are accepted, and "
        f"{percent(first_acceptance(now))} with {list(present)}: the head was trained on other "
        "layers than its config says."
    ]


def other_boundaries(present: Sequence[int], num_layers: int) -> list[tuple[int, ...]]:
    """The boundaries that a config may have meant: inputs for outputs, outputs for inputs, and the
    places that EAGLE-3's authors use."""
    usual = (2, num_layers // 2, num_layers - 3)
    moved = [tuple(b + by for b in present) for by in (-1, 1)]
    found = [*moved, usual, tuple(b + 1 for b in usual)]
    valid = (b for b in found if b[0] >= 0 and b[-1] <= num_layers and list(b) == sorted(set(b)))
    return [b for b in dict.fromkeys(valid) if b != tuple(present)]


def precision(weight_formats: str) -> list[str]:
    """A quantised target, whose hidden states differ from those that the head was trained on."""
    if not weight_formats:
        return []
    return [
        f"Precision: the model's weights are quantised ({weight_formats}). A head that was trained "
        "on the hidden states of the unquantised model is accepted less often; verify it against "
        "that model, or train it on this one."
    ]


_MAX_HEADER = 100 << 20  # safetensors' own limit
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
_SAMPLE_ROWS = 512  # rows of a large matrix that are read


@dataclass(frozen=True)
class _Tensor:
    path: Path
    start: int  # byte offset in the file
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HeadFiles:
    """A head's config and tensors; names lack the prefixes of their formats."""

    config: dict[str, Any]
    tensors: dict[str, _Tensor] = field(default_factory=dict)

    def read(self, name: str, max_rows: int = _SAMPLE_ROWS) -> NDArray[Any] | None:
        """The first rows of a tensor; None if it is absent or has another number format."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.dtype not in (*_DTYPES, "BF16"):
            return None
        kind = np.dtype(_DTYPES.get(tensor.dtype, "<u2"))
        rows = min(max_rows, tensor.shape[0]) if tensor.shape else 1
        count = rows * int(np.prod(tensor.shape[1:], dtype=np.int64))
        found = np.fromfile(tensor.path, kind, count, offset=tensor.start)
        if tensor.dtype == "BF16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        return found.reshape(rows, *tensor.shape[1:])

    def all_of(self, name: str) -> NDArray[Any] | None:
        """A whole tensor; None if it is absent."""
        return self.read(name, 1 << 40)


def read_head(folder: Path) -> HeadFiles | None:
    """The files of a head; None if the folder holds no config and safetensors."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors: dict[str, _Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= _header(path)
    except (OSError, ValueError, struct.error):
        return None
    return HeadFiles(config, tensors) if tensors and isinstance(config, dict) else None


def _header(path: Path) -> dict[str, _Tensor]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER:
            raise ValueError("the header is too long")
        header = json.loads(file.read(length))
    return {
        name.removeprefix("model."): _Tensor(
            path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"])
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
