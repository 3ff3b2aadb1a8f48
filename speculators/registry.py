"""Makes the drafter that a configuration names; late imports, so that none can break another."""

from __future__ import annotations

from importlib import import_module

from ..configs.schema import SpeculativeConfig
from .base import BaseSpeculator, DraftHost

# method -> (module in this folder, class with (config, host) as constructor)
_SPECULATORS = {
    "ngram": ("ngram", "NgramSpeculator"),
    "draft_model": ("draft_model", "StandaloneDraftSpeculator"),
    "eagle": ("eagle", "EagleSpeculator"),
    "eagle3": ("eagle", "EagleSpeculator"),
    "mtp": ("mtp", "MTPSpeculator"),
    "gemma4_mtp": ("gemma4", "Gemma4Speculator"),
}


def create_speculator(config: SpeculativeConfig, host: DraftHost) -> BaseSpeculator | None:
    """The drafter of `config.method`, or None for "off"; ValueError for an unknown method."""
    if config.method == "off":
        return None
    if config.method not in _SPECULATORS:
        known = ", ".join(["off", *_SPECULATORS])
        raise ValueError(f"unknown speculative method {config.method!r}; known: {known}")
    if config.num_speculative_tokens < 1:
        raise ValueError(
            f"num_speculative_tokens must be at least 1, but is {config.num_speculative_tokens}"
        )
    module, name = _SPECULATORS[config.method]
    speculator = getattr(import_module(f".{module}", __package__), name)(config, host)
    assert isinstance(speculator, BaseSpeculator)
    return speculator
