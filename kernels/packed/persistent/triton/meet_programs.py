"""A barrier of all programs of a launch, which must all run at the same time."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....launch import hash_functions

# Thread 0 adds to a counter and waits until its highest bit changes: all programs but the first add
# 1, and the first one adds what is missing to 2 ** 31, so that nobody has to reset it. $1: the
# counter, $2: what is added, $3: a number with the highest bit of before, $4: after how many times
# 1024 cycles the kernel fails.
_MEET = gl.constexpr("""{
.reg .pred p; .reg .b32 thread, now; .reg .b64 begin, clock, limit;
mov.u32 thread, %tid.x;
setp.ne.u32 p, thread, 0;
@p bra MET;
mov.u64 begin, %clock64;
cvt.u64.u32 limit, $4;
shl.b64 limit, limit, 10;
red.release.gpu.global.add.u32 [$1], $2;
WAIT:
ld.acquire.gpu.global.u32 now, [$1];
xor.b32 now, now, $3;
setp.lt.s32 p, now, 0;
@p bra MET;
mov.u64 clock, %clock64;
sub.u64 clock, clock, begin;
setp.lt.u64 p, clock, limit;
@p bra WAIT;
trap;
MET:
mov.u32 $0, 0;
}""")


@gluon.jit
def sign_of(counter):
    """The counter before this program has met others: of its bits only the highest is sure."""
    return gl.load(counter, volatile=True)


@gluon.jit
def meet_programs(counter, sign, patience):
    """Wait until all programs are here. What they stored before is visible afterwards.

    `sign` is what `sign_of` returned, or what the meeting before did; returns that for the next.
    """
    gl.thread_barrier()
    added = 1
    if gl.program_id(0) == 0:
        added = -0x80000000 - (gl.num_programs(0) - 1)
    gl.inline_asm_elementwise(
        _MEET, "=r,l,r,r,r", [counter, added, sign, patience],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.thread_barrier()
    return sign ^ -0x80000000


hash_functions(globals())
