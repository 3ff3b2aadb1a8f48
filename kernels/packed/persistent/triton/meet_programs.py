"""A barrier of all programs of a launch, which must all run at the same time."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....launch import hash_functions

# Thread 0 adds to a counter and waits until its highest bit changes: all programs but the first add
# 1, and the first one adds what is missing to 2 ** 31, so that nobody has to reset it. $1: the
# counter, $2: what is added, $3: after how many times 1024 cycles the kernel fails.
_MEET = gl.constexpr("""{
.reg .pred p; .reg .b32 thread, old, now; .reg .b64 begin, clock, limit;
mov.u32 thread, %tid.x;
setp.ne.u32 p, thread, 0;
@p bra MET;
mov.u64 begin, %clock64;
cvt.u64.u32 limit, $3;
shl.b64 limit, limit, 10;
atom.acq_rel.gpu.global.add.u32 old, [$1], $2;
WAIT:
ld.acquire.gpu.global.u32 now, [$1];
xor.b32 now, now, old;
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
def meet_programs(counter, patience):
    """Wait until all programs are here. What they stored before is visible afterwards."""
    gl.thread_barrier()
    added = 1
    if gl.program_id(0) == 0:
        added = -0x80000000 - (gl.num_programs(0) - 1)
    gl.inline_asm_elementwise(
        _MEET, "=r,l,r,r", [counter, added, patience], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.thread_barrier()


hash_functions(globals())
