"""How fast this machine computes: the rate of its matrix products, measured.

The levels' side that needs a library of arrays, apart from `model_cost`, which a server asks at its
start. `trunkline doctor` measures.
"""

from __future__ import annotations

import numpy as np

from engine.api import Clock

PRODUCT_SIDE = 768
PRODUCTS_MAX, SECONDS_MAX = 50, 0.2


def measure_flops_per_s(clock: Clock) -> float:
    """Return the rate of this machine's matrix products in fp32. Takes about 0.2 s."""
    left = np.ones((PRODUCT_SIDE, PRODUCT_SIDE), dtype=np.float32)
    left @ left  # the first product starts threads
    began_s, products, seconds = clock(), 0, 0.0
    while products < PRODUCTS_MAX and seconds < SECONDS_MAX:
        left @ left
        products, seconds = products + 1, clock() - began_s
    return 2 * PRODUCT_SIDE**3 * products / max(seconds, 1e-9)
