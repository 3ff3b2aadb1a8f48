"""The kernels for linear layers of few rows, their tile sizes, and the fastest ones measured.

A choice depends on the layer's shape and the padded number of rows, never on data, so a CUDA graph
may bake it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

# What a kernel of few rows makes of a product: the value of MODE.
PLAIN = 0
PARTS = 1  # float32 parts [S, M, N]; a `Gemv` has none, and 1 means there that it adds a residual
GATE_UP = 2  # act(gate) * up of its two halves
SAMPLE = 3  # the best token of each row, see `head_sample`
ROLES = ("qkv", "o", "gate_up", "down", "head", "other")
BUCKETS = (1, 16, 32, 64, 128, 256)  # upper bounds of the numbers of rows that share a choice


@dataclass(frozen=True)
class Gemv:
    """A kernel for one row on the CUDA cores; each program sums `rows` weight rows in registers."""

    rows: int  # weight rows of a program
    block_k: int
    num_warps: int
    stages: int = 0  # 0 = load the first chunks before waiting for the input
    norm: int = 1  # 1 = the kernel applies the norm before the layer; 0 = another kernel does
    ahead: int = 1  # if stages is 0: chunks in flight besides the one in use, 1 or 2
    hint: int = 0  # cache hint of weight loads: 0 = evict first, 1 = none, 2 = bypass L1


@dataclass(frozen=True)
class Skinny:
    """A kernel for few rows on the tensor cores, with the weights as the left operand.

    Splitting K lets more programs fill the GPU; the next kernel sums the float32 parts.
    """

    block_n: int  # weight rows of a program
    block_k: int
    stages: int
    num_warps: int
    split_k: int
    block_m: int  # rows of a program
    norm: int = 0  # 1 = the kernel applies the norm before the layer; needs split_k = 1
    early: int = 256  # weight columns prefetched into L2 before the input is ready


@dataclass(frozen=True)
class Fixed(Skinny):
    """A `Skinny` whose rows have the same bits whatever the number of rows.

    K is not split, and a tensor core adds the products of each element in the order of K, in all
    tiles alike.
    """


@dataclass(frozen=True)
class Wide:
    """A kernel for many rows on Hopper's tensor cores, with a warp that only copies."""

    block_n: int = 256  # weight rows of a tile; of gate_up, gates and ups together
    stages: int = 4  # copies of 64 columns in shared memory
    group: int = 16  # blocks of 128 rows that share weights in the L2 cache
    lag: int = 0  # copies by which the second half of a tile's rows is late
    halves: int = 1  # 1 = the last tiles may have half as many weight rows
    norm: int = 0  # another kernel applies the norm


Choice: TypeAlias = Gemv | Skinny | Wide | None  # None = torch (cuBLAS)


@dataclass(frozen=True)
class Shape:
    """A linear layer's role in the model and its numbers of outputs and inputs."""

    role: str  # one of ROLES
    outputs: int  # for gate_up, those of gate and up together
    inputs: int

    @property
    def may_split(self) -> bool:
        """Whether the next kernel can sum the parts of a split."""
        return self.role in ("qkv", "o", "down")


def bucket_of(num_rows: int) -> int | None:
    """The smallest of `BUCKETS` that is at least `num_rows`; None if there is none."""
    return next((bucket for bucket in BUCKETS if num_rows <= bucket), None)


def fits(choice: Choice, shape: Shape, num_rows: int) -> bool:
    """Whether the chosen kernel can compute this layer; if not, torch must."""
    if choice is None:
        return True
    if shape.inputs % 8 or shape.outputs % (2 if shape.role == "gate_up" else 1):
        return False  # rows of 16 bytes
    if shape.outputs * shape.inputs >= 2**31:  # 32-bit offsets
        return False
    if isinstance(choice, Gemv):
        return num_rows == 1
    if isinstance(choice, Wide):
        of_copies = 64 * (choice.stages + choice.lag + 1)  # more than the ring in shared memory
        outputs = shape.outputs // 2 if shape.role == "gate_up" else shape.outputs
        return num_rows > BUCKETS[-1] and outputs % 8 == 0 and shape.inputs >= of_copies
    return choice.split_k == 1 or (shape.may_split and not choice.norm)


def default_choice(shape: Shape, num_rows: int) -> Choice:
    """A choice for a shape without measurements, in the pattern of the measured ones."""
    bucket = bucket_of(num_rows)
    if bucket is None or bucket > 64:
        return None
    if bucket == 1:
        return Gemv(4, 1024 if shape.inputs <= 1024 or shape.role == "gate_up" else 2048, 4)
    block_k = 64 if shape.inputs <= 1024 else 128
    split_k = 1
    tiles = -(-shape.outputs // 64)
    while shape.may_split and tiles * split_k < 128 and shape.inputs // split_k >= 4 * block_k:
        split_k *= 2
    return Skinny(64, block_k, 3 if shape.role == "gate_up" else 4, 4, split_k, bucket)


def hopper_choice(shape: Shape, num_rows: int) -> Choice:
    """The choice for a shape without measurements of its own, on an H100 or H200.

    The rule was fitted to `tests/lab/measure_shapes.py` on an H200: layers of eight models, and
    their parts on several ranks. The kernels that it names were slower than torch's for few of
    them. For more than 64 rows no simple rule was found.
    """
    bucket = bucket_of(num_rows)
    if bucket is None or bucket > 64 or min(shape.outputs, shape.inputs) < 1024:
        return None
    if shape.role not in _RULE[bucket]:
        return None
    rule = _RULE[bucket][shape.role]
    if isinstance(rule, Gemv):
        return rule
    tile, programs = rule
    if not shape.may_split:
        return Skinny(*tile, 1, bucket)
    tiles = -(-shape.outputs // tile[0])
    splits = [s for s in (1, 2, 3, 4, 6, 8) if shape.inputs // s >= 2 * tile[1]]
    measured = [s for s in splits if 96 <= tiles * s <= 420][:3] or splits[-1:]
    split_k = next((s for s in measured if tiles * s >= programs), measured[-1])
    return Skinny(*tile, split_k, bucket)


def _gemvs(**of_role: tuple[int, ...]) -> dict[str, Choice]:
    return {role: Gemv(*sizes) for role, sizes in of_role.items()}


def _skinny(**of_role: tuple[int, int, int, int, int, int] | None) -> dict[str, Choice]:
    return {role: None if sizes is None else Skinny(*sizes) for role, sizes in of_role.items()}


_Rule: TypeAlias = Gemv | tuple[tuple[int, int, int, int], int]  # a tile, and the least programs
_FEW_ROWS: Mapping[str, _Rule] = {
    "qkv": ((64, 256, 3, 4), 200),
    "o": ((64, 128, 4, 4), 200),
    "down": ((64, 128, 4, 4), 200),
    "head": ((128, 128, 3, 4), 1),
}
_RULE: Mapping[int, Mapping[str, _Rule]] = {
    1: {
        **dict.fromkeys(("qkv", "o", "gate_up", "head"), Gemv(2, 1024, 4)),
        "down": Gemv(2, 2048, 4, 0, 1, 2),
    },
    16: _FEW_ROWS,
    32: _FEW_ROWS,
    64: {
        "o": ((64, 64, 5, 4), 200),
        "down": ((64, 128, 5, 4), 120),
        "head": ((128, 128, 3, 4), 1),
    },
}

# The fastest on an H100 and an H200 (SXM, bf16), measured for single layers and whole steps.
_LARGE: Mapping[int, Mapping[str, Choice]] = {
    1: {
        **_gemvs(
            qkv=(2, 2048, 4, 0, 1, 2),
            gate_up=(4, 1024, 4, 0, 0),
            down=(2, 2048, 4, 0, 1, 2),
        ),
        **_skinny(o=(64, 128, 4, 4, 2, 16), head=(128, 128, 3, 4, 1, 16)),
    },
    16: _skinny(
        qkv=(64, 128, 4, 4, 2, 16),
        o=(64, 128, 4, 4, 2, 16),
        gate_up=(64, 128, 3, 4, 1, 16),
        down=(64, 256, 3, 4, 2, 16),
        head=(64, 256, 3, 4, 1, 16),
    ),
    32: _skinny(
        qkv=(64, 128, 4, 4, 2, 32),
        o=(64, 256, 3, 4, 2, 32),
        gate_up=(64, 128, 2, 4, 1, 32),
        down=(64, 128, 5, 4, 2, 32),
        head=(128, 128, 3, 4, 1, 32),
    ),
    64: _skinny(
        qkv=(64, 128, 5, 4, 1, 64),
        o=(64, 128, 4, 4, 2, 64),
        gate_up=(64, 64, 3, 4, 1, 64),
        down=(64, 128, 5, 4, 2, 64),
        head=(128, 64, 4, 4, 1, 64),
    ),
    128: _skinny(  # two programs of gate_up share a multiprocessor
        qkv=(64, 128, 4, 4, 1, 128),
        o=(64, 128, 4, 4, 2, 128),
        gate_up=(64, 64, 3, 4, 1, 128),
        down=(64, 128, 4, 4, 2, 128),
    ),
    256: _skinny(
        o=(64, 64, 5, 4, 2, 256),
        gate_up=(64, 64, 4, 8, 1, 256),
        down=(64, 64, 5, 4, 2, 256),
    ),
}
_SMALL_TILE = (64, 64, 4, 4)
_SMALL: Mapping[int, Mapping[str, Choice]] = {
    1: _gemvs(
        qkv=(4, 1024, 2),
        o=(2, 1024, 4),
        gate_up=(4, 1024, 4),
        down=(2, 1024, 2),
        head=(16, 128, 4, 0, 1, 2),
    ),
    **{
        rows: _skinny(
            qkv=(*_SMALL_TILE, 3, rows),
            o=(*_SMALL_TILE, 3, rows),
            gate_up=(*_SMALL_TILE, 1, rows),
            down=(*_SMALL_TILE, 3, rows),
            head=(*_SMALL_TILE, 1, rows),
        )
        for rows in (16, 32, 64)
    },
    **{
        rows: _skinny(gate_up=(*_SMALL_TILE, 1, 64), down=(*_SMALL_TILE, 3, 64))
        for rows in (128, 256)
    },
}
_SHAPES_LARGE = (  # Llama 3 8B, and an EAGLE-3 head for it
    Shape("qkv", 6144, 4096),
    Shape("qkv", 6144, 8192),
    Shape("o", 4096, 4096),
    Shape("gate_up", 28672, 4096),
    Shape("down", 4096, 14336),
    Shape("head", 128256, 4096),
    Shape("head", 32000, 4096),
)
_SHAPES_SMALL = (  # SmolLM2 135M
    Shape("qkv", 960, 576),
    Shape("o", 576, 576),
    Shape("gate_up", 3072, 576),
    Shape("down", 576, 1536),
    Shape("head", 49152, 576),
)
_QWEN3_MOE: Mapping[int, Mapping[str, Choice]] = {
    1: _gemvs(qkv=(2, 1024, 4), o=(4, 2048, 4)),
    16: _skinny(qkv=(64, 128, 4, 4, 3, 16), o=(64, 256, 3, 4, 4, 16)),
    32: _skinny(qkv=(64, 128, 4, 4, 3, 32), o=(64, 256, 3, 4, 4, 32)),
    64: _skinny(qkv=(64, 64, 5, 4, 3, 64), o=(64, 128, 5, 4, 4, 64)),
    128: _skinny(o=(64, 64, 5, 4, 4, 128)),
    256: _skinny(o=(64, 64, 5, 4, 4, 256)),
}
_SHAPES_QWEN3_MOE = (Shape("qkv", 5120, 2048), Shape("o", 2048, 4096))  # Qwen3-30B-A3B


def _table() -> dict[tuple[Shape, int], Choice]:
    table: dict[tuple[Shape, int], Choice] = {}
    measured = (
        (_SHAPES_LARGE, _LARGE), (_SHAPES_SMALL, _SMALL), (_SHAPES_QWEN3_MOE, _QWEN3_MOE)
    )  # fmt: skip
    for shapes, by_rows in measured:
        for shape in shapes:
            for bucket, of_role in by_rows.items():
                table[shape, bucket] = of_role.get(shape.role)
    return table


# (shape, bucket) -> fastest kernel on Hopper GPUs; torch computes all others
H100_WINNERS: Mapping[tuple[Shape, int], Choice] = _table()

# The kernels for more than 256 rows on Hopper GPUs: by role, the fewest rows that one is for. Torch
# computes all others. Steps of fewer rows and other layers gain nothing (docs/measurements.md).
WIDE: Mapping[str, tuple[int, Wide]] = {"gate_up": (2000, Wide())}
