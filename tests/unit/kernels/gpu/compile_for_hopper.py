"""Compile the tree-attention kernels for sm_90 without a GPU, and report the result.

Run as a program (the interpreter's switch must be off when the kernels are imported). It prints one
JSON object per tile class: registers, spills, shared memory, matrix instructions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import reference_int8
from kernels.gpu.tree_attention import tree_attention_kernel
from kernels.gpu.work_list import (
    BIG,
    BIG_256,
    SMALL,
    SMALL_256,
    WIDE,
    WIDE_256,
    TileConfig,
)

POINTERS = {
    "q_ptr": "*bf16", "kv": "*bf16", "part_out": "*fp32", "part_lse": "*fp32", "out": "*bf16",
    "count": "*i32", "tiles": "*i32", "queue": "*i32", "block_ids": "*i32", "lengths_ptr": "*i32",
    "sinks": "*fp32",
}  # fmt: skip

RULES: dict[str, dict[str, object]] = {
    "": {},
    " of gpt-oss": {"WINDOW": 128, "SINKS": True},
    " of Gemma 2": {"WINDOW": 4096, "CAP": 72.0},
    " of Gemma 3": {"WINDOW": 1024},
}
"""What families add to attention, by the end of a report's name."""


def compile_class(
    config: TileConfig,
    *,
    causal: bool,
    queue: bool = False,
    head_dim: int = 128,
    group: int = 4,
    rule: str = "",
    is_int8: bool = False,
) -> dict[str, object]:
    """Compile a tile class of the plain kernel and return its report. `rule`: a key of `RULES`;
    `is_int8`: over KV of 8 bits."""
    kv_heads, layers, slots = 8, 32, 16
    unit = reference_int8.unit_bytes(head_dim) if is_int8 else slots * head_dim
    constants = {
        "G": group, "GP": group, "M": config.vectors, "H": kv_heads * group, "D": head_dim,
        "SLOTS": slots, "KEYS": config.keys, "STAGES": config.stages, "PEEL": config.peel,
        "CAUSAL": causal,
        "BLOCK_STRIDE": layers * 2 * kv_heads * unit,
        "VALUE_OFFSET": kv_heads * unit,
        "WAITS": config is not BIG, "TRIGGERS": config is SMALL, "FOLLOWS": config is BIG,
        "QUEUE": queue,
        "DP": triton.next_power_of_2(head_dim), "WINDOW": 0, "CAP": 0.0, "SINKS": False,
        **RULES[rule],
    }  # fmt: skip
    types = {**POINTERS, "rows_total": "i32", "scale": "fp32"}
    if is_int8:
        types["kv"] = "*i8"
    source = source_of(tree_attention_kernel, types, constants)
    return {
        "class": config.name + " from a queue" * queue + rule,
        "causal": causal,
        **report(source, {"num_warps": config.warps}),
    }


def source_of(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    """Return a kernel with its types; every pointer is a multiple of 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if types.get(n, "").startswith("*")
    }
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)


def report(source: ASTSource, options: dict[str, int]) -> dict[str, object]:
    """Compile a kernel for sm_90; its registers, spills, shared memory and instructions."""
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        sass = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        )
    text = usage.stdout + usage.stderr
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": sass.stdout.count("HGMMA") + sass.stdout.count("QGMMA"),
        "mma": sass.stdout.count("HMMA"),
        "async_copies": sass.stdout.count("LDGSTS") + sass.stdout.count("UTMALDG"),
        "overlaps": kernel.asm["ptx"].count("wgmma.wait_group.sync.aligned 1"),
        "releases": len(re.findall(r"sys\.release|release\.sys", kernel.asm["ptx"])),
        "acquires": len(re.findall(r"sys\.acquire|acquire\.sys", kernel.asm["ptx"])),
        "spills": sass.stdout.count("STL") + sass.stdout.count("LDL"),
    }


def main() -> None:
    classes = ((SMALL, False), (BIG, False), (SMALL, True), (BIG, True), (WIDE, True))
    reports = [compile_class(config, causal=causal) for config, causal in classes]
    reports.append(compile_class(BIG, causal=False, queue=True))
    for config, causal in ((SMALL, False), (BIG, True), (WIDE, True)):
        given: dict[str, Any] = {"head_dim": 64, "group": 8, "rule": " of gpt-oss"}
        reports.append(compile_class(config, causal=causal, **given))
    given = {"head_dim": 256, "group": 2}
    for config, causal in ((SMALL_256, False), (BIG_256, True), (WIDE_256, True)):
        reports.append(compile_class(config, causal=causal, rule=" of Gemma 3", **given))
    more = (" of Gemma 2", "")
    reports += [compile_class(BIG_256, causal=True, rule=rule, **given) for rule in more]
    for one in reports:
        sys.stdout.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
