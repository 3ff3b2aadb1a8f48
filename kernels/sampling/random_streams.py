"""The constants of the counter-based random numbers, shared by the torch and the Triton version."""

from __future__ import annotations

# Salts, one per use of randomness at a position.
TARGET = 0  # tokens drawn from the target's own distribution
ACCEPT = 1  # the uniform number that accepts or rejects a draft
RECOVERY = 2  # tokens drawn from a residual after a rejection
DRAFT = 3  # drafts

# Finaliser of a 32-bit hash: xor-shift and odd multipliers (C. Wellons' search of low-bias hashes).
MULTIPLIER_1, MULTIPLIER_2 = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, keeps nearby counters apart
SECOND = 0x85EBCA6B  # start of the second key word
# 31 random bits -> u in (0, 1): 2^-31 * (1 - 2^-24), so that the largest value stays below 1.
UNIFORM_SCALE = (1.0 - 2.0**-24) * 2.0**-31
