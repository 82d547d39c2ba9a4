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
import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.kv.format import kv_format
from engine.model_store import Layer
from tests.bench.gpu_families import TREES, LayerBench
from tests.bench.gpu_workloads import (
    BLOCK,
    KV_DTYPES,
    LLAMA_8B,
    WORKLOADS,
    Bench,
    copy_rate,
    print_line,
)

CONTEXT = 32_768 + 256
FLAT = (128, 0, 1152)
POOL_BYTES = 117_000_000_000
"""What an H200 has left beside 8B weights, graphs and buffers at the default share of memory."""


def attention(rate: float) -> list[dict[str, Any]]:
    """Measure one layer in both formats."""
    config = msgspec.structs.replace(LLAMA_8B, layers=(Layer(),), context=CONTEXT)
    results = []
    for tree, sizes in {**TREES, "flat": FLAT}.items():
        for name, dtype in KV_DTYPES.items():
            (found,) = LayerBench(config, sizes, dtype).measure(rate)
            results.append({"attention": tree, "kv": name, **found})
            print_line(json.dumps(results[-1]))
            torch.cuda.empty_cache()
    return results


def steps(blocks: int) -> list[dict[str, Any]]:
    """Run W1 and W4 with both pools."""
    results = []
    for name, dtype in KV_DTYPES.items():
        bench = Bench(LLAMA_8B, blocks, kv_dtype=dtype)
        for work in WORKLOADS:
            if work.name in ("W1", "W4"):
                results.append({"kv": name, **bench.workload(work)})
                print_line(json.dumps(results[-1]))
        del bench
        torch.cuda.empty_cache()
    return results


def main() -> None:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, default=12_000)
    options = parser.parse_args()
    rate = copy_rate()
    print_line(f"{torch.cuda.get_device_name()}, copy {rate / 1e9:.0f} GB/s")
    tokens = {
        name: POOL_BYTES // kv_format(LLAMA_8B, dtype, BLOCK).block_bytes * BLOCK
        for name, dtype in KV_DTYPES.items()
    }
    results: list[dict[str, Any]] = [{"pool_bytes": POOL_BYTES, "tokens": tokens}]
    print_line(json.dumps(results[0]))
    results += attention(rate)
    results += steps(options.blocks)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
