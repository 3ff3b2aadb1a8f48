"""Reads what a config says about quantised weights: the method, the modules, the number formats.

The weight files decide which modules are quantised; a config adds what a file cannot say, such as
the meaning of zero points, and how activations were rounded when the weights were made. Formats
that are not supported are refused here, before weights are downloaded.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .model_config import NotServed, is_block_size, short

METHODS = (*("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "modelopt", "mxfp4"),)
MODELOPT_FILE = "hf_quant_config.json"  # where ModelOpt says what others say in config.json
GROUPS = (16, 32, 64, 128)  # input features that share a scale, unless all of them do
_FORMATS = (  # of compressed-tensors
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
_MAX_PATTERN = 1000  # characters of a name or pattern in a config


@dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are stored.

    `kind`, `group`, `row_group` and `activations` are those of `kernels.quant.packed`.
    """

    kind: str
    group: int | None = None  # columns that share a scale; None = all
    row_group: int = 1
    symmetric: bool = True  # no zero points
    activations: str = "16bit"


@dataclass(frozen=True)
class Quantisation:
    """What a config says about quantised weights."""

    method: str  # one of METHODS
    # (names, patterns or classes of modules, their scheme); the first match counts
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...] = ()  # names or patterns of modules that are not quantised
    block: tuple[int, int] | None = None  # rows and columns of a block of "fp8"
    zero_less_one: bool = False  # GPTQ's first format stores zero points minus 1
    act_order: bool = False  # columns are grouped in another order than they are stored in

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module by its name in the checkpoint; None if it is not quantised."""
        if module.rpartition(".")[2] in ("lm_head", "embed_tokens"):
            return None
        if any(_ignores(pattern, module) for pattern in self.ignored):
            return None
        for targets, scheme in self.schemes:
            if any(_targets(pattern, module) for pattern in targets):
                return scheme
        return None


def check_quantisation(config: Mapping[str, Any]) -> None:
    """Raise NotServed if the weights are quantised in a format that is not supported."""
    parse_quantisation(config)


def parse_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """What a config.json says about quantised weights; None if it says nothing.

    Raises NotServed for formats that are not supported and for malformed settings.
    """
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    settings = config.get("quantization_config") or config.get("compression_config") or nested
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise NotServed(f"its quantization_config must be an object, not {short(settings)}.")
    method = settings.get("quant_method")
    if method is None and "quant_algo" in settings:
        method = "modelopt"
    if not isinstance(method, str) or method not in METHODS:
        raise NotServed(
            f"the quantisation {short(method)} is not supported; supported: "
            f"{', '.join(METHODS)} in safetensors, and those of GGUF files."
        )
    if _has_plain_weights(method, settings):
        return None
    return _PARSERS[method](settings)


def _has_plain_weights(method: str, settings: Mapping[str, Any]) -> bool:
    """Whether the settings are about the KV cache alone."""
    if method == "compressed-tensors":
        return bool(settings.get("kv_cache_scheme")) and not settings.get("config_groups")
    without = "quant_algo" in settings and settings["quant_algo"] is None
    return method == "modelopt" and without and bool(settings.get("kv_cache_quant_algo"))


def from_modelopt_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` that a hf_quant_config.json stands for."""
    settings = content.get("quantization")
    if not isinstance(settings, Mapping):
        raise NotServed(f"its {MODELOPT_FILE} has no object named quantization.")
    return {"quant_method": "modelopt", **settings}


def _fp8(settings: Mapping[str, Any]) -> Quantisation:
    block = settings.get("weight_block_size")
    if block is not None and not is_block_size(block):
        raise NotServed(f"weight_block_size must be two positive integers, not {short(block)}.")
    static = _one_of(settings, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    ignored = _names(settings, "modules_to_not_convert")
    if block is None:
        scheme = Scheme("fp8", activations="fp8-static" if static else "fp8-token")
        return Quantisation("fp8", _everywhere(scheme), ignored)
    rows, columns = block
    scheme = Scheme("fp8", columns, rows if rows == 128 else 1, activations="fp8-block")
    return Quantisation("fp8", _everywhere(scheme), ignored, (rows, columns))


def _fbgemm_fp8(settings: Mapping[str, Any]) -> Quantisation:
    scheme = Scheme("fp8", activations="fp8-token")
    ignored = _names(settings, "modules_to_not_convert")
    return Quantisation("fbgemm_fp8", _everywhere(scheme), ignored)


def _awq(settings: Mapping[str, Any]) -> Quantisation:
    _one_of(settings, "version", ("gemm", "GEMM"), "gemm")
    _one_of(settings, "bits", (4,), 4)
    symmetric = not _flag(settings, "zero_point", True)
    scheme = Scheme("int4", _group(settings.get("group_size", 128)), symmetric=symmetric)
    return Quantisation("awq", _everywhere(scheme), _names(settings, "modules_to_not_convert"))


def _gptq(settings: Mapping[str, Any]) -> Quantisation:
    bits = _one_of(settings, "bits", (4, 8), None)
    made = _one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    group = _group(settings.get("group_size", 128))
    scheme = Scheme(f"int{bits}", group, symmetric=_flag(settings, "sym", True))
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise NotServed(f"dynamic must be an object, not {short(dynamic)}.")
    # Patterns with a minus are not quantised. Others change bits or groups, which the files show.
    names = [f"re:{name[2:]}" for name in dynamic if str(name).startswith("-:")]
    ignored = _checked_names("dynamic", names)
    return Quantisation(
        "gptq",
        _everywhere(scheme),
        ignored,
        zero_less_one=made == "gptq",
        act_order=_flag(settings, "desc_act", False),
    )


def _modelopt(settings: Mapping[str, Any]) -> Quantisation:
    if settings.get("config_groups") and "quant_algo" not in settings:
        return _compressed(settings, "modelopt")
    algorithm = _one_of(settings, "quant_algo", _ALGORITHMS, None)
    ignored = _names(settings, "exclude_modules") + _names(settings, "ignore")
    scheme = {
        "FP8": Scheme("fp8", activations="fp8-static"),
        "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", activations="fp8-token"),
        "FP8_PB_WO": Scheme("fp8", 128, 128),
        "NVFP4": Scheme("fp4", 16),
    }.get(str(algorithm))
    block = (128, 128) if algorithm == "FP8_PB_WO" else None
    schemes = () if scheme is None else _everywhere(scheme)
    return Quantisation("modelopt", schemes, ignored, block)


def _mxfp4(settings: Mapping[str, Any]) -> Quantisation:
    ignored = _names(settings, "modules_to_not_convert")
    return Quantisation("mxfp4", _everywhere(Scheme("fp4", 32)), ignored)


def _compressed(settings: Mapping[str, Any], method: str = "compressed-tensors") -> Quantisation:
    for name, harmless in (("sparsity_config", ("dense",)), ("transform_config", ())):
        value = settings.get(name)
        format = value.get("format") if isinstance(value, Mapping) else None
        if value and format not in harmless:
            raise NotServed(f"compressed-tensors with a {name} is not supported.")
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise NotServed(f"config_groups must be an object of objects, not {short(groups)}.")
    general, schemes, act_order = settings.get("format"), [], False
    for group in groups.values():
        _check_format(group.get("format") or general)
        weights = group.get("weights")
        if weights is None:  # only activations, such as those of attention
            continue
        if not isinstance(weights, Mapping):
            raise NotServed(f"weights must be an object, not {short(weights)}.")
        act_order |= weights.get("actorder") == "group"
        scheme = _compressed_scheme(weights, group.get("input_activations"))
        schemes.append((_names(group, "targets"), scheme))
    _check_format(general)
    blocks = [s.group for _, s in schemes if s.row_group > 1 and s.group]
    return Quantisation(
        method,
        tuple(schemes),
        _names(settings, "ignore"),
        (128, blocks[0]) if blocks else None,
        act_order=act_order,
    )


def _check_format(format: object) -> None:
    if format is not None and format not in _FORMATS:
        raise NotServed(
            f"the format {short(format)} of compressed-tensors is not supported; supported: "
            f"{', '.join(_FORMATS)}."
        )


def _compressed_scheme(weights: Mapping[str, Any], inputs: object) -> Scheme:
    numbers = _one_of(weights, "type", ("int", "float"), "int")
    bits = _one_of(weights, "num_bits", (4, 8), None)
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = _one_of(weights, "strategy", strategies, "group")
    kind = {("int", 4): "int4", ("int", 8): "int8", ("float", 4): "fp4"}.get(
        (str(numbers), int(str(bits))), "fp8"
    )
    symmetric, group, row_group = _flag(weights, "symmetric", True), None, 1
    if strategy in ("group", "tensor_group"):
        group = _group(weights.get("group_size"))
    elif strategy == "block":
        block = weights.get("block_structure")
        if not is_block_size(block):
            raise NotServed(f"block_structure must be two positive integers, not {short(block)}.")
        assert isinstance(block, list)
        if block[0] != 128:
            raise NotServed(f"block_structure must have 128 rows, not {short(block)}.")
        row_group, group = 128, _group(block[1])
    if kind == "fp4" and group not in (16, 32):
        raise NotServed(f"group_size of 4-bit floats must be 16 or 32, not {short(group)}.")
    return Scheme(kind, group, row_group, symmetric, _compressed_activations(inputs))


def _compressed_activations(inputs: object) -> str:
    """How activations were rounded; formats of less than 8 bits count as none."""
    if not inputs:
        return "16bit"
    if not isinstance(inputs, Mapping):
        raise NotServed(f"input_activations must be an object, not {short(inputs)}.")
    if inputs.get("num_bits") != 8:
        return "16bit"
    if inputs.get("type") == "int":
        return "int8-token"
    if inputs.get("dynamic") is False:
        return "fp8-static"
    return "fp8-block" if inputs.get("strategy") == "group" else "fp8-token"


_PARSERS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}


def _everywhere(scheme: Scheme) -> tuple[tuple[tuple[str, ...], Scheme], ...]:
    return ((("Linear",), scheme),)


def _one_of(
    settings: Mapping[str, Any], name: str, supported: tuple[object, ...], default: object
) -> object:
    value = settings.get(name, default)
    if value is None:
        value = default
    if not any(type(value) is type(one) and value == one for one in supported):
        raise NotServed(
            f"its quantisation has {name} {short(value)}, which is not supported; supported: "
            f"{', '.join(map(str, supported))}."
        )
    return value


def _flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name)
    if value is not None and type(value) is not bool:
        raise NotServed(f"{name} must be true or false, not {short(value)}.")
    return default if value is None else value


def _group(value: object) -> int | None:
    """A group size; None = all columns, which configs write as -1."""
    if type(value) is not int or value not in (-1, *GROUPS):
        raise NotServed(
            f"its quantisation has group_size {short(value)}, which is not supported; supported: "
            f"-1, {', '.join(map(str, GROUPS))}."
        )
    return None if value == -1 else value


def _names(settings: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return _checked_names(name, settings.get(name) or [])


def _checked_names(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(
        isinstance(one, str) and len(one) <= _MAX_PATTERN for one in value
    ):
        raise NotServed(f"{name} must be a list of short names, not {short(value)}.")
    for one in value:
        if one.startswith("re:"):
            try:
                re.compile(one[3:])
            except (re.error, RecursionError, OverflowError):
                raise NotServed(f"{name} has the invalid pattern {short(one)}.") from None
    return tuple(value)


def _targets(pattern: str, module: str) -> bool:
    """Whether a target names the module: by its class, which all of ours share, or by its name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == "Linear" or pattern == module or module.endswith(f".{pattern}")


def _ignores(pattern: str, module: str) -> bool:
    """Whether an entry of a list of exceptions names the module or one that it is in."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return any(fnmatch.fnmatchcase(module, own) for own in (pattern, f"{pattern}.*"))
    return f".{pattern}." in f".{module}."
