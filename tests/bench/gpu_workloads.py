"""The engine on a GPU at Llama-3.1-8B's shape: python -m tests.bench.gpu_workloads [--json FILE]

Random weights, bf16, prefix caching on, 128 output tokens, greedy, end tokens ignored. Every
workload runs twice with the same prompts: cold, then warm. A *step* is the time between two
collected steps in which every row decodes at full batch. The *floor* of a step is its unique bytes,
weights and KV, over the measured copy rate.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engine.api import CacheGrant, Finished, Request, Sampling, Tokens
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig, WeightsKind
from engine.core.constraints import Constraints
from engine.core.core import Core
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture
from engine.models.decoder import DecoderModel
from engine.models.gpu_layers import GpuOps
from engine.plan import StepResult
from engine.runner.gpu_runner import GpuRunner
from engine.server.gc_tuning import FrozenHeap
from engine.server.levels_below import build_levels
from engine.server.server import SWITCH_INTERVAL_S
from engine.states.gpu_states import GpuStates
from kernels.reference_weights import Packed
from tests.bench.device import copy_rate, describe
from tests.bench.models import (
    BLOCK,
    KV_DTYPES,
    LLAMA_1B,
    LLAMA_8B,
    QWEN35_35B_A3B,
    VOCAB,
    packed_weights,
    with_layers,
)
from tests.bench.results import Results, print_line

SHAPES = {"llama-8b": LLAMA_8B, "llama-1b": LLAMA_1B, "qwen3.5-35b": QWEN35_35B_A3B}
OUTPUT = 128


@dataclass(frozen=True)
class Workload:
    """A workload: levels of (nodes, tokens per node) from the root; the last is the requests'
    own."""

    name: str
    requests: int
    levels: tuple[tuple[int, int], ...]

    def prompts(self, seed: int) -> list[tuple[int, ...]]:
        """Return one prompt per request; requests under one node share its tokens."""
        rng = random.Random(seed)
        nodes = [
            [[rng.randrange(VOCAB) for _ in range(tokens)] for _ in range(count)]
            for count, tokens in self.levels
        ]
        return [
            tuple(
                token
                for level, (count, _) in zip(nodes, self.levels, strict=True)
                for token in level[request * count // self.requests]
            )
            for request in range(self.requests)
        ]

    @property
    def context(self) -> int:
        return sum(tokens for _, tokens in self.levels)

    @property
    def unique(self) -> int:
        return sum(count * tokens for count, tokens in self.levels)


WORKLOADS = (
    Workload("W1", 256, ((1, 2048), (256, 64))),
    Workload("W2", 256, ((8, 2048), (256, 64))),
    Workload("W3", 256, ((8, 8192), (256, 64))),
    Workload("W4", 128, ((128, 1024),)),
    Workload("W6", 256, ((1, 1024), (8, 2048), (32, 512), (256, 64))),
    Workload("W7", 192, ((1, 300), (3, 700), (6, 333), (12, 517), (24, 129), (48, 250), (192, 45))),
    Workload("W8", 512, ((1, 2048), (512, 64))),
)


class TimedRunner(GpuRunner):
    """A GPU runner that measures how long the host waits for the GPU in `collect`."""

    waited_s = 0.0

    def collect(self) -> StepResult:
        """See `GpuRunner.collect`."""
        started = time.perf_counter()
        result = super().collect()
        self.waited_s = time.perf_counter() - started
        return result


class CoreBench:
    """A core over a model on a GPU. Subclasses set all attributes."""

    core: Core
    weight_bytes: int
    token_bytes: int
    copy_rate: float

    def waited_s(self) -> float:
        """Return how long the host has waited for the GPU in the last step; 0 where that is not
        measured."""
        return 0.0

    def run(
        self, prompts: list[tuple[int, ...]], namespace: bytes, output: int = OUTPUT
    ) -> dict[str, Any]:
        """Run all prompts at once to the end; return throughput and step times."""
        core, grant = self.core, CacheGrant(namespace)
        started = time.perf_counter()
        for index, tokens in enumerate(prompts):
            core.submit(Request(f"{index}", tokens, output, grant, Sampling(temperature=0)))
        first_s = 0.0
        cached = produced = 0
        steps: list[float] = []
        planning: list[float] = []
        before = time.perf_counter()
        while core.has_work():
            events = core.step()
            now = time.perf_counter()
            drawn = sum(isinstance(event, Tokens) for event in events)
            produced += drawn
            if drawn and not first_s:
                first_s = now - started
            if drawn == len(prompts):
                steps.append(now - before)
                planning.append(now - before - self.waited_s())
            before = now
            for event in events:
                if isinstance(event, Finished):
                    assert event.ending == "done", event
                    cached += event.usage.cached_tokens
        wall_s = time.perf_counter() - started
        steady = steps[4:-4] or steps or [0.0]
        return {
            "wall_s": round(wall_s, 3),
            "tok_s": round(produced / wall_s),
            "first_token_ms": round(first_s * 1e3, 2),
            "step_ms": round(statistics.median(steady) * 1e3, 3),
            "step_ms_p95": round(sorted(steady)[int(len(steady) * 0.95)] * 1e3, 3),
            "host_ms": round(statistics.median(planning[4:-4] or planning or [0.0]) * 1e3, 3),
            "cached_tokens": cached,
        }

    def floor(self, work: Workload, output: int = OUTPUT) -> dict[str, float]:
        """Return the bytes that a step of a workload moves, and the least time for them."""
        unique = work.unique + work.requests * output // 2
        moved = self.weight_bytes + unique * self.token_bytes
        return {
            "moved_gb": round(moved / 1e9, 2),
            "floor_ms": round(moved / self.copy_rate * 1e3, 2),
        }


def states_of(config: Architecture, kv: KvStorage, seats: int) -> tuple[GpuStates, ...]:
    """Return the states of a model's recurrent layers, if it has any."""
    if not config.recurrent_layers:
        return ()
    pool = kv.data.view(torch.uint8).flatten(1)
    return (GpuStates(config, torch.bfloat16, kv.data.device, seats, pool),)


class Bench(CoreBench):
    """A model whose layers have kernels, with random weights."""

    make_runner = TimedRunner

    def __init__(
        self,
        config: Architecture,
        blocks: int,
        levels: LevelsConfig | None = None,
        *,
        kv_dtype: torch.dtype = torch.bfloat16,
        sequences: int = 256,
        constraints: Constraints | None = None,
        like: Bench | None = None,
        weights: WeightsKind | Literal["int4"] = "auto",
    ) -> None:
        """`levels`: those below the pool. `sequences`: most at once. `like`: a bench whose model is
        used, with its weights. `weights`: as `engine.weights`."""
        device = torch.device("cuda")
        self.config = config
        form = kv_format(config, kv_dtype, BLOCK, has_groups=True)
        kv, seats = KvStorage(form, blocks, device), sequences + 32
        states = states_of(config, kv, seats)
        if like is None:
            loaded = packed_weights(config, weights)
            self.weight_bytes = sum(
                part.nbytes
                for name, one in loaded.items()
                if config.tie_embeddings or name != "model.embed_tokens.weight"
                for part in (one.parts if isinstance(one, Packed) else (one,))
            )
            self.model = DecoderModel(config, loaded, GpuOps(), *states)
        else:
            self.model, self.weight_bytes = like.model, like.weight_bytes
        self.token_bytes = form.block_bytes // BLOCK
        self.window_groups = len(form.windows)
        self.runner = self.make_runner(
            self.model,
            kv,
            context=config.context,
            seats=seats,
            tokens_max=8192 + seats,
            states=states,
        )
        settings = EngineConfig(
            device="cuda",
            step_tokens_max=8192,
            prefill_chunk_tokens_max=8192,
            sequences_max=sequences,
            queue_tokens_max=10_000_000,
            levels=levels or LevelsConfig(),
        )
        cache = PrefixCache(
            blocks=blocks, block_size=BLOCK, windows=form.windows,
            state_blocks=self.runner.state_blocks,
        )  # fmt: skip
        self.levels, off = build_levels(cache, settings, kv, now_s=time.perf_counter())
        assert not off, off
        self.core = Core(
            cache,
            self.runner,
            settings,
            time.perf_counter,
            vocab_size=config.vocab,
            context_tokens=config.context,
            pipeline_depth=2,
            levels=self.levels,
            constraints=constraints,
            run_up=config.run_up,
        )
        self.copy_rate = copy_rate() if like is None else like.copy_rate
        FrozenHeap().settle()  # as the engine's process does
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def waited_s(self) -> float:
        """See `CoreBench.waited_s`."""
        return self.runner.waited_s

    def workload(self, work: Workload) -> dict[str, Any]:
        """Run a workload cold, then warm; return the results with its bytes and its floor."""
        prompts = work.prompts(1)
        namespace = work.name.encode()
        self.run(prompts[:1], b"warm-up" + namespace, 4)
        cold = self.run(prompts, namespace)
        warm = self.run(prompts, namespace)
        self.core.cache.erase(namespace)
        more = work.requests * OUTPUT // 2
        sharing = (work.requests * work.context + more) / (work.unique + more)
        return {
            "workload": work.name,
            "sharing": round(sharing, 2),
            **self.floor(work),
            "cold": cold,
            "warm": warm,
        }

    def single(self) -> dict[str, Any]:
        """Run W5: one request of 8,192 tokens, and single streams at two contexts."""
        rng = random.Random(5)
        prompt = tuple(rng.randrange(self.config.vocab) for _ in range(8192))
        self.run([prompt[::-1]], b"w5-warm-up", 2)
        cold = [self.run([prompt], b"w5-%d" % i, 1)["first_token_ms"] for i in range(3)]
        warm = [self.run([prompt], b"w5-2", 1)["first_token_ms"] for _ in range(5)]
        long = self.run([prompt], b"w5-2", 128)["step_ms"]
        short = self.run([prompt[:512]], b"w5-3", 128)["step_ms"]
        return {
            "workload": "W5",
            "ttft_cold_ms": cold,
            "ttft_warm_ms": warm,
            "step_512_ms": short,
            "step_8192_ms": long,
        }

    def sweep(self) -> dict[str, Any]:
        """Measure unshared decoding at context 512 by batch size."""
        steps = {}
        for batch in (1, 8, 32, 64, 128, 256):
            work = Workload(f"sweep-{batch}", batch, ((batch, 448),))
            steps[batch] = self.run(work.prompts(batch), work.name.encode())["step_ms"]
            self.core.cache.erase(work.name.encode())
        return {"workload": "sweep at context 512", "step_ms": steps}


def main() -> None:
    """Print one JSON line per workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bf16")
    parser.add_argument("--weights", choices=["auto", "bf16", "fp8", "int4"], default="auto")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--blocks", type=int, default=20_000)
    options = parser.parse_args()
    config = SHAPES[options.shape]
    if options.layers:
        config = with_layers(config, options.layers)
    only = (
        options.only.split(",") if options.only else [*(w.name for w in WORKLOADS), "W5", "sweep"]
    )
    chosen = [work for work in WORKLOADS if work.name in only]
    sequences = max([256, *(work.requests for work in chosen)])
    kv_dtype = KV_DTYPES[options.kv_dtype]
    bench = Bench(
        config, options.blocks, kv_dtype=kv_dtype, sequences=sequences, weights=options.weights
    )
    print_line(describe(bench.copy_rate))
    results = Results()
    for work in chosen:
        results.add(bench.workload(work))
    for name, measure in (("W5", bench.single), ("sweep", bench.sweep)):
        if name in only:
            results.add(measure())
    results.write(options.json)


if __name__ == "__main__":
    main()
