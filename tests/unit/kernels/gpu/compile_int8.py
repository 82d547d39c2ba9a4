"""Compile the kernels that read and write int8 KV for sm_90 without a GPU, and report the result.

Run as a program, as `compile_for_hopper`. It prints one JSON object per kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.compiler import ASTSource

from kernels import reference_int8
from kernels.gpu.fused_ops import rope_kv_write_kernel
from kernels.gpu.tree_attention import tree_attention_kernel
from kernels.gpu.work_list import BIG, SMALL, WIDE, TileConfig
from tests.unit.kernels.gpu.compile_for_hopper import POINTERS, report

KV_HEADS, GROUP, HEAD_DIM, LAYERS, SLOTS = 8, 4, 128, 32, 16
UNIT = reference_int8.unit_bytes(HEAD_DIM)
STRIDES = {"BLOCK_STRIDE": LAYERS * 2 * KV_HEADS * UNIT, "VALUE_OFFSET": KV_HEADS * UNIT}
WRITES = {
    "qkv_ptr": "*bf16", "q_out": "*bf16", "kv_ptr": "*i8", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
    "positions": "*i32", "slots": "*i32", "growth_ptr": "*fp32",
}  # fmt: skip


def source_of(kernel: Any, types: dict[str, str], constants: dict[str, object]) -> ASTSource:
    """Return a kernel with its types; every pointer is a multiple of 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if types.get(n, "").startswith("*")
    }
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)


def attention(config: TileConfig, *, causal: bool) -> dict[str, object]:
    """Compile a tile class over int8 KV of an 8B model."""
    constants: dict[str, object] = {
        "G": GROUP, "GP": GROUP, "M": config.vectors, "H": KV_HEADS * GROUP, "D": HEAD_DIM,
        "SLOTS": SLOTS, "KEYS": config.keys, "STAGES": config.stages, "PEEL": config.peel,
        "CAUSAL": causal, **STRIDES,
        "WAITS": config is not BIG, "TRIGGERS": config is SMALL, "FOLLOWS": config is BIG,
        "QUEUE": False, "DP": HEAD_DIM, "WINDOW": 0, "CAP": 0.0, "SINKS": False,
    }  # fmt: skip
    types = {**POINTERS, "kv": "*i8", "rows_total": "i32", "scale": "fp32"}
    source = source_of(tree_attention_kernel, types, constants)
    found = report(source, {"num_warps": config.warps})
    return {"kernel": config.name, "causal": causal, **found}


def writing() -> dict[str, object]:
    """Compile the rotation that writes int8 KV."""
    constants: dict[str, object] = {
        "H": KV_HEADS * GROUP, "K": KV_HEADS, "D": HEAD_DIM, "HALF": HEAD_DIM // 2, "S": SLOTS,
        "STEP": 16, "KP": triton.next_power_of_2(KV_HEADS), **STRIDES,
        "GROWS": False, "WAITS": True,
    }  # fmt: skip
    options: dict[str, int] = {"num_warps": 2, "enable_fp_fusion": False}
    source = source_of(rope_kv_write_kernel, WRITES, constants)
    return {"kernel": "write", "causal": False, **report(source, options)}


def main() -> None:
    classes = ((SMALL, False), (BIG, False), (SMALL, True), (BIG, True), (WIDE, True))
    reports = [attention(config, causal=causal) for config, causal in classes]
    for one in (*reports, writing()):
        sys.stdout.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
