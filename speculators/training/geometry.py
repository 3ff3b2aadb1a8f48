"""The shape of an EAGLE-3 head, and which auxiliary hidden states of its target it reads.

"Taps" are the boundaries at which these are read: boundary b is the residual stream after b layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NUM_TAPS = 3  # the number that other engines expect


@dataclass(frozen=True)
class HeadGeometry:
    """The shape of a head with one Llama decoder layer.

    Its width is the target's, because it shares the target's embeddings.
    """

    hidden_size: int  # H, for target and head
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # D <= V
    taps: tuple[int, ...]  # boundaries, ascending
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    def num_parameters(self) -> int:
        """The number of trained parameters: what the checkpoint stores, without the vocabulary
        maps."""
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
        """The fields as plain values, for a checkpoint's fingerprint."""
        return asdict(self)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high boundaries: the defaults of vLLM and SGLang.

    Those exist only for targets of at least 7 layers; smaller ones get other boundaries.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    low = min(1, max(num_layers - 2, 0))
    high = num_layers - 1 if num_layers >= 4 else num_layers
    return (low, (low + high) // 2, high)


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError for taps that a head cannot have."""
    rising = list(taps) == sorted(set(taps))
    if len(taps) != NUM_TAPS or not rising or taps[0] < 0 or taps[-1] > num_layers:
        raise ValueError(
            f"EAGLE-3 reads auxiliary hidden states at {NUM_TAPS} ascending boundaries within "
            f"0 .. {num_layers}, not {list(taps)}."
        )
