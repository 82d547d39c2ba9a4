"""Models without kernels of their own on a GPU: python -m tests.bench.gpu_torch_path [--json FILE]

DeepSeek-V2-Lite's shape (latent attention, experts) runs in torch, step by step. Random weights in
bf16, built as the server builds them; prompts of 2,048 shared tokens and 64 of their own, 32 tokens
out, greedy, 1 and 32 at once. `hits`: cached tokens of a warm run over its prompts' tokens but the
last ones. The floor of a step is all weights but the embedding, and the keys, over the copy rate:
with 32 rows nearly every expert is chosen by one of them.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch

from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.model_store import Architecture, ModelCard
from engine.runner.gpu_build import build_gpu_runner
from engine.weights import expected_shapes
from tests.bench.device import copy_rate, describe
from tests.bench.gpu_workloads import CoreBench, Workload
from tests.bench.models import BLOCK, V2_LITE
from tests.bench.results import Results, print_line

OUTPUT = 32
SHAPES = {"V2-Lite": V2_LITE}


class TorchPathBench(CoreBench):
    """A core over a model that the server would run in torch on the GPU."""

    def __init__(self, name: str, config: Architecture, rate: float) -> None:
        self.copy_rate = rate
        card = ModelCard(
            name=name, digest="random-0", config=config, source="random:0", folder="",
            template_digest="none", stop_token_ids=(), special_token_ids=(),
        )  # fmt: skip
        settings = EngineConfig(
            device="cuda", kv_blocks=4096, step_tokens_max=2048, prefill_chunk_tokens_max=2048
        )
        began_s = time.perf_counter()
        built = build_gpu_runner(card, settings)
        self.built_s = time.perf_counter() - began_s
        sizes = {name: math.prod(shape) for name, shape in expected_shapes(config).items()}
        self.weight_bytes = 2 * (sum(sizes.values()) - sizes["model.embed_tokens.weight"])
        self.token_bytes = built.kv_format.block_bytes // BLOCK
        cache = PrefixCache(blocks=built.blocks, block_size=BLOCK, windows=built.kv_format.windows)
        self.core = Core(
            cache, built.runner, settings.for_device(built.device), time.perf_counter,
            vocab_size=config.vocab, context_tokens=built.context,
            pipeline_depth=built.pipeline_depth,
        )  # fmt: skip

    def measure(self, rows: int) -> dict[str, Any]:
        """Run `rows` prompts cold, then warm; return both with the floor of a step."""
        work = Workload(f"{rows} at once", rows, ((1, 2048), (rows, 64)))
        prompts = work.prompts(rows)
        cold, warm = (self.run(prompts, work.name.encode(), OUTPUT) for _ in range(2))
        hits = warm["cached_tokens"] / (rows * (work.context - 1))
        return {
            "rows": rows, **self.floor(work, OUTPUT), "cold": cold, "warm": warm,
            "hits": round(hits, 4),
        }  # fmt: skip


def main() -> None:
    """Print one JSON line per model and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(SHAPES), help="with commas")
    options = parser.parse_args()
    rate = copy_rate()
    print_line(describe(rate))
    results = Results()
    for name in options.models.split(","):
        bench = TorchPathBench(name, SHAPES[name], rate)
        sizes = {"weights_gb": round(bench.weight_bytes / 1e9, 1), "token_bytes": bench.token_bytes}
        for rows in (1, 32):
            found = bench.measure(rows)
            results.add({"model": name, "built_s": round(bench.built_s, 1), **sizes, **found})
        del bench
        torch.cuda.empty_cache()
    results.write(options.json)


if __name__ == "__main__":
    main()
