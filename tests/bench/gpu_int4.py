"""Measure the products of a layer with weights of 4 bits beside bf16 on a GPU, by rows and tile.

The shapes are Llama-3.1-8B's, groups of 128 with minima of their own; copies of each weight are
multiplied in turn, so that none is found in the L2. The floor is the weights' bytes at the copy's
speed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.models.gpu_layers import Int4Linear, Scratch
from kernels.gpu import int4_products
from kernels.gpu.int4_products import int4_of
from kernels.gpu.products import ProductTile
from kernels.reference_weights import to_int4
from tests.bench.device import copy_rate, describe, release_memory, time_graph
from tests.bench.gpu_fp8 import SHAPES
from tests.bench.results import Results, print_line

ROWS = (1, 16, 32, 64, 128, 256, 2048)
BYTES = 400_000_000
"""Of the copies of a weight: several times the L2."""

TILES = {
    16: [(16, 64, 128, 3, 4), (16, 64, 128, 5, 4), (16, 64, 128, 8, 4), (16, 128, 128, 4, 4),
         (16, 128, 128, 6, 4), (16, 128, 128, 4, 8)],
    32: [(32, 64, 128, 4, 4), (32, 64, 128, 6, 4), (32, 128, 128, 4, 4), (32, 128, 128, 4, 8)],
    64: [(64, 64, 128, 3, 4), (64, 64, 128, 5, 4), (64, 128, 128, 3, 4), (64, 128, 128, 4, 8)],
    256: [(128, 128, 128, 3, 8), (64, 128, 128, 3, 4), (128, 64, 128, 3, 4)],
}  # fmt: skip
"""Tiles by the most rows that they are tried for."""


class Int4Bench:
    """One weight in bf16 and in 4 bits, several times."""

    def __init__(self, count: int, columns: int, group: int) -> None:
        copies = min(16, max(2, math.ceil(2 * BYTES / (count * columns))))
        self.count, self.columns = count, columns
        self.wide = [self._drawn() for _ in range(copies)]
        self.packed = [to_int4(weight, group) for weight in self.wide]
        self.int4 = [int4_of(packed) for packed in self.packed]
        self.tickets = torch.zeros(1 << 14, dtype=torch.int32, device="cuda")
        scratch = Scratch()
        self.linears = [Int4Linear(one, None, self.tickets, scratch) for one in self.int4]

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
        expected = x.float() @ self.packed[0].dense(torch.float32).T
        error = float((self.linears[0](x).float() - expected).norm() / expected.norm())
        one = self.int4[0]
        held = sum(part.nbytes for part in one if part is not None)
        found: dict[str, Any] = {
            "rows": rows,
            "floor_us": round(held / rate * 1e6, 1),
            "bf16": self.timed(lambda i: F.linear(x, self.wide[i])),
            "int4": self.timed(lambda i: self.linears[i](x)),
            "error": round(error, 5),
        }
        if rows > 256:
            return found
        limit = min(most for most in TILES if rows <= most)
        for given in TILES[limit]:
            tile = ProductTile(*given)
            own = int4_products.int4_split(rows, self.int4[0], tile)
            for split in sorted({own, max(1, own // 2), min(8, own * 2)}):
                try:
                    found[f"{given} split {split}"] = self.timed(self._by_tile(x, tile, split))
                except Exception as refused:
                    found[f"{given} split {split}"] = type(refused).__name__
        return found

    def _by_tile(self, x: torch.Tensor, tile: ProductTile, split: int) -> Callable[[int], Any]:
        return lambda i: int4_products.int4_linear(x, self.int4[i], None, self.tickets, tile, split)


def main() -> None:
    """Print one JSON line per weight and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--group", type=int, default=128, help="columns that share a scale")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default=",".join(SHAPES))
    options = parser.parse_args()
    rate = copy_rate()
    print_line(describe(rate))
    results = Results()
    with torch.inference_mode():
        for name in options.only.split(","):
            bench = Int4Bench(*SHAPES[name], options.group)
            for rows in map(int, options.rows.split(",")):
                results.add({"weight": name, **bench.measure(rows, rate)})
            del bench
            release_memory()
    results.write(options.json)


if __name__ == "__main__":
    main()
