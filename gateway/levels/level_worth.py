"""Say what a level is worth against computing: seconds a token, and from where on it wins.

    load(n)    = fixed + n * bytes per token / rate
    compute(n) = n * seconds per token

Pure arithmetic over measured rates. `trunkline doctor` and the admin API show it; the engine
decides each load by its own measurements.
"""

from __future__ import annotations

import math

from msgspec import Struct

FIXED_S = {"host": 0.0002, "disk": 0.001, "remote": 0.02, "peer": 0.02}
"""Seconds that a load takes beside its bytes, by level, until the engine has measured them."""


class LevelWorth(Struct, frozen=True):
    """What a level is worth on one model. Seconds for a token, and the fewest tokens for which
    loading is faster than computing; None if it never is."""

    load_s_per_token: float
    compute_s_per_token: float
    tokens_min: int | None

    @property
    def ratio(self) -> float:
        """How many times faster loading a token is than computing it."""
        return self.compute_s_per_token / self.load_s_per_token


def level_worth(
    level: str, bytes_per_token: float, bytes_per_s: float, compute_tokens_per_s: float
) -> LevelWorth:
    """Return what a level is worth. All rates are above 0."""
    load_s, compute_s = bytes_per_token / bytes_per_s, 1 / compute_tokens_per_s
    gain_s = compute_s - load_s
    tokens = math.ceil(FIXED_S[level] / gain_s) if gain_s > 0 else None
    return LevelWorth(load_s, compute_s, None if tokens is None else max(1, tokens))
