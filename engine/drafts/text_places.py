"""Looks up where the last tokens of a sequence stand in a text of tokens."""

from __future__ import annotations

from array import array
from collections import abc

import numpy as np
import numpy.typing as npt

ORDERS = (3, 2)
"""How many last tokens are looked up, the longest first."""


def places_after(
    text: array[int], context: abc.Sequence[int], start: int, end: int
) -> npt.NDArray[np.int64]:
    """Return the places in text[start:end] that follow `context`, ascending. O(end - start)."""
    near: npt.NDArray[np.int32] = np.frombuffer(text, np.int32)[start:end]
    count = len(near) - len(context) + 1
    if count <= 0 or not context:
        return np.zeros(0, np.int64)
    found = near[:count] == context[0]
    for offset in range(1, len(context)):
        found &= near[offset : offset + count] == context[offset]
    return np.flatnonzero(found) + (start + len(context))
