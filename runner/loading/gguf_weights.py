"""Reads GGUF files: the config from the metadata, and the weights in their stored formats, renamed
as in transformers' checkpoints. Knows nothing about models."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType
from torch import Tensor

from ...configs.model.model_config import (
    GGUF_NUMBERS,
    NotServed,
    check_gguf_architecture,
    check_weights,
    eos_token_ids,
    refused_as,
)
from ...configs.model.numbers import check_numbers
from ...kernels.cpu.formats import STORED_TYPES, StoredRows
from ..errors import ModelLoadError, first_line
from . import gguf_families as families
from .gguf_values import dequantised
from .inspection import BytesRead, Stored, ignore, touch
from .matching import WantedParts
from .quantised.shards import part_of

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_MAY_LACK = ("num_key_value_heads", "head_dim", "rope_theta")  # numbers with a default
_ORIGINAL_LENGTH = "rope.scaling.original_context_length"
_LONG_ARRAY = 1024  # arrays longer than this are vocabularies
_ROPE_DIVISORS = "rope_freqs.weight"  # the frequencies' divisors under llama3 scaling


class _Reader(GGUFReader):  # type: ignore[misc]
    """A reader that skips vocabularies instead of making an array for each of their strings."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type == GGUFValueType.ARRAY:
            item_type, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if self.byte_order == "I" and count > _LONG_ARRAY:
                end = orig_offs + 12
                if item_type == GGUFValueType.STRING:
                    for _ in range(count):
                        end += 8 + struct.unpack_from("<Q", self.data, end)[0]
                else:
                    end += count * np.dtype(self.gguf_scalar_to_np[item_type]).itemsize
                return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(item_type)]
        parts: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(
            orig_offs, raw_type
        )
        return parts


class GGUFFile:
    spare: frozenset[str] = frozenset()  # every tensor must have a slot

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path)
        except Exception as error:  # the package does not validate what it reads
            reason = first_line(error).rstrip(".") or "its header makes no sense"
            raise ModelLoadError(f"{path} is not a readable GGUF file: {reason}.") from error
        self.architecture = str(self._value("general.architecture"))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._block_names = _BLOCK_NAMES | families.block_names(self.architecture)
        self.names = [own for own, *_ in self._entries()]
        self._parts: WantedParts = {}

    def _entries(self) -> Iterator[tuple[str, str, Any, int | None]]:
        """(name in transformers, name in the file, tensor, expert) of every weight. A stack of the
        matrices of experts yields each of them; of other tensors, the expert is None."""
        has_experts = self.architecture in families.WITH_EXPERTS
        for name, stored in self._tensors.items():
            if name == _ROPE_DIVISORS or _half_of(name, families.VALUE_HALF) in self._tensors:
                continue  # read with others
            experts = families.expert_names(name, _shape(stored)) if has_experts else ()
            is_stack = False
            for expert, own in enumerate(experts):
                is_stack = True
                yield own, name, stored, expert
            if not is_stack:
                yield self._name(name), name, stored, None

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except (ValueError, LookupError, TypeError) as error:
            reason = f"its {key!r} has an invalid value"
            raise ModelLoadError(f"{self.path} cannot be served: {reason}.") from error

    def _setting(self, key: str, default: Any = None) -> Any:
        return self._value(f"{self.architecture}.{key}", default)

    @property
    def eos_token_ids(self) -> list[int]:
        """The end-of-sequence and end-of-turn ids, without duplicates. Raises ModelLoadError."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        ids = [self._value(key) for key in keys]
        with refused_as(ModelLoadError, self.path):
            return list(dict.fromkeys(eos_token_ids([i for i in ids if i is not None], "it")))

    def config(self) -> dict[str, Any]:
        """The content that the model's config.json would have.

        Raises ModelLoadError if it is invalid.
        """
        with refused_as(ModelLoadError, self.path):
            model_type = check_gguf_architecture(self.architecture)
        keys = GGUF_NUMBERS
        if self.architecture in families.WITH_EXPERTS:
            keys = GGUF_NUMBERS | families.EXPERT_NUMBERS
        numbers = {name: self._setting(key) for name, key in keys.items()}
        scaling = {
            "factor": self._setting("rope.scaling.factor"),
            "original_max_position_embeddings": self._setting(_ORIGINAL_LENGTH),
        }
        numbers["rope_parameters"] = scaling
        table = self._tensors.get("token_embd.weight")
        with refused_as(ModelLoadError, self.path):
            check_numbers(numbers)
            missing = [n for n in keys if numbers[n] is None and n not in _MAY_LACK]
            if missing:
                raise NotServed(f"its header has no {keys[missing[0]]}.")
            if table is None or len(table.shape) != 2:
                raise NotServed("its tensor token_embd.weight is missing or not a matrix.")
            check_weights(numbers, len(self._tensors), self.path.stat().st_size)
        num_heads, hidden = int(numbers["num_attention_heads"]), int(numbers["hidden_size"])
        eos = self.eos_token_ids
        config: dict[str, Any] = {
            "model_type": model_type,
            "vocab_size": int(table.shape[1]),
            "hidden_size": hidden,
            "intermediate_size": int(self._setting("feed_forward_length")),
            "num_hidden_layers": int(self._setting("block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self._setting("attention.head_count_kv", num_heads)),
            "head_dim": int(self._setting("attention.key_length", hidden // num_heads)),
            "max_position_embeddings": int(self._setting("context_length")),
            "rms_norm_eps": float(self._setting("attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "rope_parameters": self._rope(),
        }
        return self._own_settings(config)

    def _of_family(self, config: dict[str, Any]) -> dict[str, Any]:
        """`config` with the keys of a family."""
        if self.architecture == "gemma3":
            return families.gemma3_settings(config, self._setting)
        if self.architecture in families.OWN_SETTINGS:
            return families.OWN_SETTINGS[self.architecture](config, self._setting)
        if self.architecture in families.WITH_EXPERTS:
            return families.expert_settings(self.architecture, config, self._setting)
        window = families.whole(self._setting, "attention.sliding_window", 0)
        if window:
            config["sliding_window"] = window
            if self.architecture == "llama":
                config["model_type"] = "mistral"
        elif config["model_type"] == "mistral":
            config["sliding_window"] = None
        return config

    def _own_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """`config` with the keys of a family. Raises ModelLoadError for values without sense."""
        try:
            own = self._of_family(config)
            check_numbers(own)
        except NotServed as error:
            raise ModelLoadError(f"{self.path} cannot be served: {error}") from error
        except (TypeError, ValueError, OverflowError) as error:
            reason = f"its header has a wrong value: {first_line(error)}"
            raise ModelLoadError(f"{self.path} cannot be served: {reason}.") from error
        return own

    def _rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": float(self._setting("rope.freq_base", 10000.0)),
        }
        if _ROPE_DIVISORS in self._tensors:
            stored = self._tensors[_ROPE_DIVISORS]
            kind, shape = stored.tensor_type, _shape(stored)
            divisors = dequantised(stored.data, kind, shape, _ROPE_DIVISORS)
            return rope | {"rope_type": "divisors", "divisors": divisors.tolist()}
        scaling = self._setting("rope.scaling.type", "none")
        if scaling in ("linear", "yarn"):
            factor = float(self._setting("rope.scaling.factor", 1.0))
            rope |= {"rope_type": scaling, "factor": factor}
        original = self._setting(_ORIGINAL_LENGTH)
        if scaling == "yarn" and original is not None:
            rope["original_max_position_embeddings"] = int(original)
        return rope

    @property
    def is_quantised(self) -> bool:
        """Whether a matrix is not stored as floats."""
        kinds = (STORED_TYPES.get(t.tensor_type.name) for t in self._tensors.values())
        return any(kind is not None and not kind.is_float for kind in kinds)

    def sizes(self) -> dict[str, int]:
        """Bytes of every weight in its stored, quantised form, or of the part that is wanted."""
        found = {
            own: int(stored.n_bytes) // (1 if expert is None else _shape(stored)[0])
            + self._bytes_of_half(name)
            for own, name, stored, expert in self._entries()
        }
        for own, (shape, cut) in self._parts.items():
            found[own] = found[own] * cut.size // max(1, shape[cut.dim])
        return found

    def tensors(self, read: BytesRead = ignore) -> Iterator[tuple[str, Stored]]:
        """Yield (transformers' name, stored rows or fp32 tensor) for every weight.

        `read` is called with the bytes of each weight as they are read.
        """
        # llama.cpp's converter reorders the rotary pairs of these architectures only
        heads: dict[str, int] = {}
        if self.architecture in ("llama", "mistral"):
            num_heads = int(self._setting("attention.head_count"))
            num_kv_heads = int(self._setting("attention.head_count_kv", num_heads))
            heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        for own, name, stored, expert in self._entries():
            if own in self._parts and not self._parts[own][1].size:
                continue  # another rank's expert
            kind = name.split(".")[2] if name.startswith("blk.") else ""
            weight = self._part(own, _stored(stored, name, heads.get(kind), expert))
            data = stored.data if expert is None else stored.data[expert]
            touch(weight.data if isinstance(weight, StoredRows) else data, own, read)
            if kind == families.KEY_HALF:
                weight = self._with_value_half(name, weight, read)
            if kind == families.SHARED_GATE and isinstance(weight, Tensor):
                weight = weight.reshape(1, -1)
            if self.architecture == "gemma3" and isinstance(weight, Tensor) and weight.dim() == 1:
                weight = families.stored_norm(weight)
            yield own, weight

    def _value_half(self, name: str) -> Any:
        """The tensor of values beside one of keys. Raises ModelLoadError if there is none."""
        other = _half_of(name, families.KEY_HALF)
        stored = self._tensors.get(other)
        if stored is None or len(stored.shape) != 3:
            raise ModelLoadError(f"{self.path} lacks tensors: {other}.")
        return stored

    def _bytes_of_half(self, name: str) -> int:
        """The bytes of values that are read with a tensor; of most, 0."""
        is_key = _half_of(name, families.KEY_HALF)
        return int(self._value_half(name).n_bytes) if is_key else 0

    def _with_value_half(self, name: str, key: Stored, read: BytesRead) -> Tensor:
        """The projection of keys and values, in fp32."""
        stored = self._value_half(name)
        value = _stored(stored, name, None)
        touch(stored.data, self._name(name), read)
        if not (isinstance(key, Tensor) and isinstance(value, Tensor)) or key.dim() != 3:
            raise ModelLoadError(f"tensor {name} of {self.path} is not a stack of matrices.")
        if key.shape[0] != value.shape[0] or key.shape[1] != value.shape[2]:
            raise ModelLoadError(f"tensor {name} of {self.path} does not fit its values.")
        return families.joined_halves(key, value)

    def keep_parts(self, parts: WantedParts) -> None:
        """Let `tensors` read and yield only these parts of matrices, if they are whole blocks."""
        self._parts = dict(parts)

    def _part(self, name: str, weight: Stored) -> Stored:
        """The wanted part of a weight. Of other weights than matrices it is the whole."""
        wanted = self._parts.get(name)
        if wanted is None or not isinstance(weight, StoredRows) or weight.shape != wanted[0]:
            return weight
        return part_of(weight, wanted[1]) or weight

    def release(self) -> None:
        """Take the file out of this process's resident memory; a later read maps it in again."""
        pages = getattr(self._reader.data, "_mmap", None)
        if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED)

    def _name(self, name: str) -> str:
        """The name of a GGUF tensor in transformers.

        Unknown names are kept, for the loader to report.
        """
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{suffix}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk":
            whole = families.WHOLE_NAMES.get(f"{parts[2]}.{suffix}")
            if whole is not None:
                return f"model.layers.{parts[1]}.{whole}"
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in self._block_names:
            return f"model.layers.{parts[1]}.{self._block_names[parts[2]]}.{suffix}"
        return name

    def outlines(self) -> Iterator[tuple[str, Stored]]:
        """Like `tensors`, but reads only headers: plain tensors are meta tensors, and stored rows
        are not read."""
        for own, name, stored, expert in self._entries():
            if _is_matrix(stored, expert):
                yield own, _stored(stored, name, None, expert)
                continue
            shape = _shape(stored) if expert is None else _shape(stored)[1:]
            if _half_of(name, families.KEY_HALF):
                values = _shape(self._value_half(name))
                if len(shape) == 3:
                    shape = (shape[0] * (shape[2] + values[1]), shape[1])
            if f".{families.SHARED_GATE}." in name:
                shape = (1, *shape[-1:])
            yield own, torch.empty(shape, device="meta")


def _half_of(name: str, half: str) -> str:
    """The name of the other half if a tensor is this half of a projection; else empty."""
    other = families.KEY_HALF if half == families.VALUE_HALF else families.VALUE_HALF
    return name.replace(half, other) if f".{half}." in name else ""


def _shape(stored: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(stored.shape))


def _is_matrix(stored: Any, expert: int | None = None) -> bool:
    """Whether the tensor, or the matrix of an expert in it, stays as it is in the file."""
    kind, dimensions = stored.tensor_type.name, 2 if expert is None else 3
    return kind in STORED_TYPES and kind != "F32" and len(stored.shape) == dimensions


def _stored(stored: Any, name: str, heads: int | None, expert: int | None = None) -> Stored:
    """A matrix of a known format as it is in the file; any other tensor in fp32.

    If `heads` is given, the rows are those of this many heads, with interleaved rotary pairs. If
    an `expert` is given, it is that one's matrix in a stack.
    """
    shape, kind = _shape(stored), STORED_TYPES.get(stored.tensor_type.name)
    data = stored.data
    if expert is not None:
        shape, data = shape[1:], data.reshape(shape[0], -1)[expert].reshape(shape[1], -1)
    if kind is None or not _is_matrix(stored, expert):
        values = dequantised(data, stored.tensor_type, shape, name)
        return values if heads is None else values[torch.from_numpy(_pair_order(shape[0], heads))]
    rows = data.reshape(shape[0], -1).view(np.uint8)
    order = None if heads is None else _pair_order(shape[0], heads)
    return StoredRows(kind, rows, shape[1], order)


def _pair_order(num_rows: int, num_heads: int) -> np.ndarray[Any, Any]:
    """The row order that undoes the interleaving of rotary pairs: rows (2i, 2i + 1) of a head
    become (i, i + D / 2)."""
    order = np.arange(num_rows).reshape(num_heads, -1, 2).transpose(0, 2, 1)
    return order.reshape(num_rows)
