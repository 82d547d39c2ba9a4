"""Attention of one layer on a GPU, against the bytes that it must move.

    python -m tests.bench.gpu_kernels [--head-dim 128] [--plain] [--json FILE]

`--plain` leaves Hopper's hand-scheduled tiles out. A case's floor is its unique KV bytes over the
measured copy rate, a prompt's floor its products. The time is the median of nine runs of a CUDA
graph over several layers, each with its own KV, which together exceed the L2. Every case is checked
against float64 on a few rows before it is timed.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kernels.gpu.tree_attention
from kernels.gpu.tree_attention import PartialOutputs, WorkList, tree_attention
from kernels.gpu.work_list import CLASSES, Slices, WorkPlanner
from kernels.reference import paged_attention
from tests.bench.device import copy_rate, describe, time_graph
from tests.bench.results import Results, print_line

HEADS, KV_HEADS, SIZE = 32, 8, 16

# name: rows, levels of (nodes, keys per node) from the root; the last level is the rows' own keys.
CASES: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "W1 1x2048 + 256x64": (256, [(1, 2048), (256, 64)]),
    "W2 8x2048 + 256x64": (256, [(8, 2048), (256, 64)]),
    "W3 8x8192 + 256x64": (256, [(8, 8192), (256, 64)]),
    "W6 tree": (256, [(1, 1024), (8, 2048), (32, 512), (256, 64)]),
    "flat 128x1152": (128, [(128, 1152)]),
    "flat 256x1024": (256, [(256, 1024)]),
    "flat 16x8256": (16, [(16, 8256)]),
    "flat 1x8256": (1, [(1, 8256)]),
    "flat 1x512": (1, [(1, 512)]),
}

PROMPTS = ((8192, 0), (4096, 0), (2048, 6144), (512, 0))
"""(computed tokens, cached tokens before them)."""


class CaseTensors:
    """One case's tensors: pool, block tables, groups and queries."""

    def __init__(
        self, rows: int, levels: list[tuple[int, int]], layers: int, head_dim: int
    ) -> None:
        rng = np.random.default_rng(0)
        depth = sum(keys for _, keys in levels) // SIZE
        blocks = sum(nodes * keys for nodes, keys in levels) // SIZE + 1
        fresh = rng.permutation(blocks - 1).astype(np.int32) + 1
        table = np.zeros((rows, depth + 8), np.int32)
        groups, at, taken = [], 0, 0
        for level, (nodes, keys) in enumerate(levels):
            n, per = keys // SIZE, rows // nodes
            ids = fresh[taken : taken + nodes * n].reshape(nodes, n)
            table[:, at : at + n] = np.repeat(ids, per, axis=0)
            if level < len(levels) - 1:
                groups += [(i * per, (i + 1) * per, at, at + n) for i in range(nodes)]
            taken, at = taken + nodes * n, at + n
        self.rows, self.layers, self.table = rows, layers, table
        # The last key of each row is the token being computed.
        self.slices = Slices(
            np.ones(rows, np.int32),
            np.full(rows, depth * SIZE - 1, np.int32),
            np.arange(rows, dtype=np.int32) * table.shape[1],
        )
        self.groups = np.array(groups, np.int32).reshape(-1, 4)
        self.bytes = (blocks - 1) * SIZE * 2 * KV_HEADS * head_dim * 2
        self.kv = torch.empty(
            blocks, layers, 2, KV_HEADS, SIZE, head_dim, dtype=torch.bfloat16, device="cuda"
        ).normal_()
        self.q = torch.randn(rows, HEADS, head_dim, device="cuda").bfloat16()
        self.out = torch.full_like(self.q, float("nan"))
        self.lengths = torch.full((rows,), depth * SIZE, dtype=torch.int32, device="cuda")
        self.block_ids = torch.from_numpy(table.reshape(-1)).cuda()

    def error(self) -> float:
        worst = 0.0
        for row in sorted({0, self.rows // 3, self.rows - 1}):
            ids = self.table[row, : int(self.lengths[row]) // SIZE].tolist()
            keys = self.kv[ids, 0].double().permute(1, 2, 0, 3, 4).flatten(2, 3)
            keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
            query = self.q[row].double()
            scores = torch.einsum("hd,hnd->hn", query, keys[0]) / query.shape[-1] ** 0.5
            expected = torch.einsum("hn,hnd->hd", scores.softmax(-1), keys[1])
            worst = max(worst, float((self.out[row].double() - expected).norm() / expected.norm()))
        return worst


def measure(
    name: str, planner: WorkPlanner, head_dim: int, *, grouped: bool = True, pdl: bool = True
) -> dict[str, Any]:
    rows, levels = CASES[name]
    size = sum(nodes * keys for nodes, keys in levels) * KV_HEADS * head_dim * 4
    layers = max(1, min(16, math.ceil(600e6 / size)))
    tensors = CaseTensors(rows, levels, layers, head_dim)
    started = time.perf_counter()
    groups = tensors.groups if grouped else tensors.groups[:0]
    plan = planner.plan(tensors.slices, groups)
    planned_us = (time.perf_counter() - started) * 1e6
    work = WorkList(CLASSES, planner.multiprocessors, rows, 65536, tensors.q.device)
    work.load(plan)
    parts = PartialOutputs(plan.parts_max, rows, HEADS, head_dim, tensors.q.device)
    used = plan.classes

    def run() -> None:
        for layer in range(layers):
            tree_attention(
                tensors.q, tensors.kv, layer, work, tensors.block_ids, tensors.lengths, tensors.out,
                parts, classes=used, causal=False, dependent=pdl, merge=plan.parts_max > 1,
            )  # fmt: skip

    tree_attention(
        tensors.q, tensors.kv, 0, work, tensors.block_ids, tensors.lengths, tensors.out, parts,
        classes=used, causal=False, merge=plan.parts_max > 1,
    )  # fmt: skip
    torch.cuda.synchronize()
    error = tensors.error()
    median, low, high = (t / layers for t in time_graph(run))
    tiles = [len(one.tiles) for one in plan.work]
    return {
        "case": name,
        "grouped": grouped,
        "pdl": pdl,
        "us": round(median, 1),
        "us_min": round(low, 1),
        "us_max": round(high, 1),
        "bytes": tensors.bytes,
        "gb_per_s": round(tensors.bytes / median / 1e3),
        "error": error,
        "tiles": tiles,
        "parts": plan.parts_max,
        "plan_us": round(planned_us),
        "span_min": planner.span_keys_min,
    }


def measure_prompt(tokens: int, cached: int, planner: WorkPlanner, head_dim: int) -> dict[str, Any]:
    """Measure one prompt's attention in us and TFLOP/s, after a check against float64 on three
    rows."""
    layers, total = 4, tokens + cached
    blocks = -(-total // SIZE)
    kv = torch.empty(
        blocks + 1, layers, 2, KV_HEADS, SIZE, head_dim, dtype=torch.bfloat16, device="cuda"
    ).normal_()
    table = np.zeros(blocks + 8, np.int32)
    table[:blocks] = np.random.default_rng(1).permutation(blocks) + 1
    q = torch.randn(tokens, HEADS, head_dim, device="cuda").bfloat16()
    out = torch.full_like(q, float("nan"))
    lengths = torch.arange(cached + 1, total + 1, dtype=torch.int32, device="cuda")
    block_ids = torch.from_numpy(table).cuda()
    one = (np.array([n], np.int32) for n in (tokens, cached, 0))
    plan = planner.plan(Slices(*one), np.zeros((0, 4), np.int32))
    work = WorkList(CLASSES, planner.multiprocessors, tokens, 65536, q.device)
    work.load(plan)
    parts = PartialOutputs(plan.parts_max, tokens, HEADS, head_dim, q.device)

    def run(count: int = layers) -> None:
        for layer in range(count):
            tree_attention(
                q, kv, layer, work, block_ids, lengths, out, parts, classes=plan.classes,
                merge=plan.parts_max > 1,
            )  # fmt: skip

    run(1)
    worst, ids = 0.0, table[:blocks].tolist()
    queries, keys, outputs = q.cpu(), kv[:, :1].cpu(), out.double().cpu()
    for row in (0, tokens // 3, tokens - 1):
        expected = paged_attention(queries[row : row + 1], keys, 0, ids, cached + row)[0]
        worst = max(worst, float((outputs[row] - expected).norm() / expected.norm()))
    us = time_graph(run)[0] / layers
    products = 4 * head_dim * HEADS * (tokens * cached + tokens * (tokens + 1) / 2)
    return {
        "case": f"prompt {tokens} after {cached}",
        "us": round(us, 1),
        "tflop_per_s": round(products / us / 1e6),
        "error": worst,
        "parts": plan.parts_max,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.plain:
        kernels.gpu.tree_attention.HAS_GLUON = False
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    print_line(f"{describe(copy_rate())}, {multiprocessors} multiprocessors")
    base = WorkPlanner(KV_HEADS, HEADS // KV_HEADS, SIZE, multiprocessors)
    results = Results()
    runs: list[tuple[str, WorkPlanner, dict[str, bool]]] = []
    for name in CASES:
        shared = len(CASES[name][1]) > 1
        runs.append((name, base, {}))
        if shared:
            runs += [(name, base, {"pdl": False}), (name, base, {"grouped": False})]
            runs += [(name, replace(base, span_keys_min=s), {}) for s in (512, 2048, 4096)]
    for name, planner, options_ in runs:
        try:
            results.add(measure(name, planner, options.head_dim, **options_))
        except (RuntimeError, ValueError) as failure:
            print_line(f"{name} {options_} failed: {failure}")
        torch.cuda.empty_cache()
    for tokens, cached in PROMPTS:
        results.add(measure_prompt(tokens, cached, base, options.head_dim))
    results.write(options.json)


if __name__ == "__main__":
    main()
