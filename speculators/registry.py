"""Creates the drafter that a configuration names.

Modules are imported late, so that a missing dependency of one drafter cannot break another.
"""

from __future__ import annotations

from importlib import import_module

from ..configs.options import ConfigError
from ..configs.schema import SpeculativeConfig
from .base import BaseSpeculator, DraftHost

# method -> (module in this folder, class with (config, host) as constructor)
_SPECULATORS = {
    "ngram": ("ngram", "NgramSpeculator"),
    "draft_model": ("draft_model", "StandaloneDraftSpeculator"),
    "eagle": ("eagle", "EagleSpeculator"),
    "eagle3": ("eagle", "EagleSpeculator"),
    "mtp": ("eagle", "MTPSpeculator"),
    "gemma4_mtp": ("gemma4", "Gemma4Speculator"),
}


def _find(method: str) -> tuple[str, str | None, str]:
    """(module, package that it is relative to, class) of a method or of a `module:Class`."""
    if method in _SPECULATORS:
        module, name = _SPECULATORS[method]
        return f".{module}", __package__, name
    module, colon, name = method.partition(":")
    if not (colon and module and name):
        known = ", ".join(["off", *_SPECULATORS])
        raise ConfigError(
            f"unknown speculative method {method!r}. Available: {known}, or module:Class"
        )
    return module, None, name


def create_speculator(config: SpeculativeConfig, host: DraftHost) -> BaseSpeculator | None:
    """Create the drafter of `config.method`; None for "off".

    Raises ConfigError if there is no such method or it cannot be loaded.
    """
    if config.method == "off":
        return None
    module, package, name = _find(config.method)
    if config.max_drafts < 1:
        raise ConfigError(f"num_speculative_tokens must be at least 1, not {config.max_drafts}")
    try:
        found = getattr(import_module(module, package), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"speculative method {config.method!r} cannot be loaded: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, BaseSpeculator)):
        raise ConfigError(
            f"speculative method {config.method!r} is not a subclass of BaseSpeculator"
        )
    made: BaseSpeculator = found(config, host)  # type: ignore[call-arg]
    return made
