"""Compile the tiles scheduled by hand for sm_90 on a machine without a GPU; report what came out.

As `tests.unit.kernels.gpu.compile_for_hopper`, for a Triton that can import
`kernels.gpu.hopper_attention`.
"""

from __future__ import annotations

import json
import sys

from triton.experimental.gluon import GluonASTSource

from kernels.gpu import hopper_attention
from kernels.gpu.hopper_attention import hopper_attention_kernel
from kernels.gpu.work_list import BIG, WIDE, TileConfig
from tests.unit.kernels.gpu.compile_for_hopper import POINTERS, report


def compile_hand_scheduled(
    config: TileConfig, *, causal: bool, queue: bool = False, group: int = 4, head_dim: int = 128
) -> dict[str, object]:
    """The same of a tile scheduled by hand."""
    kv_heads, layers, slots = 8, 32, 16
    groups = config.vectors // hopper_attention.VECTORS
    constants = {
        "G": group, "GP": group, "M": hopper_attention.VECTORS, "GROUPS": groups,
        "H": kv_heads * group, "D": head_dim, "SLOTS": slots, "KEYS": config.keys,
        "STAGES": hopper_attention.STAGES, "CAUSAL": causal,
        "BLOCK_ROWS": layers * 2 * kv_heads * slots, "VALUE_ROWS": kv_heads * slots,
        "REGISTERS": hopper_attention.REGISTERS,
        "PRODUCER_REGISTERS": hopper_attention.PRODUCER_REGISTERS,
        "WAITS": not queue, "TRIGGERS": not queue, "FOLLOWS": queue, "QUEUE": queue,
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
    name = config.name + " hand-scheduled" + " from a queue" * queue
    name += f" of {head_dim}" * (head_dim != 128)
    return {"class": name, "causal": causal, **report(source, options)}


def main() -> None:
    reports = [
        compile_hand_scheduled(BIG, causal=False, queue=True),
        compile_hand_scheduled(WIDE, causal=True),
        compile_hand_scheduled(BIG, causal=False, queue=True, head_dim=64),
        compile_hand_scheduled(WIDE, causal=True, head_dim=64),
    ]
    for one in reports:
        sys.stdout.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
