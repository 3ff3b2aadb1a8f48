"""The variants that `measure_chain.py` compares: linear kernels, attention launch plans, heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.kernels.linear.linear_choice import Choice, Gemv, Skinny

# Of one role, or a mapping: changes of an `attention_plan.Launch`, or choices of several roles.
Variant = Choice | Mapping[str, Any]
MODELS: dict[str, dict[str, Any]] = {
    "Llama-8B": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "SmolLM2": dict(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
}


def _gemvs(*sizes: tuple[int, ...]) -> list[Choice]:
    return [Gemv(*of) for of in sizes]


def _skinny(rows: int, *sizes: tuple[int, ...]) -> list[Choice]:
    """Make a `Skinny` from sizes without block_m, which is `rows`; a sixth size is `norm`."""
    return [Skinny(*of[:5], rows, *of[5:]) for of in sizes]


def _together(block_m: int, *sizes: tuple[int, ...]) -> list[Variant]:
    """Use the same kernel for qkv and o, so that torch computes no part of a layer."""
    return [{"qkv": choice, "o": choice} for choice in _skinny(block_m, *sizes)]


_EARLY = [(0, early) for early in (512, 1024, 2048)]
_ONE_ROW_LARGE: dict[str, Sequence[Variant]] = {
    "gate_up": [
        *_gemvs((4, 1024, 4, 0, 1), (4, 1024, 4, 0, 0, 2), (2, 1024, 4, 0, 0, 2)),
        *_gemvs((4, 1024, 8, 0, 0, 2), (2, 2048, 8, 0, 0)),
        *_skinny(16, *((64, 128, 3, 4, 1, *of) for of in _EARLY)),
    ],
    "qkv": [
        *_gemvs((4, 2048, 4), (2, 2048, 4, 0, 0, 2), (4, 2048, 4, 0, 0), (1, 4096, 4)),
        *_gemvs((2, 4096, 8), (2, 2048, 2, 0, 1, 2)),
    ],
    "o": [
        *_gemvs((4, 2048, 4), (2, 2048, 4), (1, 4096, 4), (2, 4096, 8)),
        *_skinny(16, *((64, 128, 4, 4, 2, *of) for of in _EARLY)),
        *_skinny(16, *((64, 256, 3, 4, 2, *of) for of in _EARLY), (64, 128, 4, 4, 4, 0, 1024)),
    ],
    "down": [
        *_gemvs((2, 2048, 4), (4, 2048, 4), (1, 2048, 4, 0, 1, 2), (1, 4096, 4), (2, 2048, 8)),
        *_gemvs((2, 2048, 4, 0, 1, 2, 2), (1, 2048, 2, 0, 1, 2)),
    ],
    "head": [
        *_gemvs((8, 512, 4, 0, 1, 2), (4, 1024, 4), (4, 2048, 4), (2, 2048, 4, 0, 1, 2)),
        *_skinny(16, (64, 128, 4, 4, 1), (64, 256, 3, 4, 1), (128, 128, 3, 4, 1, 0, 1024)),
    ],
}
_ONE_ROW_SMALL: dict[str, Sequence[Variant]] = {
    "qkv": [
        *_gemvs((4, 1024, 4), (2, 1024, 2), (8, 128, 4, 0, 1, 2), (4, 256, 4, 0, 1, 2)),
        *_gemvs((8, 64, 2, 0, 1, 2), (4, 1024, 2), (16, 64, 4, 0, 1, 2)),
    ],
    "o": _gemvs(
        (4, 1024, 4), (2, 1024, 4), (1, 1024, 2), (4, 128, 2, 0, 1, 2), (4, 256, 4, 0, 1, 2)
    ),
    "gate_up": [
        *_gemvs((2, 1024, 4), (8, 1024, 8), (4, 256, 4, 0, 1, 2), (8, 128, 4, 0, 1, 2)),
        *_gemvs((8, 64, 4, 0, 1, 2), (4, 1024, 8)),
    ],
    "down": _gemvs(
        (2, 512, 4, 0, 1, 2), (2, 2048, 4), (1, 2048, 4), (4, 512, 4, 0, 1, 2), (4, 2048, 8)
    ),
    "head": _gemvs((4, 1024, 4), (16, 1024, 8), (8, 256, 4, 0, 1, 2), (16, 128, 4, 0, 1, 2)),
}


def _few(rows: int, *sizes: tuple[int, int, int, int, int]) -> dict[str, Sequence[Variant]]:
    """Variants near the built-in choices of qkv, o, gate_up and down, for 2 to 64 rows."""
    found: dict[str, Sequence[Variant]] = {}
    for role, size in zip(("qkv", "o", "gate_up", "down"), sizes, strict=True):
        block_n, block_k, stages, warps, split_k = size
        others = [(block_n, block_k, count, warps, split_k) for count in (stages - 1, stages + 1)]
        early = [(*size, *of) for of in [(0, 64), *_EARLY[:2]]]
        found[role] = _skinny(rows, *(of for of in others if of[2] > 1), *early)
    return found


def _many(rows: int) -> dict[str, Sequence[Variant]]:
    """Variants for 128 and 256 rows, with one or two programs per multiprocessor."""
    parts = _skinny(
        128, (64, 128, 4, 4, 2), (64, 64, 6, 4, 2), (128, 128, 3, 8, 2), (64, 64, 4, 4, 4)
    )
    gated = _skinny(128, (64, 64, 5, 8, 1), (64, 64, 3, 4, 1), (64, 64, 3, 8, 1))
    if rows == 256:
        parts += _skinny(256, (64, 64, 5, 4, 2), (64, 64, 5, 8, 2), (64, 64, 5, 4, 1))
        gated += _skinny(256, (64, 64, 4, 8, 1), (64, 64, 3, 8, 1))
    whole = _skinny(128, (64, 128, 4, 4, 1), (64, 64, 3, 4, 4))
    return {
        "qkv": [None, *parts, *whole],
        "o": [None, *parts],
        "gate_up": [None, *gated],
        "down": [None, *parts],
    }


def _many_small(rows: int) -> dict[str, Sequence[Variant]]:
    parts = [
        choice
        for block_m in (64, 128)
        for choice in _skinny(
            *(block_m, (64, 64, 4, 4, 1), (64, 64, 4, 4, 3), (64, 64, 3, 4, 2), (64, 128, 3, 4, 1)),
        )
    ]
    gated = [
        *_skinny(64, (64, 64, 4, 4, 1), (64, 64, 3, 4, 1), (128, 64, 3, 8, 1)),
        *_skinny(128, (64, 64, 4, 4, 1), (64, 64, 3, 8, 1), (128, 64, 3, 8, 1)),
        *_skinny(32, (64, 64, 4, 4, 1)),
    ]
    head = _skinny(128, (128, 64, 4, 8, 1), (64, 64, 4, 4, 1), (128, 64, 3, 8, 1))
    return {"qkv": parts, "o": parts, "gate_up": gated, "down": parts, "head": head}


@dataclass(frozen=True)
class PlanCase:
    """An attention call, and the changes of its `attention_plan.Launch` to compare."""

    reqs: int
    context: int
    tokens: int  # of a request
    variants: Sequence[Mapping[str, Any]]
    kv_heads: int = 8
    group: int = 4
    dim: int = 128

    @property
    def label(self) -> str:
        """The name of the case in the output."""
        heads = f"{self.group * self.kv_heads}/{self.kv_heads}x{self.dim}"
        return f"attn {self.reqs}x{self.tokens} at {self.context} {heads}"


_SWITCHES: Sequence[Mapping[str, Any]] = [
    *({"fused": False}, {"early": True}, {"early": False}, {"heads_first": False}),
    *({"last_sums": 0}, {"num_stages": 3}),
]


def _in_a_step(*sizes: tuple[int, ...]) -> dict[str, Sequence[Variant]]:
    return {"attention": [*_SWITCHES, *_plans(*sizes)]}


def _plans(*sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Plan changes from (block_n, stages, warps, heads first, splits); the last may be missing."""
    names = ("block_n", "num_stages", "num_warps", "heads_first", "splits")
    plans: list[dict[str, Any]] = [dict(zip(names, of, strict=False)) for of in sizes]
    return [{**plan, "heads_first": bool(plan["heads_first"])} for plan in plans]


_WIDE = [
    *_SWITCHES,
    *_plans((64, 2, 4, 1), (32, 3, 1, 1), (16, 3, 1, 1), (32, 2, 2, 1), (128, 2, 4, 1)),
    *({"registers": 128, **plan} for plan in _plans((64, 2, 4, 1), (32, 2, 2, 1))),
]
_LONG = [
    *_SWITCHES,
    *_plans((64, 2, 4, 1, 1), (64, 2, 4, 1, 4), (64, 2, 4, 1, 8), (64, 3, 4, 1, 4)),
    *_plans((128, 3, 8, 1, 1), (128, 2, 4, 1, 4), (128, 2, 8, 1, 1), (128, 3, 8, 1, 2)),
    *_plans((64, 3, 4, 1, 1), (64, 4, 4, 1, 1), (64, 3, 8, 1, 1), (128, 3, 4, 1, 1)),
    *_plans((128, 2, 8, 1, 2), (128, 2, 8, 1, 4), (128, 2, 8, 1, 8), (64, 3, 4, 1, 2)),
    *({"least_keys": least} for least in (1, 128, 512)),
]
_ONE = [
    *_SWITCHES,
    *_plans((64, 2, 4, 1, 8), (64, 2, 4, 1, 4), (128, 2, 4, 1, 4), (128, 2, 4, 1, 8)),
    *_plans((128, 2, 8, 1, 4), (64, 2, 8, 1, 8), (32, 2, 4, 1, 16)),
]
_FEW: list[Mapping[str, Any]] = [
    {"fused": False},
    *_plans(*((64, 2, 4, 1, splits) for splits in (1, 2, 4, 8))),
    *({"last_sums": 0, **plan} for plan in _plans(*((64, 2, 4, 1, s) for s in (2, 4, 8)))),
    *_plans((64, 3, 4, 1, 1), (64, 3, 4, 1, 2), (128, 2, 8, 1, 1), (128, 2, 4, 1, 1)),
    *({"least_keys": least} for least in (1, 128, 512)),
    *({"last_sums": 0, **plan} for plan in _plans((64, 3, 4, 1, 1), (128, 2, 8, 1, 1))),
]
# (model, layers of the chain) -> rows -> role -> variants
ROLES: Mapping[tuple[str, int], Mapping[int, Mapping[str, Sequence[Variant]]]] = {
    ("Llama-8B", 6): {
        1: _ONE_ROW_LARGE | _in_a_step((64, 2, 4, 1, 8), (128, 2, 4, 1, 4), (64, 2, 4, 1, 4)),
        8: _few(
            *(16, (64, 128, 4, 4, 2), (64, 128, 4, 4, 2), (64, 128, 3, 4, 1), (64, 256, 3, 4, 2))
        )
        | _in_a_step((64, 2, 4, 1, 2), (64, 2, 4, 1, 4), (128, 2, 4, 1, 2)),
        32: _few(
            *(32, (64, 128, 4, 4, 2), (64, 256, 3, 4, 2), (64, 128, 2, 4, 1), (64, 128, 5, 4, 2))
        )
        | _in_a_step((64, 2, 4, 1, 1), (64, 4, 4, 1, 1), (128, 2, 4, 1, 1)),
        64: _few(
            *(64, (64, 64, 6, 4, 2), (64, 128, 4, 4, 2), (64, 64, 3, 4, 1), (64, 128, 5, 4, 2))
        )
        | {"together": _together(64, (64, 64, 6, 4, 2), (64, 128, 4, 4, 2), (64, 128, 5, 4, 2))},
        128: _many(128),
        256: _many(256) | _in_a_step((64, 4, 4, 1), (64, 2, 2, 1), (32, 5, 4, 1)),
    },
    ("SmolLM2", 30): {
        1: _ONE_ROW_SMALL | _in_a_step((64, 2, 4, 1, 8), (128, 2, 4, 1, 4), (64, 2, 4, 1, 4)),
        256: _many_small(256)
        | {"together": _together(64, (64, 64, 4, 4, 3), (64, 64, 4, 4, 2), (64, 128, 3, 4, 1))}
        | _in_a_step((64, 2, 2, 1), (32, 5, 4, 1), (64, 2, 4, 1, 2)),
    },
}


ATTENTION: Sequence[PlanCase] = (
    *(PlanCase(reqs, 256, 1, _WIDE) for reqs in (128, 256)),
    PlanCase(32, 8192, 1, _LONG),
    PlanCase(1, 4096, 1, [*_ONE, *_LONG]),
    *(PlanCase(reqs, 4096, 1, _LONG) for reqs in (8, 16, 64)),
    *(PlanCase(reqs, 1024, 1, _LONG) for reqs in (4, 8, 16, 32)),
    *(PlanCase(reqs, 1024, 4, _LONG) for reqs in (4, 16)),
    PlanCase(1, 300, 1, _ONE),
    PlanCase(
        32, 256, 1, _plans((64, 3, 4, 1, 1), (64, 2, 4, 1, 1), (64, 2, 4, 1, 2), (32, 3, 4, 1, 1))
    ),
    *(PlanCase(reqs, 256, 1, _FEW) for reqs in (2, 4, 8, 16, 64)),
    *(PlanCase(reqs, 256, 4, _FEW) for reqs in (1, 4, 8, 16, 64)),
    *(PlanCase(reqs, 256, 4, _WIDE) for reqs in (32, 128, 256)),
    PlanCase(256, 256, 1, _WIDE, 3, 3, 64),
    PlanCase(1, 300, 1, _ONE, 3, 3, 64),
)
HEADS: Mapping[str, Mapping[int, Sequence[Choice]]] = {
    "Llama-8B": {
        64: _skinny(
            64, (64, 128, 3, 4, 1), (128, 64, 4, 4, 1), (128, 64, 4, 8, 1), (128, 128, 3, 8, 1)
        ),
        128: _skinny(
            128, (128, 64, 4, 8, 1), (64, 128, 3, 4, 1), (128, 128, 3, 8, 1), (64, 64, 4, 4, 1)
        ),
        256: [
            *_skinny(256, (128, 64, 4, 8, 1), (64, 64, 4, 4, 1)),
            *_skinny(128, (128, 64, 4, 8, 1), (128, 128, 3, 8, 1), (64, 128, 3, 4, 1)),
        ],
    },
    "SmolLM2": {
        256: [
            *_skinny(256, (128, 64, 4, 8, 1)),
            *_skinny(128, (128, 64, 4, 8, 1), (64, 64, 4, 4, 1), (128, 64, 3, 8, 1)),
        ],
    },
}
