"""Tiny checkpoints of every drafter with a model, each with its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.configs.schema import SpeculativeConfig

from ..cases import some
from .eagle_oracle import head_weights, save_head
from .gemma4_oracle import AssistantOracle
from .mtp_oracle import MtpOracle
from .tiny_engine import save_llama

METHODS = ("eagle", "eagle3", "draft_model", "mtp", "gemma4_mtp")
# Where all of them run the same code, CI has one whose positions advance and one whose do not.
FEW_METHODS = some(METHODS, ("eagle3", "gemma4_mtp"))


class Drafters:
    """Creates each pair at its first use.

    With `wide_heads` attention heads have 16 values, the least that a matrix unit supports.
    """

    def __init__(self, folder: Path, wide_heads: bool = False) -> None:
        self.folder = folder
        self.wide_heads = wide_heads
        self._pairs: dict[str, tuple[Path, Path | None]] = {}

    def pair(self, method: str) -> tuple[Path, Path | None]:
        """(target, drafter); the drafter is None if it is in the target's checkpoint."""
        if method not in self._pairs:
            self._pairs[method] = self._make(method)
        return self._pairs[method]

    def speculative(self, method: str, k: int = 3, **changes: Any) -> SpeculativeConfig:
        """The configuration of the drafter."""
        drafter = self.pair(method)[1]
        options = {"num_speculative_tokens": k, "draft_sampling": "greedy"} | changes
        return SpeculativeConfig(
            method=method, model=None if drafter is None else str(drafter), **options
        )

    def _make(self, method: str) -> tuple[Path, Path | None]:
        folder = self.folder / method
        if method == "mtp":
            MtpOracle(folder / "target")
            return folder / "target", None
        if method == "gemma4_mtp":
            oracle = AssistantOracle(folder, ordered=True)
            return oracle.target_folder, oracle.folder
        heads = 2 if self.wide_heads else 4
        target = save_llama(folder / "target", layers=4, heads=heads)
        if method == "draft_model":
            return target, save_llama(folder / "draft", seed=5, layers=1, heads=heads)
        eagle3 = method == "eagle3"
        weights = head_weights(eagle3)
        more: dict[str, object] = {}
        if self.wide_heads:  # the same matrices, cut into fewer heads
            more = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        if eagle3:
            more["eagle_aux_hidden_state_layer_ids"] = [0, 2, 3]
        return target, save_head(folder / "head", weights, eagle3, **more)
