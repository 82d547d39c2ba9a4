"""Compile the kernels that read and write int8 KV for sm_90 without a GPU, and report the result.

Run as a program, as `compile_for_hopper`. It prints one JSON object per kernel.
"""

from __future__ import annotations

import json
import sys

import triton

from kernels import reference_int8
from kernels.gpu.fused_ops import rope_kv_write_kernel
from kernels.gpu.work_list import BIG, SMALL, WIDE
from tests.unit.kernels.gpu.compile_for_hopper import compile_class, report, source_of

KV_HEADS, GROUP, HEAD_DIM, LAYERS, SLOTS = 8, 4, 128, 32, 16
UNIT = reference_int8.unit_bytes(HEAD_DIM)
STRIDES = {"BLOCK_STRIDE": LAYERS * 2 * KV_HEADS * UNIT, "VALUE_OFFSET": KV_HEADS * UNIT}
WRITES = {
    "qkv_ptr": "*bf16", "q_out": "*bf16", "kv_ptr": "*i8", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
    "positions": "*i32", "slots": "*i32", "growth_ptr": "*fp32",
}  # fmt: skip


def writing() -> dict[str, object]:
    """Compile the rotation that writes int8 KV."""
    constants: dict[str, object] = {
        "H": KV_HEADS * GROUP, "K": KV_HEADS, "D": HEAD_DIM, "HALF": HEAD_DIM // 2, "S": SLOTS,
        "STEP": 16, "KP": triton.next_power_of_2(KV_HEADS), **STRIDES,
        "GROWS": False, "WAITS": True,
    }  # fmt: skip
    options: dict[str, int] = {"num_warps": 2, "enable_fp_fusion": False}
    source = source_of(rope_kv_write_kernel, WRITES, constants)
    return {"class": "write", "causal": False, **report(source, options)}


def main() -> None:
    classes = ((SMALL, False), (BIG, False), (SMALL, True), (BIG, True), (WIDE, True))
    reports = [compile_class(config, causal=causal, is_int8=True) for config, causal in classes]
    for one in (*reports, writing()):
        sys.stdout.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
