"""Owns the answer to `--version` and GET /version."""

from __future__ import annotations


def version() -> str:
    """The installed version; `unknown` when the code runs without having been installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed  # slow to import, so late

    try:
        return installed("slipstream")
    except PackageNotFoundError:
        return "unknown"
