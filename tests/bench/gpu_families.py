"""Families on a GPU, whole and by the layer: python -m tests.bench.gpu_families [--json FILE]

Random weights in bf16, in the shapes of Qwen3-8B, Gemma-3-12B and gpt-oss-20b. Whole models run W1
and W2 of `tests.bench.gpu_workloads`, then a step of a few rows at 32k; gpt-oss's whole model is
`tests.bench.gpu_experts`'s. Of all, the attention of one layer with a window and of one without is
timed alone, decoding, under a CUDA graph, with the worst error against the reference.

Floors: the unique bytes of weights and keys over the measured copy rate. A layer with a window of W
reads W keys a row whatever the context, so at 32k Gemma 3's (W = 1,024) should take 1/32 of a full
layer's time, and gpt-oss's (W = 128) what its launches take.
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
from kernels import reference_int8
from kernels.reference import paged_attention
from tests.bench.device import copy_rate, describe, time_graph
from tests.bench.gpu_workloads import WORKLOADS, Bench, Workload
from tests.bench.models import BLOCK, GEMMA3_12B, GPT_OSS_WITHOUT_EXPERTS, QWEN3_8B, random_kv
from tests.bench.results import Results, print_line

LONG_ROWS = 8
RUNS = 16
"""Runs of a layer in one graph: a launch of the graph then costs little of the time."""


SHAPES = {
    "Qwen3-8B": QWEN3_8B,
    "Gemma-3-12B": GEMMA3_12B,
    "gpt-oss-20b": GPT_OSS_WITHOUT_EXPERTS,
}

TREES: dict[str, tuple[int, int, int]] = {
    "W1": (256, 2048, 64),
    "32k": (LONG_ROWS, 0, 32_768),
}
"""Decoding rows, keys that all share, and keys of each row alone."""


class LayerBench:
    """Decoding attention of single layers of one shape, over random KV."""

    def __init__(
        self,
        config: Architecture,
        tree: tuple[int, int, int],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        rows, shared, own = tree
        # One layer of each kind, so that the pool stays small.
        kinds = {layer.window: layer for layer in config.layers}
        self.config = replace(config, layers=tuple(kinds.values()))
        device = torch.device("cuda")
        form = kv_format(self.config, dtype, BLOCK)
        per_row, self.shared_blocks = own // BLOCK, shared // BLOCK
        self.kv = random_kv(form, self.shared_blocks + rows * per_row, device)
        self.attention = GpuAttention(
            self.config, self.kv, context=shared + own, seats=rows, tokens_max=rows
        )
        tables = [
            [*range(self.shared_blocks), *range(first, first + per_row)]
            for first in range(self.shared_blocks, self.shared_blocks + rows * per_row, per_row)
        ]
        flat = np.zeros((rows, self.attention.stride), np.int32)
        flat[:, : len(tables[0])] = tables
        self.attention.tables[: flat.size] = torch.from_numpy(flat.reshape(-1)).to(device)
        self.tables, self.rows, self.keys = tables, rows, shared + own
        self.positions = torch.full((rows,), self.keys - 1, dtype=torch.int32, device=device)
        self.lengths = self.positions + 1
        self.slots = torch.tensor(
            [table[-1] * BLOCK + BLOCK - 1 for table in tables], dtype=torch.int32, device=device
        )
        spec = attention_spec(self.config)
        self.qkv = torch.randn(rows, spec.qkv_width, device=device).bfloat16()
        self.sinks = torch.randn(spec.heads, device=device) if config.sinks else None

    def run(self, layer: int) -> torch.Tensor:
        """Rotate, write KV and attend in one layer."""
        plan = self.attention.plan
        assert plan is not None
        return self.attention.attend(
            layer, self.qkv, positions=self.positions, slots=(self.slots,), lengths=self.lengths,
            classes=plan.classes, merge=plan.parts_max > 1, causal=False, sinks=self.sinks,
        )  # fmt: skip

    def _many(self, layer: int) -> None:
        for _ in range(RUNS):
            self.run(layer)

    def measure(self, rate: float) -> list[dict[str, Any]]:
        """Return time, floor and error of each kind of layer."""
        rows, spec = self.rows, attention_spec(self.config)
        groups = (Group(0, rows, 0, self.shared_blocks),) if self.shared_blocks else ()
        ones = np.ones(rows, np.int32)
        self.attention.prepare(
            tuple(range(rows)), ones, ones * (self.keys - 1), np.arange(rows, dtype=np.int32),
            groups, rows,
        )  # fmt: skip
        found = []
        for layer, kind in enumerate(self.config.layers):
            out = self.run(layer).view(rows, spec.heads, spec.head_dim).clone()
            own = self.keys - self.shared_blocks * BLOCK
            unique = self.shared_blocks * BLOCK + rows * own
            if kind.window:
                unique = min(unique, rows * min(kind.window, self.keys))
            token_bytes = self.kv.format.block_bytes // BLOCK // len(self.config.layers)
            floor_s = unique * token_bytes / rate
            found.append(
                {
                    "window": kind.window,
                    "us": round(time_graph(partial(self._many, layer))[0] / RUNS, 1),
                    "floor_us": round(floor_s * 1e6, 1),
                    "error": self._error(layer, kind.window, out),
                }
            )
        return found

    def _error(self, layer: int, window: int, out: torch.Tensor) -> float:
        """Return the largest relative error of a few rows against the reference."""
        spec, worst = attention_spec(self.config), 0.0
        cos, sin = self.attention.rotations[layer]
        at = self.keys - 1
        q = self.qkv.view(self.rows, -1, spec.head_dim)[:, : spec.heads].float()
        half = spec.head_dim // 2
        first, second = q[..., :half], q[..., half:]
        turned = torch.cat(
            [first * cos[at] - second * sin[at], second * cos[at] + first * sin[at]], -1
        )
        for row in {0, self.rows - 1}:
            kv = self.kv.data[self.tables[row]]
            if self.kv.format.is_int8:
                kv = reference_int8.widen(kv.flatten(-2))
            expected = paged_attention(
                turned[row : row + 1].bfloat16(), kv, layer, range(len(kv)), at,
                scale=spec.scale, window=window, sinks=self.sinks,
            )  # fmt: skip
            distance = (out[row].double() - expected[0]).norm() / expected.norm()
            worst = max(worst, float(distance))
        return round(worst, 5)


def whole(name: str, config: Architecture, blocks: int) -> dict[str, Any]:
    """Run W1 and W2, and a few rows at 32k, through the core."""
    bench = Bench(config, blocks)
    results = {work.name: bench.workload(work) for work in WORKLOADS if work.name in ("W1", "W2")}
    long = Workload("32k", LONG_ROWS, ((1, 30_720), (LONG_ROWS, 2048)))
    return {"model": name, **results, "32k": bench.workload(long)}


def main() -> None:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers-only", action="store_true")
    parser.add_argument("--models", default=",".join(SHAPES), help="with commas")
    parser.add_argument("--blocks", type=int, default=60_000, help="of one KV group's layers")
    options = parser.parse_args()
    rate = copy_rate()
    print_line(describe(rate))
    results = Results()
    chosen = {name: SHAPES[name] for name in options.models.split(",")}
    for name, config in chosen.items():
        for tree, sizes in TREES.items():
            found = LayerBench(config, sizes).measure(rate)
            results.add({"model": name, "tree": tree, "layers": found})
            torch.cuda.empty_cache()
    for name, config in chosen.items():
        if options.layers_only or name == "gpt-oss-20b":
            continue
        blocks = options.blocks if any(layer.window for layer in config.layers) else 12_000
        results.add(whole(name, config, blocks))
        torch.cuda.empty_cache()
    results.write(options.json)


if __name__ == "__main__":
    main()
