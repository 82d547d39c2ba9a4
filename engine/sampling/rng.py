"""Counter-based random numbers: the uniform number of a draw as a pure function of its position.

It knows no logits, tensor or sequence, and keeps no state: the number of (seed, sample, position)
is the same in every batch, order and process, and after a preemption. The samplers call it once per
sampled token.
"""

from __future__ import annotations

from typing import Final

_MASK32: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return four random 32-bit words for a 128-bit counter under a 64-bit key.

    Cost: ten rounds, about 4 us. Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random
    numbers: as easy as 1, 2, 3" (SC11); the tests use the paper's known answers.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = _MULTIPLIERS[0] * c0
        p1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0 = (k0 + _KEY_STEPS[0]) & _MASK32
        k1 = (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits, for output `position` of a sample.

    `seed`: any 64-bit integer, signed or not; both are taken modulo 2**64.
    """
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    counter = (position & _MASK32, (position >> 32) & _MASK32, sample_index & _MASK32, 0)
    high, low, _, _ = philox4x32(counter, key)
    return float(((high << 32 | low) >> 11) * 2.0**-53)
