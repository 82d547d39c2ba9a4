"""Compile the packing kernels for sm_90 without a GPU, and report the result.

Run as a program, as `compile_for_hopper`. It prints one JSON object per kernel and format.
"""

from __future__ import annotations

import json
import sys
from typing import Any, get_args

from kernels.gpu import kv_formats
from kernels.reference_kv import PackedName
from tests.unit.kernels.gpu.compile_for_hopper import report, source_of

TYPES = {
    "kv_ptr": "*i16", "ids_ptr": "*i32", "out_ptr": "*i8", "out16_ptr": "*i16", "in_ptr": "*i8",
    "in16_ptr": "*i16", "signs_ptr": "*fp32", "failed_ptr": "*i32", "units": "i32",
    "tokens": "i32", "norm": "fp32",
}  # fmt: skip


def compile_kernel(kernel: Any, name: PackedName) -> dict[str, object]:
    """Compile a kernel as it is launched for an 8B model's pool in bf16."""
    constants = kv_formats.constants_of(name, (32, 8, 128), is_bf16=True)
    source = source_of(kernel, TYPES, constants)
    called = kernel.fn.__name__
    options: dict[str, int] = {"enable_fp_fusion": False, "num_warps": kv_formats.WARPS[called]}
    return {"kernel": called, "format": name, **report(source, options)}


def main() -> None:
    for kernel in kv_formats.KERNELS:
        for name in get_args(PackedName):
            sys.stdout.write(json.dumps(compile_kernel(kernel, name)) + "\n")


if __name__ == "__main__":
    main()
