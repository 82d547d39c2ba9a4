"""Gives memory of freed tensors back to the system.

The C library keeps freed memory of up to 32 MiB a piece for later use. A model's tensors are freed
as they are brought into a device's layout, so what it keeps would be a second copy of the weights
for the life of the process. It knows no tensor.
"""

from __future__ import annotations

import ctypes
import sys


def give_back_freed() -> None:
    """Give back what is freed and not used. Cost: a walk over what is free, and a call of the
    system for each piece. Without effect beside glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
