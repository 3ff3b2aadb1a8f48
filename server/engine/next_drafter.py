"""Owns which drafter the next worker starts with: the one kept last, the command line's, or none.

A head that was kept may be gone when the worker has to be started again. To serve without it is
better than not to serve.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ...configs.schema import SpeculativeConfig

log = logging.getLogger("slipstream.speculator")


class NextDrafter:
    """The drafter of an engine client."""

    def __init__(self, configured: SpeculativeConfig) -> None:
        self.current = self._configured = configured
        self.fallback: str | None = None  # why it is another one than was wanted

    def keep(self, model: str) -> None:
        """A worker that has to be started again starts with this head."""
        self.current, self.fallback = replace(self.current, model=model), None

    def fall_back(self, reason: str) -> bool:
        """The current one could not be loaded: take the next best; False if there is none left."""
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
