"""Compile the kernels of experts for sm_90 without a GPU, and report the result.

Run as a program, as `compile_for_hopper`; a JSON object for each kernel and tile.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton.compiler import ASTSource

from kernels.gpu import experts
from kernels.gpu.experts import Tile
from tests.unit.kernels.gpu.compile_for_hopper import report

POINTERS = {
    "x": "*bf16", "w": "*bf16", "scales": "*i32", "bias": "*bf16", "out": "*bf16",
    "order": "*i32", "blocks": "*i32", "logits": "*fp32", "router_bias": "*bf16",
    "choice_bias": "*fp32", "ids_out": "*i32", "weights_out": "*fp32", "ids": "*i32",
    "counts": "*i32", "found": "*bf16", "weights": "*fp32", "shared": "*bf16",
}  # fmt: skip

PRODUCTS = {
    "few": (experts.FEW, False),
    "some": (experts.SOME, False),
    "many": (experts.MANY, False),
    "few packed": (experts.FEW_PACKED, True),
    "some packed": (experts.SOME_PACKED, True),
    "many packed": (experts.MANY_PACKED, True),
}


def compile_product(name: str, *, is_first: bool) -> dict[str, Any]:
    """Compile a layer's first or second product with a tile: gpt-oss's where packed, else Qwen3's.

    The sizes that a server passes are whole numbers of 16.
    """
    tile, is_packed = PRODUCTS[name]
    constants: dict[str, Any] = {
        "KIND": int(is_packed), "ACT": (2 if is_packed else 1) if is_first else 0,
        "GATHER": is_first, "TOP_K": 4 if is_packed else 8, "HAS_BIAS": is_packed,
        "BT": tile.pairs, "BN": tile.rows, "BK": tile.columns, "EVEN": not is_packed,
        "PTX": True, "STAGES": tile.stages, "WAITS": is_first or tile.pairs == 16,
    }  # fmt: skip
    types = {**POINTERS, "w": "*u8" if is_packed else "*bf16"}
    sizes = ("N", "K", "matrix", "scale_matrix")
    return compiled(f"{name}, {'first' if is_first else 'second'}", tile, types, constants, sizes)


def compiled(
    name: str, tile: Tile, types: dict[str, str], constants: dict[str, Any], sizes: tuple[str, ...]
) -> dict[str, Any]:
    kernel = experts.expert_product_kernel
    arguments = kernel.arg_names
    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in arguments}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(arguments)
        if a in sizes or signature[a].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return {"name": name, **report(source, {"num_warps": tile.warps, "num_stages": tile.stages})}


def main() -> None:
    for name in PRODUCTS:
        for is_first in (True, False):
            sys.stdout.write(json.dumps(compile_product(name, is_first=is_first)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
