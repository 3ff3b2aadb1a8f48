"""The kernels of codes that `measure_codes.py` compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from slipstream.kernels.linear.linear_choice import Shape, bucket_of
from slipstream.kernels.packed.kinds import Codes

FORMS = ("codes", "roles")
SHARED = 232448 - 1024  # bytes of shared memory of a program, without barriers
# (block_n, block_k, stages, warps) by rows of a program
GATED = {
    16: ((128, 128, 5, 8), (64, 128, 6, 4), (128, 128, 3, 8)),
    32: ((128, 128, 5, 8), (64, 128, 6, 4), (128, 128, 3, 8)),
    64: ((128, 128, 5, 8), (64, 128, 4, 4), (128, 128, 3, 8)),
    128: ((128, 128, 4, 8), (64, 128, 3, 4), (64, 128, 4, 8)),
    256: ((64, 128, 4, 8),),
}
SINGLE = {
    16: ((64, 128, 6, 4), (128, 128, 5, 8), (64, 256, 4, 4)),
    32: ((64, 128, 6, 4), (128, 128, 5, 8), (64, 256, 4, 4)),
    64: ((64, 128, 6, 4), (128, 128, 5, 8), (64, 256, 3, 4)),
    128: ((128, 128, 5, 8), (64, 128, 4, 4), (64, 256, 2, 4)),
    256: ((64, 128, 4, 8), (128, 128, 4, 8)),
}


def candidates(name: str, shape: Shape, rows: int, forms: Sequence[str] = FORMS) -> Iterator[Codes]:
    """The kernels worth measuring, of these forms; more than 256 rows have none."""
    if rows > 256:
        return
    if "codes" in forms:
        yield from _without_roles(name, shape, rows)
    if "roles" in forms and (rows > 16 or "codes" not in forms):
        yield from _with_roles(name, shape, rows)


def _without_roles(name: str, shape: Shape, rows: int) -> Iterator[Codes]:
    bucket = bucket_of(rows) or rows
    tiles = GATED if shape.role == "gate_up" else SINGLE
    codings: tuple[int, ...] = (1,) if name == "blocks" or shape.role in ("o", "down") else (0,)
    if name == "fp8" and shape.role == "down" and bucket >= 128:
        codings = (1, 0)
    for height in {bucket, 128} if bucket == 256 else (bucket,):
        for block_n, block_k, stages, warps in tiles[height]:
            for by_group in codings:
                if by_group and block_k > 128:
                    continue
                programs = -(-shape.outputs // block_n) * max(1, rows // height)
                splits = [s for s in (1, 2, 4, 8, 16) if 90 <= programs * s <= 530]
                count = 3 if height <= 64 else 2
                for split_k in (splits or [1])[:count] if shape.may_split else [1]:
                    for promote in (1, 0) if bucket >= 64 and not by_group else (1,):
                        choice = Codes(
                            *(block_n, block_k, stages, warps, split_k, height, by_group, promote)
                        )
                        yield choice
                        if split_k > 1 and shape.role == "down" and rows <= 16:
                            yield replace(choice, narrow=1)


def _with_roles(name: str, shape: Shape, rows: int) -> Iterator[Codes]:
    """Tiles of 64 or 128 rows. A wide tile spares bytes from L2, a narrow one fills the GPU."""
    height = 64 if rows <= 64 else 128
    gates = 2 if shape.role == "gate_up" else 1
    codings: tuple[int, ...] = (1,) if name == "blocks" or shape.role in ("o", "down") else (0,)
    if name == "fp8" and (shape.role == "o" or (shape.role == "down" and rows > 128)):
        codings = (1, 0)
    for by_group in codings:
        for block_n in (64, 128) if gates == 2 or by_group or rows <= 64 else (64, 128, 256):
            programs = -(-shape.outputs // (block_n * gates)) * -(-rows // height)
            splits = [s for s in (1, 2, 4, 8) if 60 <= programs * s <= 270]
            scratch = 2 * 64 * 128 if gates == 2 else 0
            stages = (SHARED - scratch) // ((block_n * gates + height) * 128)
            for split_k in splits if shape.may_split else [1]:
                choice = Codes(
                    *(block_n, 128, min(stages, 8), 4, split_k, height, by_group, 0, 0), roles=1
                )
                yield choice
                if gates == 2 and not by_group:
                    yield replace(choice, joined=1)
                if split_k > 1 and block_n == 128 and shape.role in ("o", "down"):
                    yield replace(choice, narrow=1)
