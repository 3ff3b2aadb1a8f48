"""Errors that a user or a machine can cause in the worker; a message is one sentence."""

from __future__ import annotations

import logging

from ..configs.options import ConfigError

logger = logging.getLogger(__name__)


class RunnerError(Exception):
    """Base of the worker's named errors."""


class ModelLoadError(RunnerError):
    """The model cannot be found, is not supported, or its checkpoint does not fit."""


class DrafterError(ModelLoadError):
    """The drafter is at fault, not the model it drafts for: without it the model can be served."""


# Their text says enough. RuntimeError: torch tells a device's faults so, with hints below.
_OF_DRAFTERS = (RunnerError, ConfigError, OSError, RuntimeError)


def first_line(error: BaseException) -> str:
    """Of its text, the first line that says something; "" if none does."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def why_unreadable(error: Exception) -> str:
    """What an error that reading a drafter ended in is told as: one sentence, without its stop.

    Odd contents can end in any class of error: it is named, all lines are told, and logged where.
    """
    if isinstance(error, _OF_DRAFTERS) and not isinstance(error, RecursionError):
        return first_line(error).rstrip(".") or repr(error)
    logger.warning("a drafter cannot be loaded", exc_info=error)
    text = " ".join(str(error).split()).rstrip(".")
    what = f"{type(error).__name__}: {text}".rstrip(": ")
    return f"the drafter cannot be loaded ({what})"
