"""Decides which drafter the next worker loads: the one kept last, the configured one, or none.

The files of a kept head may be missing when the worker restarts. Serving without it is better than
not serving.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ...configs.schema import SpeculativeConfig

log = logging.getLogger("slipstream.speculator")


class NextDrafter:
    """The drafter for the next start of the worker."""

    def __init__(self, configured: SpeculativeConfig) -> None:
        self.current = self._configured = configured
        self.fallback: str | None = None  # why `current` replaces another drafter

    def keep(self, model: str) -> None:
        self.current, self.fallback = replace(self.current, model=model), None

    def fall_back(self, reason: str) -> bool:
        """Replace a drafter that could not be loaded; returns False if drafting is off already."""
        lost, configured = self.current, self._configured
        if lost.method == "off":
            return False
        if lost.model != configured.model:
            self.current, instead = (
                configured,
                f"using the configured one, {configured.model}",
            )
        else:
            self.current, instead = SpeculativeConfig(), "serving without a drafter"
        named = lost.model or lost.method
        self.fallback = f"cannot load the drafter {named} ({reason.rstrip('.')}): {instead}"
        log.warning(self.fallback)
        return True
