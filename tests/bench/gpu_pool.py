"""The device pool's formats beside each other on a GPU.

    python -m tests.bench.gpu_pool [--json FILE]

Llama-3.1-8B's shape. *Attention*: one layer, decoding, under a CUDA graph, over random KV in bf16
and in int8, with the worst error against the reference over the same values: 256 rows on a shared
prefix (W1), 128 rows of 1,152 keys of their own (`flat`), and 8 rows at 32k. The floor is its
unique KV over the measured copy rate. *Steps*: W1 and W4 of `tests.bench.gpu_workloads` through the
core. *Tokens*: what a pool of the memory left beside the weights holds. Takes two minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from msgspec.structs import replace

from engine.kv.format import kv_format
from tests.bench.device import copy_rate, describe
from tests.bench.gpu_families import TREES, LayerBench
from tests.bench.gpu_workloads import WORKLOADS, Bench
from tests.bench.models import BLOCK, KV_DTYPES, LLAMA_8B, LONG_CONTEXT, with_layers
from tests.bench.results import Results, print_line

FLAT = (128, 0, 1152)
POOL_BYTES = 117_000_000_000
"""What an H200 has left beside 8B weights, graphs and buffers at the default share of memory."""


def attention(results: Results, rate: float) -> None:
    """Measure one layer in both formats."""
    config = replace(with_layers(LLAMA_8B, 1), context=LONG_CONTEXT)
    for tree, sizes in {**TREES, "flat": FLAT}.items():
        for name, dtype in KV_DTYPES.items():
            (found,) = LayerBench(config, sizes, dtype).measure(rate)
            results.add({"attention": tree, "kv": name, **found})
            torch.cuda.empty_cache()


def steps(results: Results, blocks: int) -> None:
    """Run W1 and W4 with both pools."""
    for name, dtype in KV_DTYPES.items():
        bench = Bench(LLAMA_8B, blocks, kv_dtype=dtype)
        for work in WORKLOADS:
            if work.name in ("W1", "W4"):
                results.add({"kv": name, **bench.workload(work)})
        del bench
        torch.cuda.empty_cache()


def main() -> None:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, default=12_000)
    options = parser.parse_args()
    rate = copy_rate()
    print_line(describe(rate))
    results = Results()
    tokens = {
        name: POOL_BYTES // kv_format(LLAMA_8B, dtype, BLOCK).block_bytes * BLOCK
        for name, dtype in KV_DTYPES.items()
    }
    results.add({"pool_bytes": POOL_BYTES, "tokens": tokens})
    attention(results, rate)
    steps(results, options.blocks)
    results.write(options.json)


if __name__ == "__main__":
    main()
