"""Errors that a user or a machine can cause in the worker; a message is one sentence."""

from __future__ import annotations


class RunnerError(Exception):
    """Base of the worker's named errors."""


class ModelLoadError(RunnerError):
    """The model cannot be found, is not supported, or its checkpoint does not fit."""


class DrafterError(ModelLoadError):
    """The drafter is at fault, not the model it drafts for: without it the model can be served."""


def first_line(error: BaseException) -> str:
    """Of its text, the first line that says something; "" if none does."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
