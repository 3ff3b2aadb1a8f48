"""The functions of the native library, by `ctypes`; see native/slipstream_cpu.cpp."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p

MAX_PARTS = 4  # weights side by side in one matrix


class PartFields(Structure):
    """`Part` of native/product.h."""

    _fields_ = [("format", c_int64), ("rows", c_int64), ("panels", c_void_p)]


class MatrixFields(Structure):
    """`Matrix` of native/product.h."""

    _fields_ = [
        ("columns", c_int64),
        ("rows", c_int64),
        ("num_parts", c_int64),
        ("bias", c_void_p),
        ("parts", PartFields * MAX_PARTS),
    ]


class LayerFields(Structure):
    """`Layer` of native/layer.h."""

    _fields_ = [
        *((name, MatrixFields) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "mlp_norm")),
        *((name, c_void_p) for name in ("attention_out_norm", "mlp_out_norm", "q_norm", "k_norm")),
        *((name, c_double) for name in ("eps", "scale", "softcap")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "window")),
        ("activation", c_int64),
        ("cos_sin", c_void_p),
        *((name, c_int64) for name in ("rotary_dim", "max_position")),
        *((name, c_void_p) for name in ("keys", "values")),
        ("group", c_int64),
    ]


class GroupFields(Structure):
    """`Group` of native/layer.h."""

    _fields_ = [
        ("block_table", c_void_p),
        ("slots", c_void_p),
        ("table_stride", c_int64),
        ("block_size", c_int64),
    ]


class StepFields(Structure):
    """`Step` of native/layer.h."""

    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_requests", "hidden")),
        *((name, c_void_p) for name in ("positions", "query_start_loc", "seq_lens")),
        *((name, c_void_p) for name in ("groups", "input")),
    ]


_FUNCTIONS = {
    "slipstream_panel_bytes": (c_int64, [c_int64, c_int64]),
    "slipstream_pack": (None, [c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "slipstream_rows": (None, [c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p]),
    "slipstream_linear": (None, [POINTER(MatrixFields), c_void_p, c_int64, c_void_p, c_int64]),
    "slipstream_layers": (None, [c_void_p, c_int64, POINTER(StepFields), c_void_p, c_int64]),
}


def bind(path: str) -> ctypes.CDLL:
    """The library at `path` with its functions' types."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def library() -> ctypes.CDLL | None:
    """The native library of this machine, or None if there is none and none can be built."""
    from .build import library_path

    path = library_path()
    return None if path is None else bind(str(path))
