"""Compile the kernels of recurrent layers for sm_90 without a GPU, and report the results.

Run as a program, as `compile_for_hopper`; a JSON object for each kernel, at the shapes of
Qwen3.5-35B-A3B and of Granite 4 hybrid, in bf16.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kernels.gpu.recurrent import convolution, delta, mamba2, states
from kernels.gpu.recurrent.step import CHUNK
from tests.unit.kernels.gpu.compile_for_hopper import report, source_of

BF16 = ("x_ptr", "taps_ptr", "bias_ptr", "out_ptr", "mixed_ptr", "beta_ptr", "decay_ptr",
        "step_ptr", "w_ptr", "u_ptr", "q_ptr", "k_ptr", "own_ptr", "gate_ptr",
        "weight_ptr")  # fmt: skip
FP32 = ("rate_ptr", "through_ptr", "fade_ptr", "system_ptr")
INTS = ("seats_ptr", "firsts_ptr", "run_firsts", "run_counts", "run_kept", "run_chunks",
        "chunk_firsts", "chunk_counts", "pool_ptr", "states_ptr", "moves_ptr")  # fmt: skip

HEADS = {"KH": 16, "H": 32, "D": 128, "DP": 128, "V": 128}
MAMBA = {"H": 48, "P": 64, "N": 128, "NP": 128, "G": 1, "BP": mamba2.CHANNELS}
CONVOLUTION = {"C": 8192, "W": 4, "BC": convolution.COLUMNS}
CASES: tuple[tuple[str, tuple[Any, str], dict[str, Any], int], ...] = (
    *(("convolution", (convolution, "_convolve"),
       {**CONVOLUTION, "BR": rows, "HAS_BIAS": False, "SILU": True, "LISTED": rows > 1},
       convolution.WARPS)
      for rows in (1, convolution.ROWS)),
    ("windows", (convolution, "_keep_windows"), CONVOLUTION, 2),
    *(("delta of few rows", (delta, "_few"),
       {**HEADS, "BV": delta.TOKEN_COLUMNS, "LISTED": listed}, delta.TOKEN_WARPS)
      for listed in (False, True)),
    ("delta's systems", (delta, "_systems"),
     {k: v for k, v in {**HEADS, "C": CHUNK}.items() if k != "V"}, delta.SYSTEM_WARPS),
    ("delta's blocks", (delta, "_invert_blocks"), {"H": 32, "C": CHUNK}, 1),
    ("delta's solutions", (delta, "_solve"), {**HEADS, "VP": 128, "C": CHUNK}, delta.SOLVE_WARPS),
    ("delta of chunks", (delta, "_follow"),
     {"VP": 128, "BV": delta.CHUNK_COLUMNS, "C": CHUNK,
      **{k: v for k, v in HEADS.items() if k != "KH"}}, 4),
    *(("mamba of few rows", (mamba2, "_few"), {**MAMBA, "LISTED": listed}, 4)
      for listed in (False, True)),
    ("mamba of chunks", (mamba2, "_follow"), {**MAMBA, "C": CHUNK}, 8),
    ("gated norm", (states, "_gated_norm"),
     {"G": 32, "D": 128, "DP": 128, "STEP": 8, "GATE_FIRST": False}, 4),
    ("moves", (states, "_move"), {"TO_POOL": False, "STEP": states.MOVED_WORDS}, 8),
)  # fmt: skip


def main() -> None:
    for name, (module, function), constants, warps in CASES:
        kernel = getattr(module, function)
        types: dict[str, str] = dict.fromkeys(kernel.arg_names, "i32")
        types |= dict.fromkeys(BF16, "*bf16") | dict.fromkeys(INTS, "*i32")
        types |= dict.fromkeys(FP32, "*fp32") | {"scale": "fp32", "eps": "fp32"}
        is_rule = name.startswith(("delta", "mamba"))
        types["bias_ptr"] = "*fp32" if is_rule else "*bf16"
        types["state_ptr"] = "*fp32" if is_rule else "*bf16"
        options = {"num_warps": warps, "num_stages": 2 if name.endswith("chunks") else 3}
        found = report(source_of(kernel, types, constants), options)
        sys.stdout.write(json.dumps({"name": name, **found}) + "\n")


if __name__ == "__main__":
    main()
