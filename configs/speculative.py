"""Parses and checks `--speculative-config`: a JSON object, or the name of a method."""

from __future__ import annotations

import json
import re
from typing import Any

from .options import ConfigError, did_you_mean, read_value, section_options
from .schema import SpeculativeConfig

METHODS = ("off", "ngram", "draft_model", "eagle", "eagle3", "mtp", "gemma4_mtp")
MAX_DRAFTS = 32
AUTO = "auto"  # value of num_speculative_tokens: K is chosen for each step
_ELSEWHERE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:Class of a user's own drafter
NEED_MODEL = {"draft_model", "eagle", "eagle3", "gemma4_mtp"}


def read_speculative(label: str, value: Any) -> SpeculativeConfig:
    """Parse JSON text, a mapping (from YAML) or a method's name, and check the result.

    Raises ConfigError, which starts with `label` and names the key and its value.
    """
    if value is False or (isinstance(value, str) and value.strip().lower() in {"off", "none"}):
        return SpeculativeConfig()
    if isinstance(value, str):
        value = _parsed(label, value.strip())
    if not isinstance(value, dict):
        raise ConfigError(_neither(label, value))
    options = {o.name: o for o in section_options("speculative", SpeculativeConfig)}
    fields: dict[str, Any] = {}
    for key, item in value.items():
        name = str(key).replace("-", "_")
        if name not in options:
            raise ConfigError(f"{label} has no key {key!r}{did_you_mean(name, options)}")
        if name == "num_speculative_tokens" and item == AUTO:
            item = None
        fields[name] = read_value(options[name], f"{label}: {key}", item)
    if "method" not in fields:
        raise ConfigError(f"{label} must name a method: {', '.join(METHODS)}")
    return check_speculative(label, SpeculativeConfig(**fields))


def _parsed(label: str, text: str) -> Any:
    """The value that the text means; the name of a method alone becomes {"method": name}."""
    name = text.strip("\"'")  # quotes that were doubled for the shell
    if name.lower() in METHODS:
        return {"method": name.lower()}
    if _ELSEWHERE.fullmatch(name):
        return {"method": name}
    try:
        return json.loads(text)
    except ValueError as error:
        if text.startswith("{"):
            raise ConfigError(f"{label} is not valid JSON: {error}") from None
        raise ConfigError(_neither(label, text)) from None


def _neither(label: str, value: Any) -> str:
    methods = f"a method ({', '.join(METHODS)})"
    hint = did_you_mean(str(value), METHODS)
    return f"{label} must be {methods} or a JSON object, not {value!r}{hint}"


def check_speculative(label: str, spec: SpeculativeConfig) -> SpeculativeConfig:
    """Return `spec` unchanged; raises ConfigError for a value out of range or a contradiction."""

    def require(holds: bool, key: str, rule: str) -> None:
        if not holds:
            given = "" if (value := getattr(spec, key)) is None else f", not {value!r}"
            raise ConfigError(f"{label}: {key} must {rule}{given}")

    if spec.method not in METHODS and not _ELSEWHERE.fullmatch(spec.method):
        hint = did_you_mean(spec.method, METHODS)
        require(False, "method", f"be one of {', '.join(METHODS)}{hint}")
    for key in ("num_speculative_tokens", "max_speculative_tokens"):
        count = getattr(spec, key)
        require(count is None or 1 <= count <= MAX_DRAFTS, key, f"be from 1 to {MAX_DRAFTS}")
    require(
        spec.num_speculative_tokens is None or spec.max_speculative_tokens is None,
        "max_speculative_tokens",
        "be left out unless num_speculative_tokens is auto",
    )
    require(spec.prompt_lookup_min >= 1, "prompt_lookup_min", "be at least 1")
    require(
        spec.prompt_lookup_max >= spec.prompt_lookup_min,
        "prompt_lookup_max",
        f"be at least prompt_lookup_min ({spec.prompt_lookup_min})",
    )
    if spec.method in NEED_MODEL:
        require(bool(spec.model), "model", f"name the drafter for method {spec.method}")
    if spec.method == "ngram":
        require(spec.model is None, "model", "be left out, because method ngram has no model")
    if spec.max_model_len is not None:
        require(spec.max_model_len >= 1, "max_model_len", "be at least 1")
    if spec.aux_hidden_state_boundaries is not None:
        layers = spec.aux_hidden_state_boundaries
        require(
            bool(layers) and min(layers) >= 0 and list(layers) == sorted(set(layers)),
            "aux_hidden_state_boundaries",
            "be increasing numbers of layers, each at least 0",
        )
    require(spec.position_offset in (0, 1), "position_offset", "be 0 or 1")
    rates = spec.synthetic_acceptance_rates
    if rates is not None:
        require(
            len(rates) == spec.max_drafts > 0
            and all(0.0 <= rate <= 1.0 for rate in rates)
            and list(rates) == sorted(rates, reverse=True),
            "synthetic_acceptance_rates",
            f"be {spec.max_drafts or 'some'} rates from 0 to 1, none above the one before it",
        )
    return spec
