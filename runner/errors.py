"""The worker's exceptions for faults of a user or a machine. Each message is one sentence."""

from __future__ import annotations

import logging

from ..configs.options import ConfigError

logger = logging.getLogger(__name__)


class RunnerError(Exception):
    """Base of the worker's named errors."""


class ModelLoadError(RunnerError):
    """The model cannot be found, is not supported, or its checkpoint does not fit."""


class DataParallelError(RunnerError):
    """Communication with the other engines failed: one of them has died or hangs."""

    def __init__(self, engine: int, cause: Exception) -> None:
        what = first_line(cause) or type(cause).__name__
        super().__init__(f"data-parallel rank {engine} lost contact with the other ranks ({what})")


class DrafterError(ModelLoadError):
    """The drafter cannot be loaded, but the model can be served without it."""


# Exceptions with messages fit for a user. torch reports device faults, with hints on the lines
# after the first, as RuntimeError.
_OF_DRAFTERS = (RunnerError, ConfigError, OSError, RuntimeError)


def first_line(error: BaseException) -> str:
    """The first non-blank line of the error's message; "" if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def why_unreadable(error: Exception) -> str:
    """One sentence, without its full stop, saying why a drafter cannot be loaded.

    A malformed checkpoint can raise any class of error. For a class that is not meant for users
    the sentence names the class and holds the whole message, and the traceback is logged.
    """
    if isinstance(error, _OF_DRAFTERS) and not isinstance(error, RecursionError):
        return first_line(error).rstrip(".") or repr(error)
    logger.warning("a drafter cannot be loaded", exc_info=error)
    text = " ".join(str(error).split()).rstrip(".")
    what = f"{type(error).__name__}: {text}".rstrip(": ")
    return f"the drafter cannot be loaded ({what})"
