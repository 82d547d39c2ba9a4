"""Compile the tree-attention kernels for sm_90 on a machine without a GPU; report what came out.

Run as a program (the interpreter's switch must be off when the kernels are imported), for `plain`
or `by-hand`; prints one JSON object per tile class: registers, spills, shared memory, matrix
instructions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.gpu import hopper_attention
from kernels.gpu.hopper_attention import hopper_attention_kernel
from kernels.gpu.tree_attention import tree_attention_kernel
from kernels.gpu.work_list import BIG, SMALL, WIDE, TileConfig

POINTERS = {
    "q_ptr": "*bf16", "kv": "*bf16", "part_out": "*fp32", "part_lse": "*fp32", "out": "*bf16",
    "count": "*i32", "units": "*i32", "queue": "*i32", "block_ids": "*i32", "lengths_ptr": "*i32",
}  # fmt: skip


def compile_class(
    config: TileConfig, *, causal: bool, queue: bool = False, head_dim: int = 128, group: int = 4
) -> dict[str, object]:
    kv_heads, layers, slots = 8, 32, 16
    constants = {
        "G": group, "GP": group, "M": config.vectors, "H": kv_heads * group, "D": head_dim,
        "SLOTS": slots, "KEYS": config.keys, "STAGES": config.stages, "PEEL": config.peel,
        "CAUSAL": causal,
        "BLOCK_STRIDE": layers * 2 * kv_heads * slots * head_dim,
        "VALUE_OFFSET": kv_heads * slots * head_dim,
        "WAITS": config is not BIG, "LETS_GO": config is SMALL, "FOLLOWS": config is BIG,
        "QUEUE": queue,
    }  # fmt: skip
    names = tree_attention_kernel.arg_names
    types = {**POINTERS, "rows_total": "i32", "scale": "fp32"}
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS}
    source = ASTSource(
        fn=tree_attention_kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    options: dict[str, int] = {"num_warps": config.warps}
    if config.registers_max:
        options["maxnreg"] = config.registers_max
    return {
        "class": config.name + " off a queue" * queue,
        "causal": causal,
        **_report(source, options),
    }


def compile_by_hand(
    config: TileConfig, *, causal: bool, queue: bool = False, group: int = 4
) -> dict[str, object]:
    """The same of a tile scheduled by hand."""
    kv_heads, layers, slots, head_dim = 8, 32, 16, 128
    groups = config.vectors // hopper_attention.VECTORS
    constants = {
        "G": group, "GP": group, "M": hopper_attention.VECTORS, "GROUPS": groups,
        "H": kv_heads * group, "D": head_dim, "SLOTS": slots, "KEYS": config.keys,
        "STAGES": hopper_attention.STAGES, "CAUSAL": causal,
        "BLOCK_ROWS": layers * 2 * kv_heads * slots, "VALUE_ROWS": kv_heads * slots,
        "REGISTERS": hopper_attention.REGISTERS,
        "PRODUCER_REGISTERS": hopper_attention.PRODUCER_REGISTERS,
        "WAITS": not queue, "LETS_GO": not queue, "FOLLOWS": queue, "QUEUE": queue,
    }  # fmt: skip
    names = hopper_attention_kernel.arg_names
    pool = f"tensordesc<bf16[{slots}, 64],{hopper_attention.ORDER!r}>"
    types = {**POINTERS, "pool": pool, "rows_total": "i32", "layer_row": "i32", "scale": "fp32"}
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS}
    source = GluonASTSource(
        fn=hopper_attention_kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    options = {"num_warps": 4} | ({"maxnreg": 128} if groups == 1 else {})
    name = config.name + " by hand" + " off a queue" * queue
    return {"class": name, "causal": causal, **_report(source, options)}


def _report(source: ASTSource, options: dict[str, int]) -> dict[str, object]:
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
        "wgmma": sass.stdout.count("HGMMA"),
        "mma": sass.stdout.count("HMMA"),
        "async_copies": sass.stdout.count("LDGSTS") + sass.stdout.count("UTMALDG"),
        "overlaps": kernel.asm["ptx"].count("wgmma.wait_group.sync.aligned 1"),
        "spills": sass.stdout.count("STL") + sass.stdout.count("LDL"),
    }


def main() -> None:
    if sys.argv[1] == "by-hand":
        reports = [
            compile_by_hand(BIG, causal=False, queue=True),
            compile_by_hand(WIDE, causal=True),
        ]
    else:
        classes = ((SMALL, False), (BIG, False), (SMALL, True), (BIG, True), (WIDE, True))
        reports = [compile_class(config, causal=causal) for config, causal in classes]
        reports.append(compile_class(BIG, causal=False, queue=True))
    for report in reports:
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
