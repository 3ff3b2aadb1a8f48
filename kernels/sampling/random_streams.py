"""Constants of the counter-based random numbers, shared by the torch and Triton versions."""

from __future__ import annotations

# Salts: each use of random numbers at a position has its own.
TARGET = 0  # tokens drawn from the target's own distribution
ACCEPT = 1  # the uniform number that accepts or rejects a draft
RECOVERY = 2  # tokens drawn from a residual after a rejection
DRAFT = 3  # drafts

# Multipliers of the 32-bit hash finaliser "lowbias32" (C. Wellons' search for low-bias hashes).
MULTIPLIER_1, MULTIPLIER_2 = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, keeps nearby counters apart
SECOND = 0x85EBCA6B  # start of the second key word
# Maps 31 random bits to u in (0, 1): 2^-31 * (1 - 2^-24), so that the largest u is below 1.
UNIFORM_SCALE = (1.0 - 2.0**-24) * 2.0**-31
