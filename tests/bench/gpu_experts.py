"""Experts on a GPU, by the layer and in whole models: python -m tests.bench.gpu_experts

    --models gpt-oss-20b,Qwen3-30B-A3B   which shapes
    --parts layer,tiles,steps            what is measured
    --json FILE

Random weights; gpt-oss's have values that MXFP4 holds, as its files do, so they run packed. `layer`
times a layer's launches under one CUDA graph over other rows each time, in all and by part. Its
floor is the bytes of the experts that the rows chose, or the products' operations, whichever takes
longer at the measured rates of a copy and a bf16 product; `error` is against the reference in fp32.
`tiles` times candidates for both products. `steps` runs the engine's core: unshared decoding at
context 512 by batch, and a cold prompt of 2,048 tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.config import WeightsKind
from engine.model_store import Architecture
from engine.models.gpu_experts import GpuExperts, router_logits, rows_for
from engine.models.layers import TensorSource, TorchOps
from engine.models.moe import Experts
from kernels.gpu import experts
from kernels.gpu.experts import Tile
from tests.bench.device import copy_rate, describe, release_memory, time_graph
from tests.bench.gpu_workloads import Bench, Workload
from tests.bench.models import GPT_OSS_20B, QWEN3_30B_A3B, packed_weights, with_layers
from tests.bench.results import Results, print_line

Sorted = tuple[torch.Tensor, torch.Tensor]
"""What `experts.sort_pairs` returns."""

SHAPES = {"gpt-oss-20b": GPT_OSS_20B, "Qwen3-30B-A3B": QWEN3_30B_A3B}
ROWS = (1, 8, 32, 64, 256, 2048)
BATCHES = (1, 8, 64, 256)
INPUTS = 8
"""Sets of rows that a graph computes in turn, so that one set's experts do not stay in the L2."""

CANDIDATES = {
    0: {
        64: [Tile(16, 64, 128, 4, 4), Tile(16, 128, 64, 4, 4), Tile(16, 64, 256, 3, 4)],
        512: [Tile(32, 128, 64, 5, 4), Tile(64, 128, 64, 4, 4), Tile(32, 64, 128, 4, 4)],
        2048: [Tile(128, 128, 64, 4, 8), Tile(128, 256, 64, 3, 8), Tile(64, 128, 64, 4, 4)],
    },
    1: {
        64: [
            Tile(16, 64, 128, 4, 4),
            Tile(16, 64, 128, 6, 4),
            Tile(16, 128, 128, 4, 4),
            Tile(16, 64, 128, 3, 4),
        ],
        512: [
            Tile(64, 128, 128, 4, 8),
            Tile(32, 128, 128, 4, 4),
            Tile(32, 64, 128, 4, 4),
            Tile(64, 64, 128, 4, 4),
            Tile(32, 128, 128, 4, 8),
        ],
        2048: [
            Tile(128, 128, 128, 4, 8),
            Tile(128, 128, 128, 3, 8),
            Tile(64, 128, 128, 4, 8),
            Tile(128, 256, 128, 3, 8),
        ],
    },
    2: {
        64: [Tile(16, 64, 128, 4, 4), Tile(16, 64, 256, 3, 4), Tile(16, 128, 128, 4, 4)],
        512: [Tile(32, 128, 128, 4, 4), Tile(32, 64, 128, 5, 4), Tile(64, 128, 128, 4, 8)],
        2048: [Tile(128, 128, 128, 4, 8), Tile(128, 256, 128, 3, 8), Tile(64, 128, 128, 4, 8)],
    },
}
"""Tiles by the kind of the weights, and by the most rows that they are tried for."""


def product_rate() -> float:
    """Return the operations per second of a large bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    return 2 * 8192**3 / (time_graph(multiply)[0] * 1e-6)


class LayerBench:
    """One layer's experts over random rows."""

    def __init__(self, config: Architecture, kind: WeightsKind) -> None:
        assert config.moe is not None
        self.moe, self.config = config.moe, config
        one = with_layers(config, 1)
        weights = {n: w for n, w in packed_weights(one, kind).items() if ".0.mlp." in n}
        kept: list[GpuExperts] = []

        class KeepingOps(TorchOps):
            def experts(self, *given: Any) -> Any:
                kept.append(GpuExperts(*given))
                return super().experts(*given)

        self.reference = Experts(one, TensorSource(weights, "model.layers.0."), KeepingOps())
        self.kernels = kept[0]
        self.kind = self.kernels.gate_up.kind
        values = [matrix.values for matrix in (self.kernels.gate_up, self.kernels.down)]
        self.expert_bytes = sum(
            part[0].nbytes
            for one in values
            for part in ((one,) if isinstance(one, torch.Tensor) else one)
        )

    def inputs(self, rows: int) -> list[torch.Tensor]:
        size = (rows, self.config.hidden)
        return [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(INPUTS)]

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kernels = self.kernels
        logits = router_logits(x, kernels.router)
        return experts.route(logits, kernels.routing, kernels.router_bias, kernels.choice_bias)

    def measure(self, rows: int, rate: float, flops: float) -> dict[str, Any]:
        """Return microseconds of a layer, of its parts, its floor and its error."""
        inputs = self.inputs(rows)
        chosen = [len(set(self.routed(x)[0].flatten().tolist())) for x in inputs]
        moved = sum(chosen) / INPUTS * self.expert_bytes
        choices = self.kernels.routing.choices
        work = 6.0 * rows * choices * self.config.hidden * self.moe.intermediate
        flops *= 2 if self.kind == 2 else 1
        tile = experts.tile_of(rows, self.kind)

        def route_and_sort(
            x: torch.Tensor,
        ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
            ids, weights = self.routed(x)
            return experts.sort_pairs(ids, self.kernels.count, tile.pairs), weights

        lists, weights = zip(*map(route_and_sort, inputs), strict=True)
        hidden = [self.first(x, both, tile) for x, both in zip(inputs, lists, strict=True)]
        found = [self.second(x, both, tile) for x, both in zip(hidden, lists, strict=True)]
        parts: dict[str, Callable[[int], Any]] = {
            "route_sort": lambda i: route_and_sort(inputs[i]),
            "first": lambda i: self.first(inputs[i], lists[i], tile),
            "second": lambda i: self.second(hidden[i], lists[i], tile),
            "sum": lambda i: experts.add_experts(found[i], weights[i], None),
        }
        times = {name: timed(run) for name, run in parts.items()}
        whole = timed(lambda i: self.kernels(inputs[i], None))
        floor = max(moved / rate, work / flops) * 1e6
        return {
            "rows": rows, "experts": sum(chosen) / INPUTS, "us": whole, "floor_us": round(floor, 1),
            "of": round(floor / whole, 2), **times, "error": self.error(inputs[0][:64]),
        }  # fmt: skip

    def first(self, x: torch.Tensor, pairs: Sorted, tile: Tile) -> torch.Tensor:
        kernels, k = self.kernels, self.kernels.routing.choices
        return experts.expert_product(
            rows_for(x, kernels.gate_up), kernels.gate_up, *pairs, k, tile, dtype=x.dtype,
            activation=kernels.activation,
        )  # fmt: skip

    def second(self, hidden: torch.Tensor, pairs: Sorted, tile: Tile) -> torch.Tensor:
        down = self.kernels.down
        return experts.expert_product(
            rows_for(hidden, down),
            down,
            *pairs,
            self.kernels.routing.choices,
            tile,
            dtype=hidden.dtype,
        )

    def error(self, x: torch.Tensor) -> float:
        """Return the relative distance to the reference."""
        expected, found = self.reference(x).float(), self.kernels(x, None).float()
        return round(float((found - expected).norm() / expected.norm()), 5)

    def tiles(self, rows: int) -> dict[str, Any]:
        """Return microseconds of both products by tile."""
        limit = min(most for most in CANDIDATES[self.kind] if rows <= most)
        inputs = self.inputs(rows)
        found: dict[str, Any] = {}
        for tile in CANDIDATES[self.kind][limit]:
            routed = [self.routed(x)[0] for x in inputs]
            lists = [experts.sort_pairs(ids, self.moe.experts, tile.pairs) for ids in routed]
            hidden = [self.first(x, both, tile) for x, both in zip(inputs, lists, strict=True)]
            found[str(tuple(tile))] = [
                timed(partial(self._listed, self.first, inputs, lists, tile)),
                timed(partial(self._listed, self.second, hidden, lists, tile)),
            ]
        return {"rows": rows, "tiles": found}

    def _listed(self, run: Any, x: Any, lists: Any, tile: Tile, index: int) -> None:
        run(x[index], lists[index], tile)


def timed(run: Callable[[int], Any]) -> float:
    """Return the microseconds of one of `INPUTS` runs under one graph."""

    def run_all() -> None:
        for index in range(INPUTS):
            run(index)

    return round(time_graph(run_all)[0] / INPUTS, 1)


def steps(config: Architecture, kind: WeightsKind) -> dict[str, Any]:
    """Return milliseconds of decoding steps by batch, and of a cold prompt."""
    blocks = 40_000 if any(layer.window for layer in config.layers) else 12_000
    bench = Bench(config, blocks, weights=kind)
    found: dict[int, Any] = {}
    for batch in BATCHES:
        work = Workload(f"sweep-{batch}", batch, ((batch, 448),))
        run = bench.run(work.prompts(batch), work.name.encode())
        found[batch] = {k: run[k] for k in ("step_ms", "step_ms_p95", "host_ms")}
        bench.core.cache.erase(work.name.encode())
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(100_000) for _ in range(2048)) for _ in range(4)]
    cold = [bench.run([p], b"cold-%d" % i, 1)["first_token_ms"] for i, p in enumerate(prompts)]
    memory = round(torch.cuda.memory_allocated() / 1e9, 1)
    return {"steps": found, "cold_2048_ms": cold[1:], "memory_gb": memory}


def main() -> None:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--weights", default="auto", choices=["auto", "bf16", "fp8"])
    parser.add_argument("--parts", default="layer,steps")
    options = parser.parse_args()
    rate, flops = copy_rate(), product_rate()
    print_line(f"{describe(rate)}, product {flops / 1e12:.0f} TFLOP/s")
    results = Results()
    parts = options.parts.split(",")
    for name in options.models.split(","):
        with torch.inference_mode():
            bench = LayerBench(SHAPES[name], options.weights)
            for rows in ROWS:
                if "layer" in parts:
                    results.add({"model": name, **bench.measure(rows, rate, flops)})
                if "tiles" in parts:
                    results.add({"model": name, **bench.tiles(rows)})
        del bench
        release_memory()
        if "steps" in parts:
            results.add({"model": name, **steps(SHAPES[name], options.weights)})
            release_memory()
    results.write(options.json)


if __name__ == "__main__":
    main()
