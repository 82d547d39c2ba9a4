"""Dependent launches: a kernel may be on the device before the one it follows has ended.

From Hopper on, a kernel launched so begins as soon as the one before it lets go, and waits inside
for its results: the ramp of a launch, about a microsecond, hides behind the end of its
predecessor. Knows nothing of what the kernels do. Called where kernels are launched.

Whoever is launched so must call `gdc_wait` before it touches anything another kernel wrote or
still reads, or run after one that did.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

try:  # Named differently across releases.
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    IS_IN_TRITON = True
except ImportError:
    IS_IN_TRITON = False

__all__ = ["dependent_options", "gdc_launch_dependents", "gdc_wait", "leave_shared_memory"]

HOPPER = 9
CARVEOUT_ATTRIBUTE, CARVEOUT_MAX = 9, 100


@cache
def _can(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= HOPPER


def dependent_options(tensor: torch.Tensor) -> dict[str, Any]:
    """What to add to a launch on the tensor's device; nothing where it cannot be dependent."""
    if not IS_IN_TRITON or not tensor.is_cuda or not _can(tensor.device):
        return {}
    return {"launch_pdl": True}


@cache
def leave_shared_memory(function: int) -> None:
    """Have a kernel run with the largest shared memory a multiprocessor can be set to.

    A small kernel alone would set it to what that kernel needs, and one that needs more could not
    come beside it until the multiprocessor is empty. `function`: the driver's handle. Once each. A
    preference: a driver that does not follow it costs time alone.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT_ATTRIBUTE, CARVEOUT_MAX)
