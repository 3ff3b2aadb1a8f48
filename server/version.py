"""The version that `--version` and GET /version report."""

from __future__ import annotations

import functools


@functools.cache  # reading the metadata of a package takes milliseconds
def version() -> str:
    """The version of the installed package, or "unknown" if it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed  # slow to import, so late

    try:
        return installed("slipstream")
    except PackageNotFoundError:
        return "unknown"
