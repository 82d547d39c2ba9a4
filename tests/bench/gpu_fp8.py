"""Measure the products of a layer in fp8 beside bf16 on a GPU, by rows and by tile.

The shapes are Llama-3.1-8B's; copies of each weight are multiplied in turn, so that none is found
in the L2. The floor is the weights' bytes at the copy's speed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.models.gpu_layers import Fp8Linear
from kernels.gpu import products
from kernels.gpu.products import Fp8, Fp8Rows, ProductTile
from kernels.reference_weights import Packed, fp8_product, round_rows
from tests.bench.device import copy_rate, describe, release_memory, time_graph
from tests.bench.results import Results, print_line

SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096),
          "down": (4096, 14336)}  # fmt: skip
ROWS = (1, 8, 16, 32, 64, 128, 256, 2048)
TILED_ROWS_MAX = 256
BYTES = 400_000_000
"""Of the copies of a weight: several times the L2."""

TILES = {
    16: [(16, 64, 128, 5, 4), (16, 64, 256, 4, 4), (16, 128, 128, 4, 4), (16, 64, 128, 8, 4)],
    32: [(32, 64, 128, 5, 4), (32, 64, 256, 4, 4), (32, 128, 128, 4, 4)],
    64: [(64, 128, 128, 4, 4), (64, 64, 128, 5, 4), (64, 64, 256, 4, 4), (64, 128, 128, 4, 8)],
    256: [(128, 128, 128, 4, 8), (64, 128, 128, 4, 4)],
}
"""Tiles by the most rows that they are tried for."""


class ProductBench:
    """One weight in bf16 and fp8, several times."""

    def __init__(self, count: int, columns: int, group: int) -> None:
        copies = max(2, math.ceil(BYTES / (count * columns)))
        self.count, self.columns, self.group = count, columns, min(group, columns)
        self.wide = [self._drawn() for _ in range(min(copies, 16))]
        self.packed = [Packed("fp8", *round_rows(w, self.group), self.group) for w in self.wide]
        self.fp8: list[Fp8] = [products.fp8_of(packed) for packed in self.packed]
        self.tickets = torch.zeros(1 << 14, dtype=torch.int32, device="cuda")

    def _drawn(self) -> torch.Tensor:
        weight = torch.empty(self.count, self.columns, device="cuda", dtype=torch.bfloat16)
        return weight.normal_(0, self.columns**-0.5)

    def timed(self, run: Callable[[int], Any]) -> float:
        """Return the microseconds of one of the copies' products, under one graph."""

        def run_all() -> None:
            for index in range(len(self.wide)):
                run(index)

        return round(time_graph(run_all)[0] / len(self.wide), 1)

    def measure(self, rows: int, rate: float) -> dict[str, Any]:
        """Return microseconds by way of computing, and the error of what the engine takes."""
        x = torch.randn(rows, self.columns, device="cuda", dtype=torch.bfloat16)
        groups = self.columns // self.group
        x8 = products.round_rows(x, groups)
        linears = [Fp8Linear(w, None, self.tickets, torch.bfloat16) for w in self.fp8]
        expected = fp8_product(x, self.packed[0])
        error = float((linears[0](x8).float() - expected).norm() / expected.norm())
        found: dict[str, Any] = {
            "rows": rows,
            "floor_us": round(self.count * self.columns / rate * 1e6, 1),
            "bf16": self.timed(lambda i: F.linear(x, self.wide[i])),
            "fp8": self.timed(lambda i: linears[i](x8)),
            "rounding": self.timed(lambda _: products.round_rows(x, groups)),
            "error": round(error, 5),
        }
        if rows <= TILED_ROWS_MAX:
            found |= self.tiles(x8, rows)
        return found

    def tiles(self, x8: Fp8Rows, rows: int) -> dict[str, Any]:
        """Return microseconds by tile and by the parts of K."""
        limit = min(most for most in TILES if rows <= most)
        found: dict[str, Any] = {}
        for given in TILES[limit]:
            tile = ProductTile(*given)
            own = products.split_of(self.count, self.columns, tile)
            for split in sorted({own, max(1, own // 2), min(8, own * 2)}):
                run = partial(self._by_tile, x8, tile, split)
                found[f"{given} split {split}"] = self.timed(run)
        return found

    def _by_tile(self, x8: Fp8Rows, tile: ProductTile, split: int, index: int) -> None:
        weight = self.fp8[index]
        products.fp8_linear(x8, weight, None, self.tickets, torch.bfloat16, tile, split)


def main() -> None:
    """Print one JSON line per weight and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--group", type=int, default=1 << 20, help="columns that share a scale")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    options = parser.parse_args()
    rate = copy_rate()
    print_line(describe(rate))
    results = Results()
    with torch.inference_mode():
        for name, (count, columns) in SHAPES.items():
            bench = ProductBench(count, columns, options.group)
            for rows in map(int, options.rows.split(",")):
                results.add({"weight": name, **bench.measure(rows, rate)})
            del bench
            release_memory()
    results.write(options.json)


if __name__ == "__main__":
    main()
