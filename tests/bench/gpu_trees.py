"""Any tree on a GPU: random forests against the plain twin, and a tree of seven levels.

    python -m tests.bench.gpu_trees [--cases 12] [--seed 0]

Each case is a step over a random forest, planned by `engine.attention.gpu_backend` and computed by
the kernels as the runner launches them, padded to a bucket. Rows of some sequences are compared
with `kernels.reference`. Then requests over a tree of seven levels run through the core, for three
shapes of heads.
"""

from __future__ import annotations

import argparse
import time
import traceback

import numpy as np
import torch
from msgspec.structs import replace

from engine.attention.gpu_backend import GpuAttention
from engine.kv.format import kv_format
from engine.model_store import Architecture, Rope
from engine.runner.gpu_runner import BUCKETS, MIXED_BUCKETS, MIXED_CLASSES
from kernels.gpu.tree_attention import tree_attention
from kernels.gpu.work_list import Slices
from kernels.reference import paged_attention
from tests.bench.gpu_workloads import WORKLOADS, Bench
from tests.bench.models import BLOCK, LLAMA_8B, random_kv, with_layers
from tests.bench.results import print_line
from tests.unit.kernels.gpu.plan_checker import Int32, check_plan, random_forest, seven_levels

SHAPES = (
    *((32, 8, 128), (64, 8, 128), (40, 8, 128), (28, 4, 128), (128, 8, 128), (96, 32, 128)),
    *((16, 1, 128), (11, 1, 64), (71, 71, 64), (24, 8, 64), (18, 2, 32), (5, 5, 16)),
)
"""Query heads, KV heads, head dimension."""

BLOCKS, SEQUENCES, TOKENS = 6_000, 512, 8_480
ERROR_MAX = 8e-3


def model_of(heads: int, kv_heads: int, head_dim: int) -> Architecture:
    return replace(
        with_layers(LLAMA_8B, 2),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=131_072,
        ropes={"full": Rope(500_000.0, head_dim)},
    )


def tables_of(rng: np.random.Generator, slices: Slices, groups: Int32, width: int) -> Int32:
    """Return block tables [n, width] that agree where the groups say; a block may be in several
    places, since nothing is written."""
    table = rng.integers(0, BLOCKS, (len(slices.rows), width), dtype=np.int32)
    for first, end, first_block, end_block in groups.tolist():
        table[first:end, first_block:end_block] = table[first, first_block:end_block]
    return table


def run_case(attention: GpuAttention, kv: torch.Tensor, slices: Slices, groups: Int32) -> str:
    """Compute one step; return its shape and its worst error, or raise AssertionError."""
    rng = np.random.default_rng(len(groups))
    heads, kv_heads, dim = attention.spec.heads, attention.spec.kv_heads, attention.spec.head_dim
    seats = np.arange(len(slices.rows), dtype=np.int32)
    slices = Slices(slices.rows, slices.starts, (seats * attention.stride).astype(np.int32))
    table = tables_of(rng, slices, groups, attention.stride)
    attention.tables[: table.size] = torch.from_numpy(table.reshape(-1)).cuda()
    total, is_decoding = int(slices.rows.sum()), bool((slices.rows == 1).all())
    buckets = BUCKETS if is_decoding else MIXED_BUCKETS
    padded = next((bucket for bucket in buckets if bucket >= total), total)
    plan = attention.planner.plan(slices, groups, padded)
    check_plan(plan, slices, attention.planner, groups)
    attention.work.load(plan)
    lengths = torch.ones(padded, dtype=torch.int32)
    ends = np.cumsum(slices.rows)
    within = np.arange(total) - np.repeat(ends - slices.rows, slices.rows)
    lengths[:total] = torch.from_numpy(np.repeat(slices.starts, slices.rows) + 1 + within)
    q = torch.randn(padded, heads, dim, device="cuda").bfloat16()
    out = torch.full_like(q, float("nan"))
    tree_attention(
        q, kv, 1, attention.work, attention.tables, lengths.cuda(), out, attention.parts,
        classes=plan.classes if is_decoding else MIXED_CLASSES, causal=not is_decoding,
        dependent=True,
    )  # fmt: skip
    worst = 0.0
    for i in sorted({0, len(ends) - 1, *rng.integers(0, len(ends), 5).tolist()}):
        count, start = int(slices.rows[i]), int(slices.starts[i])
        rows = slice(int(ends[i]) - count, int(ends[i]))
        expected = paged_attention(q[rows], kv, 1, table[i].tolist(), start)
        got = out[rows].double()
        worst = max(worst, float((got - expected).norm() / expected.norm()))
    assert worst < ERROR_MAX, f"error {worst} for {heads} / {kv_heads} heads of {dim}"
    assert int(attention.parts.queue) == 0, "the queue is not reset"
    return f"{total} rows, {len(groups)} groups, {plan.parts_max} parts, {plan.tile_count} tiles"


def sweep(cases: int, seed: int) -> None:
    """Print a line per shape: failures, and the largest case."""
    for shape in SHAPES:
        config = model_of(*shape)
        form = kv_format(config, torch.bfloat16, BLOCK)
        kv = random_kv(form, BLOCKS, torch.device("cuda"))
        attention = GpuAttention(
            config, kv, context=config.context, seats=SEQUENCES, tokens_max=TOKENS
        )
        failed, lines, started = 0, [], time.perf_counter()
        for case in range(cases):
            rng = np.random.default_rng(1_000 * seed + case)
            prompts = int(rng.choice([1, 1, 2, 64, 300]))
            forest = random_forest(
                rng, int(rng.choice([1, 7, 64, 192, 512])) // (8 if prompts > 64 else 1) or 1,
                int(rng.choice([512, 8_192, 131_072])), int(rng.choice([0, 1, 3, 7, 40, 1_000])),
                blocks=int(rng.choice([1, 5, 40, 500])), prompts=prompts,
            )  # fmt: skip
            if int(forest[0].rows.sum()) > TOKENS:
                continue  # a step of the engine has no more tokens
            try:
                lines.append(run_case(attention, kv.data, *forest))
            except Exception:
                failed += 1
                print_line(f"{shape} case {case}:\n{traceback.format_exc(limit=-3)}")
        lines.append(run_case(attention, kv.data, *seven_levels()))
        seconds = time.perf_counter() - started
        print_line(f"{shape}: {failed} of {cases} failed, {seconds:.0f} s; {lines[-1]}")
        del attention, kv
        torch.cuda.empty_cache()


def seven_levels_through_core() -> None:
    """Run W7 with three shapes of heads, on four layers: all requests end as done."""
    (work,) = (work for work in WORKLOADS if work.name == "W7")
    for heads in (32, 40, 64):
        config = replace(with_layers(LLAMA_8B, 4), heads=heads)
        got = Bench(config, 12_000).workload(work)
        print_line(f"W7, 4 layers, {heads} / 8 heads: floor {got['floor_ms']}, {got['warm']}")
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with torch.inference_mode():
        sweep(options.cases, options.seed)
    seven_levels_through_core()


if __name__ == "__main__":
    main()
