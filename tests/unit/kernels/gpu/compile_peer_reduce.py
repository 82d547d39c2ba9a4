"""Compile the sums over lanes for sm_90 without a GPU, and report the result.

Run as a program, as `compile_for_hopper`. It prints one JSON object per kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton

from kernels.gpu import peer_reduce
from tests.unit.kernels.gpu.compile_for_hopper import report, source_of

POINTERS = {
    "parts": "*i64", "residual_ptr": "*bf16", "weight_ptr": "*bf16", "scales_ptr": "*fp32",
    "flags": "*i64", "counts": "*i32", "failed": "*i32", "told": "*i32", "eps": "fp32",
    "lane": "i32", "limit": "i32",
}  # fmt: skip
KERNELS = peer_reduce.KERNELS


def compile_sum(lanes: int, channels: int, groups: int, *, waits: bool) -> dict[str, object]:
    """Compile a sum with residual and norm as it is launched."""
    padded = triton.next_power_of_2(channels)
    constants: dict[str, Any] = {
        "C": channels, "CP": padded, "LANES": lanes, "GROUPS": groups, "ADD": True, "NORM": True,
        "WAITS": waits,
    }  # fmt: skip
    types = {**POINTERS, "out_ptr": "*fp8e4nv" if groups else "*bf16"}
    source = source_of(KERNELS["sum"], types, constants)
    name = f"sum of {lanes}, {channels}" + f" in {groups} groups" * bool(groups)
    return {"kernel": name, **report(source, {"num_warps": peer_reduce.warps_of(padded)})}


def compile_gather(lanes: int) -> dict[str, object]:
    constants: dict[str, Any] = {
        "N": 128_256 // lanes, "LANES": lanes, "PROGRAMS": peer_reduce.GATHER_PROGRAMS,
        "STEP": peer_reduce.GATHER_STEP,
    }  # fmt: skip
    source = source_of(KERNELS["gather"], {**POINTERS, "out_ptr": "*bf16"}, constants)
    return {"kernel": f"gather of {lanes}", **report(source, {"num_warps": 4})}


def main() -> None:
    reports = [
        *(compile_sum(n, c, 0, waits=n == 2) for n in (2, 4, 8) for c in (4096, 5120, 8192)),
        *(compile_sum(2, 4096, groups, waits=True) for groups in (1, 32)),
        *(compile_gather(n) for n in (2, 4)),
    ]
    for one in reports:
        sys.stdout.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
