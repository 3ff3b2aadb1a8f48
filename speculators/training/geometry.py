"""The shape of an EAGLE-3 head to be trained, and where it taps its target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NUM_TAPS = 3  # other engines size the head's first layer for three


@dataclass(frozen=True)
class HeadGeometry:
    """One decoder layer of Llama's kind. It shares the target's embeddings, hence its width."""

    hidden_size: int  # H, of target and head
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # V, of the target
    draft_vocab_size: int  # D; V = the head scores every token
    taps: tuple[int, ...]  # boundary b = residual stream after b layers, low to high
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    def num_parameters(self) -> int:
        """Trained values: all that the checkpoint stores but the vocabulary maps."""
        wide, heads = 2 * self.hidden_size, self.num_heads + 2 * self.num_kv_heads
        attention = wide * heads * self.head_dim + self.num_heads * self.head_dim * self.hidden_size
        return (
            len(self.taps) * self.hidden_size * self.hidden_size
            + attention
            + 3 * self.hidden_size * self.intermediate_size
            + 4 * self.hidden_size
            + self.draft_vocab_size * self.hidden_size
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint's fingerprint."""
        return asdict(self)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high: what vLLM and SGLang take where a config names no taps.

    A target of fewer than 7 layers has no such three; then three that it has.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    low = min(1, max(num_layers - 2, 0))
    high = num_layers - 1 if num_layers >= 4 else num_layers
    return (low, (low + high) // 2, high)


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """ValueError, one sentence, for taps that a head cannot have."""
    rising = list(taps) == sorted(set(taps))
    if len(taps) != NUM_TAPS or not rising or taps[0] < 0 or taps[-1] > num_layers:
        raise ValueError(
            f"EAGLE-3 taps must be {NUM_TAPS} boundaries that rise within 0 .. {num_layers}, not "
            f"{list(taps)}."
        )
