"""Compile the kernels of experts for sm_90 without a GPU, and report the result.

Run as a program, as `compile_for_hopper`; a JSON object for each kernel and tile.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton.compiler import ASTSource

from kernels.gpu import experts, int4_products, products
from kernels.gpu.experts import Tile
from tests.unit.kernels.gpu.compile_for_hopper import report

POINTERS = {
    "x": "*bf16", "x_scales": "*fp32", "w": "*bf16", "scales": "*i32", "bias": "*bf16",
    "out": "*bf16",
    "order": "*i32", "blocks": "*i32", "logits": "*fp32", "router_bias": "*bf16",
    "choice_bias": "*fp32", "ids_out": "*i32", "weights_out": "*fp32", "ids": "*i32",
    "counts": "*i32", "found": "*bf16", "weights": "*fp32", "shared": "*bf16",
}  # fmt: skip

TYPES: tuple[dict[str, str], ...] = (
    {},
    {"w": "*i32"},
    {"x": "*fp8e4nv", "w": "*fp8e4nv", "scales": "*fp32"},
)
"""What differs by the kind of the weights."""

KINDS = ("", " packed", " fp8")
PRODUCTS = {
    f"{name}{KINDS[kind]}": (tile, kind)
    for kind, tiles in enumerate(experts.TILES)
    for name, tile in zip(("alone", "few", "some", "many"), tiles, strict=True)
}


def compile_product(name: str, *, is_first: bool) -> dict[str, Any]:
    """Compile a layer's first or second product with a tile: gpt-oss's where packed, else Qwen3's.

    The sizes that a server passes are whole numbers of 16.
    """
    tile, kind = PRODUCTS[name]
    is_packed = kind == 1
    constants: dict[str, Any] = {
        "KIND": kind, "GROUPS": 1, "ACT": (2 if is_packed else 1) if is_first else 0,
        "GATHER": is_first, "TOP_K": 4 if is_packed else 8, "HAS_BIAS": is_packed,
        "BT": tile.pairs, "BN": tile.rows, "BK": tile.columns, "EVEN": not is_packed,
        "PTX": True, "STAGES": tile.stages, "WAITS": is_first or tile.pairs == 16,
    }  # fmt: skip
    types = {**POINTERS, **TYPES[kind]}
    sizes = ("N", "K", "matrix", "scale_matrix")
    whole = f"{name}, {'first' if is_first else 'second'}"
    return compiled(experts.expert_product_kernel, whole, tile, types, constants, sizes)


def compile_linear(tokens: int, groups: int, split: int) -> dict[str, Any]:
    """Compile a product in fp8 of Llama-8B's sizes."""
    tile = products.fp8_tile(tokens)
    constants: dict[str, Any] = {
        "GROUPS": groups, "SPLIT": split, "HAS_BIAS": False, "BT": tile.pairs, "BN": tile.rows,
        "BK": tile.columns, "EVEN": True, "STAGES": tile.stages, "WAITS": tokens <= 64,
    }  # fmt: skip
    types = {**POINTERS, **TYPES[2], "parts": "*fp32", "tickets": "*i32"}
    name = f"linear of {tokens}, {groups} groups, {split} parts"
    kernel = products.fp8_linear_kernel
    return compiled(kernel, name, Tile(*tile), types, constants, ("N", "K", "span"))


def compile_int4(tokens: int, group: int, split: int) -> dict[str, Any]:
    """Compile a product with weights of 4 bits of Llama-8B's sizes."""
    tile = int4_products.int4_tile(tokens, is_plain=group == 128)
    constants: dict[str, Any] = {
        "GROUP": group, "HAS_SHIFTS": group == 32, "SPLIT": split,
        "HAS_BIAS": False, "BT": tile.pairs, "BN": tile.rows, "STAGES": tile.stages, "PTX": True,
        "WAITS": True,
    }  # fmt: skip
    types = {
        **POINTERS, "codes": "*i32", "scales": "*fp32", "zeros": "*bf16", "shifts": "*fp32",
        "parts": "*fp32", "tickets": "*i32",
    }  # fmt: skip
    name = f"4 bits of {tokens}, groups of {group}, {split} parts"
    kernel = int4_products.int4_linear_kernel
    return compiled(kernel, name, Tile(*tile), types, constants, ("N", "K", "span"))


def compile_routing(shared: int) -> dict[str, Any]:
    """Compile the routing of 128 experts, of which a token takes 8, and a shared one if so."""
    constants: dict[str, Any] = {
        "E": 128, "GROUPS": 1, "GROUPS_P": 1, "SIZE_P": 128, "KEPT": 1, "TOP_K": 8, "TOP_P": 8,
        "SCORE": 1, "HAS_BIAS": False, "BY_BIAS": True, "RENORMALISE": True, "SHARED": shared,
        "ALONE": True, "WAITS": True,
    }  # fmt: skip
    types = {**POINTERS, "scale": "fp32"}
    name, one_warp = f"routing, shared {shared}", Tile(1, 1, 1, 1, 1)
    return compiled(experts.route_kernel, name, one_warp, types, constants, ())


def compiled(
    kernel: Any, name: str, tile: Tile, types: dict[str, str], constants: dict[str, Any],
    sizes: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
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
    for tokens in (16, 32, 64, 256):
        for groups in (1, 32):
            one = compile_linear(tokens, groups, 4 if tokens < 256 else 1)
            sys.stdout.write(json.dumps(one) + "\n")
    for tokens in (16, 32, 64):
        for group in (32, 128):
            sys.stdout.write(json.dumps(compile_int4(tokens, group, 4)) + "\n")
    for shared in experts.SHARED.values():
        sys.stdout.write(json.dumps(compile_routing(shared)) + "\n")


if __name__ == "__main__":
    main()
