"""Programmatic dependent launch: a kernel may start on the GPU before its predecessor has ended.

On Hopper and later, a dependent kernel starts as soon as its predecessor triggers it, and waits
inside for the predecessor's results. This hides the launch latency, about a microsecond, behind the
predecessor's end. The module knows no kernel; the functions that launch kernels call it.

A kernel launched this way must call `gdc_wait` before it touches memory that another kernel writes
or still reads, or run after a kernel that has called it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

try:  # The module's place differs across Triton releases.
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    IS_IN_TRITON = True
except ImportError:
    IS_IN_TRITON = False

__all__ = ["dependent_options", "gdc_launch_dependents", "gdc_wait", "prefer_max_shared_memory"]

HOPPER = 9
"""Major compute capability from which dependent launches exist."""

CARVEOUT_ATTRIBUTE, CARVEOUT_MAX = 9, 100
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, and its largest value in per cent."""


@cache
def _supports_dependent_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= HOPPER


def dependent_options(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the options of a dependent launch on the tensor's device; empty if unsupported."""
    if not IS_IN_TRITON or not tensor.is_cuda or not _supports_dependent_launch(tensor.device):
        return {}
    return {"launch_pdl": True}


@cache
def prefer_max_shared_memory(function: int) -> None:
    """Prefer the largest shared memory carve-out for a kernel.

    Otherwise a small kernel sets the carve-out to its own need, and a kernel that needs more cannot
    run beside it until the multiprocessor is empty. `function`: the driver's handle; set once per
    handle. The driver may ignore the preference, which only costs time.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT_ATTRIBUTE, CARVEOUT_MAX)
