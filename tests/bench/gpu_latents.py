"""Latent attention on a GPU, by the layer and in a whole model: python -m tests.bench.gpu_latents

    --parts layer,steps   what is measured
    --json FILE

`layer` times one layer's decoding attention of DeepSeek-V2-Lite's shape (16 heads) and of V3's
(128), rotation and KV write included, over random records under a CUDA graph. Its floor is the
unique records over the copy rate, or the operations of scores and values, whichever takes longer;
`error` is against the reference. `steps` runs V2-Lite's whole shape through the engine's core with
random weights: prompts of 2,048 shared tokens and 64 of their own, 128 tokens out, cold then warm.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from engine.attention.gpu_backend import GpuAttention
from engine.attention.interface import attention_spec
from engine.kv.format import kv_format
from engine.model_store import Architecture
from engine.plan import Group
from kernels.reference import paged_attention, rotate
from tests.bench.device import copy_rate, describe, release_memory, time_graph
from tests.bench.gpu_experts import product_rate
from tests.bench.gpu_workloads import Bench, Workload
from tests.bench.models import BLOCK, V2_LITE, random_kv, with_layers
from tests.bench.results import Results, print_line

CONTEXT = 4096
RUNS = 8
"""Runs of a layer in one graph: a launch of the graph then costs little of the time."""

V3_LAYER = replace(with_layers(V2_LITE, 1), heads=128)
LAYERS = {"V2-Lite": with_layers(V2_LITE, 1), "V3": V3_LAYER}
TREES = ((1, 0), (32, 0), (32, 2048), (128, 0), (128, 2048))
"""Decoding rows at `CONTEXT`, and how many of their keys all share."""
BATCHES = (1, 8, 32, 64, 128)


class LayerBench:
    """Decoding attention of one layer over random records."""

    def __init__(self, config: Architecture, rows: int, shared: int) -> None:
        self.config, self.rows, self.shared = config, rows, shared
        device = torch.device("cuda")
        form = kv_format(config, torch.bfloat16, BLOCK)
        first, own = shared // BLOCK, (CONTEXT - shared) // BLOCK
        self.kv = random_kv(form, first + rows * own, device)
        self.attention = GpuAttention(config, self.kv, context=CONTEXT, seats=rows, tokens_max=rows)
        self.tables = [
            [*range(first), *range(start, start + own)]
            for start in range(first, first + rows * own, own)
        ]
        flat = np.zeros((rows, self.attention.stride), np.int32)
        flat[:, : len(self.tables[0])] = self.tables
        self.attention.tables[: flat.size] = torch.from_numpy(flat.reshape(-1)).to(device)
        self.positions = torch.full((rows,), CONTEXT - 1, dtype=torch.int32, device=device)
        self.lengths = self.positions + 1
        self.slots = torch.tensor(
            [table[-1] * BLOCK + BLOCK - 1 for table in self.tables],
            dtype=torch.int32, device=device,
        )  # fmt: skip
        self.qkv = torch.randn(rows, attention_spec(config).qkv_width, device=device).bfloat16()

    def run(self) -> torch.Tensor:
        """Rotate, write and attend."""
        plan = self.attention.plan
        assert plan is not None
        return self.attention.attend(
            0, self.qkv, positions=self.positions, slots=(self.slots,), lengths=self.lengths,
            classes=plan.classes, merge=plan.parts_max > 1, causal=False,
        )  # fmt: skip

    def measure(self, rate: float, flops: float) -> dict[str, Any]:
        """Return microseconds, floor and error."""
        rows, spec = self.rows, attention_spec(self.config)
        groups = (Group(0, rows, 0, self.shared // BLOCK),) if self.shared else ()
        ones = np.ones(rows, np.int32)
        self.attention.prepare(
            tuple(range(rows)), ones, ones * (CONTEXT - 1), np.arange(rows, dtype=np.int32),
            groups, rows,
        )  # fmt: skip
        queries = self.qkv.clone()
        found = self.run().view(rows, spec.heads, spec.latent)
        error = self._error(queries, found)
        unique = self.shared + rows * (CONTEXT - self.shared)
        moved_s = unique * spec.head_dim * 2 / rate
        work_s = 2 * rows * spec.heads * CONTEXT * (spec.head_dim + spec.latent) / flops
        us = time_graph(partial(self._many))[0] / RUNS
        return {
            "rows": rows, "shared": self.shared, "us": round(us, 1),
            "bytes_us": round(moved_s * 1e6, 1), "work_us": round(work_s * 1e6, 1), "error": error,
        }  # fmt: skip

    def _many(self) -> None:
        for _ in range(RUNS):
            self.run()

    def _error(self, queries: torch.Tensor, found: torch.Tensor) -> float:
        """Return the largest relative error of the first row and the last."""
        spec, worst = attention_spec(self.config), 0.0
        cos, sin = (table[-1:] for table in self.attention.rotations[0])
        for row in {0, self.rows - 1}:
            query = queries[row].view(1, -1, spec.head_dim)[:, : spec.heads]
            expected = paged_attention(
                rotate(query, cos, sin), self.kv.data, 0, self.tables[row], CONTEXT - 1,
                scale=spec.scale, latent=spec.latent,
            )  # fmt: skip
            distance = (found[row].double() - expected[0]).norm() / expected.norm()
            worst = max(worst, float(distance))
        return round(worst, 5)


def steps() -> list[dict[str, Any]]:
    """Return steps and first tokens of V2-Lite's shape by batch."""
    bench = Bench(V2_LITE, 12_000)
    found = []
    for rows in BATCHES:
        work = Workload(f"{rows} at once", rows, ((1, 2048), (rows, 64)))
        prompts = work.prompts(rows)
        cold, warm = (bench.run(prompts, work.name.encode()) for _ in range(2))
        hits = warm["cached_tokens"] / (rows * (work.context - 1))
        found.append({"rows": rows, "cold": cold, "warm": warm, "hits": round(hits, 4)})
    return found


def main() -> None:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", default="layer,steps")
    options = parser.parse_args()
    rate, flops = copy_rate(), product_rate()
    print_line(f"{describe(rate)}, product {flops / 1e12:.0f} TFLOP/s")
    results = Results()
    parts = options.parts.split(",")
    for name, config in LAYERS.items() if "layer" in parts else ():
        for rows, shared in TREES:
            with torch.inference_mode():
                found = LayerBench(config, rows, shared).measure(rate, flops)
            results.add({"layer": name, **found})
            release_memory()
    for found in steps() if "steps" in parts else ():
        results.add({"model": "V2-Lite", **found})
    results.write(options.json)


if __name__ == "__main__":
    main()
