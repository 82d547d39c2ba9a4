"""Levels below a GPU's pool: what they bring, and what they cost.

    python -m tests.bench.gpu_levels [--only host,disk,packed,return,none] [--dir DIR] [--json FILE]
        [--shape Llama-3.1-8B]

`host`: the first token of one prompt of 8,192 and of 32,768 tokens, computed and loaded from host
memory. `disk`: the same from disk, where the model finds that worth it. `packed`: 8,192 from host
memory in 8 and 4 bits. `return`: 64 conversations of 4,096 tokens come back in turn, 16 at once, 16
tokens each; with levels, without, and in a pool that has room for all. `none`: W4, of which nothing
is shared, without and with levels, in turns. Random weights in bf16, in process, greedy.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine.api import (
    CacheGrant,
    Fidelity,
    Finished,
    LeaseRequest,
    Quota,
    Request,
    Retention,
    Sampling,
    Started,
    Tokens,
)
from engine.config import LevelsConfig
from tests.bench.device import describe, release_memory
from tests.bench.gpu_families import SHAPES as FAMILIES
from tests.bench.gpu_workloads import WORKLOADS, Bench
from tests.bench.models import BLOCK, LLAMA_8B, VOCAB, with_layers
from tests.bench.results import Results, print_line

SHAPES = {"Llama-3.1-8B": LLAMA_8B} | FAMILIES
CONTEXT_TOKENS = 40_960
POOL_BYTES = 12 * 10**9
HOST_MIB = 48 * 1024
HOUR = Retention("hour", promise_s=3600.0, limit_s=7200.0)
WAIT_S = 20.0
WINDOW_BLOCKS = 800
"""More blocks of a pool for each window group: what a step and the window before it fill."""
PAYER = Quota(payer=b"one")
"""Of all: a payer's blocks are evicted for its own first."""
SETUPS = ("with levels", "without", "in a pool with room")
REPEATS = 3
ROUNDS = 3


class LevelsBench(Bench):
    """A bench whose requests are one by one, or some at once."""

    names = count(1)

    def ask(
        self, prompts: list[tuple[int, ...]], grant: CacheGrant, output: int = 1
    ) -> dict[str, Any]:
        """Answer prompts that come at once; return times, and what was cached and loaded."""
        began_s = time.perf_counter()
        ids = {f"a{next(self.names)}": tokens for tokens in prompts}
        for name, tokens in ids.items():
            self.core.submit(Request(name, tokens, output, grant, Sampling(temperature=0)))
        first_s: list[float] = []
        begun: set[str] = set()
        loaded: dict[str, int] = {}
        cached = 0
        misses: list[str] = []
        turns: list[float] = []
        while self.core.has_work():
            turn_s = time.perf_counter()
            events = self.core.step()
            turns.append(time.perf_counter() - turn_s)
            for event in events:
                if isinstance(event, Tokens) and event.request_id not in begun:
                    begun.add(event.request_id)
                    first_s.append(time.perf_counter() - began_s)
                elif isinstance(event, Started):
                    cached += event.cached_tokens
                    for level, tokens_loaded in event.loaded_tokens:
                        loaded[level] = loaded.get(level, 0) + tokens_loaded
                    if event.wait is not None and event.wait.cause:
                        misses.append(event.wait.cause)
                elif isinstance(event, Finished):
                    assert event.ending == "done", event
            if self.core.is_waiting_for_levels:
                time.sleep(0.0002)
        return {
            "first_ms": round(statistics.median(first_s) * 1e3, 2),
            "wall_s": round(time.perf_counter() - began_s, 3),
            "cached": cached,
            "loaded": loaded,
            "misses": sorted(set(misses)),
            "turns": len(turns),
            "turns_ms": round(sum(turns) * 1e3, 1),
            "longest_ms": [round(one * 1e3, 1) for one in sorted(turns)[-3:]],
        }

    def settle(self) -> None:
        """Run turns until nothing moves between the levels any more."""
        until_s = time.perf_counter() + WAIT_S
        while self.levels is not None and self.levels.is_busy and time.perf_counter() < until_s:
            self.core.step()
            time.sleep(0.0005)

    def close(self) -> None:
        """Release the pool and the levels."""
        self.core.close()
        del self.core, self.runner, self.levels
        release_memory()


def pool_of(like: Bench, blocks: int) -> int:
    """Return the blocks of a pool that has so many for KV group 0."""
    return blocks + WINDOW_BLOCKS * like.window_groups


def prompts_of(seed: int, number: int, tokens: int) -> list[tuple[int, ...]]:
    """Return random prompts."""
    chance = random.Random(seed)
    return [tuple(chance.randrange(VOCAB) for _ in range(tokens)) for _ in range(number)]


def measure_first_tokens(
    bench: LevelsBench, name: str, tokens: int, fidelity: Fidelity = "exact"
) -> dict[str, Any]:
    """Answer a leased prompt, push it off the device, and answer it again; several times."""
    space = f"{name}-{tokens}".encode()
    (prompt,) = prompts_of(tokens, 1, tokens)
    kept = LeaseRequest(tokens, HOUR, "lease")
    grant = CacheGrant(space, PAYER, fidelity=fidelity)
    cold = bench.ask([prompt], replace(grant, leases=(kept,)))
    bench.settle()
    again = []
    for repeat in range(REPEATS):
        pushing = -(-bench.core.cache.blocks * BLOCK // 8192)
        for number in range(pushing):
            other = prompts_of(1_000_000 * repeat + number + tokens, 1, 8192)
            bench.ask(other, CacheGrant(b"push", PAYER, at_rest="never"))
        bench.settle()
        again.append(bench.ask([prompt], grant))
    host = bench.core.stats().levels
    return {
        "part": name,
        "tokens": tokens,
        "computed_ms": cold["first_ms"],
        "first_ms": [one["first_ms"] for one in again],
        "loaded": again[-1]["loaded"],
        "misses": again[-1]["misses"],
        "turns": again[-1]["turns"],
        "turns_ms": again[-1]["turns_ms"],
        "longest_ms": again[-1]["longest_ms"],
        "gb_s": [round(level.bytes_per_s / 1e9, 1) for level in host],
    }


def measure_host(like: Bench, folder: Path) -> Iterator[dict[str, Any]]:
    """Load one prompt from host memory."""
    config = LevelsConfig(host_mib=HOST_MIB // 2, host_keeps_promises=True)
    began_s = time.perf_counter()
    bench = LevelsBench(like.config, pool_of(like, 2400), config, like=like)
    yield {"part": "host", "built_s": round(time.perf_counter() - began_s, 2)}
    bench.ask(prompts_of(7, 1, 8192), CacheGrant(b"warm-up"))
    for tokens in (8192, 32_768):
        yield measure_first_tokens(bench, "host", tokens)
    bench.close()


def measure_packed(like: Bench, folder: Path) -> Iterator[dict[str, Any]]:
    """Load one prompt from packed copies in host memory."""
    config = LevelsConfig(host_mib=HOST_MIB // 4, host_keeps_promises=True)
    bench = LevelsBench(like.config, pool_of(like, 1400), config, like=like)
    bench.ask(prompts_of(7, 1, 8192), CacheGrant(b"warm-up"))
    fidelities: tuple[tuple[Fidelity, str], ...] = (("near", "int8c"), ("rough", "int4c"))
    for fidelity, name in fidelities:
        yield measure_first_tokens(bench, f"host, {name}", 8192, fidelity)
    bench.close()


def measure_disk(like: Bench, folder: Path) -> Iterator[dict[str, Any]]:
    """Load one prompt from disk, in each format."""
    config = LevelsConfig(disk_gib=12.0, dir=str(folder), stage_mib=512, disk_tokens_min=256)
    bench = LevelsBench(like.config, pool_of(like, 1400), config, like=like)
    until_s = time.perf_counter() + WAIT_S
    while bench.core.stats().levels[-1].state != "open" and time.perf_counter() < until_s:
        bench.core.step()
        time.sleep(0.01)
    bench.ask(prompts_of(7, 1, 8192), CacheGrant(b"warm-up", at_rest="never"))
    fidelities: tuple[tuple[Fidelity, str], ...] = (
        ("exact", "exact"), ("near", "int8c"), ("rough", "int4c"),
    )  # fmt: skip
    for fidelity, name in fidelities:
        yield measure_first_tokens(bench, f"disk, {name}", 8192, fidelity)
    bench.close()


def measure_return(
    like: Bench, folder: Path, wanted: Sequence[str] = SETUPS
) -> Iterator[dict[str, Any]]:
    """Let conversations come back in turn, in the wanted setups."""
    conversations = prompts_of(64, 64, 4096)
    small = POOL_BYTES // (like.token_bytes * BLOCK)
    large = 64 * (4096 // BLOCK + 2) + 512
    setups: dict[str, tuple[int, LevelsConfig | None]] = {
        "with levels": (small, LevelsConfig(host_mib=HOST_MIB)),
        "without": (small, None),
        "in a pool with room": (large, None),
    }
    grant = CacheGrant(b"conversations")
    for name, (blocks, config) in setups.items():
        if name not in wanted:
            continue
        bench = LevelsBench(like.config, blocks, config, like=like)
        rounds = []
        for _ in range(ROUNDS):  # the first one computes all of them
            found = [bench.ask(conversations[i : i + 16], grant, 16) for i in range(0, 64, 16)]
            bench.settle()
            rounds.append(found)
        last = rounds[1:]
        walls = [sum(one["wall_s"] for one in found) for found in last]
        yield {
            "part": "return",
            "setup": name,
            "answers_s": [round(64 / wall, 1) for wall in walls],
            "computing_first_s": round(sum(one["wall_s"] for one in rounds[0]), 2),
            "first_ms": round(statistics.median(o["first_ms"] for f in last for o in f), 1),
            "cached": sum(one["cached"] for one in last[-1]),
            "loaded": sum(sum(one["loaded"].values()) for one in last[-1]),
            "misses": sorted({miss for found in last for one in found for miss in one["misses"]}),
            "levels": [
                {"offloaded": one.offloaded_total, "declined": one.declined_total,
                 "failed": one.failed_total, "gb_s": round(one.bytes_per_s / 1e9, 1)}
                for one in bench.core.stats().levels
            ],
        }  # fmt: skip
        bench.close()


def measure_none(like: Bench, folder: Path) -> Iterator[dict[str, Any]]:
    """Run W4 with prompts that nothing shares, in a pool that has to evict.

    Host memory is small: all of it is in use, and pinned, after the first turn, which counts not.
    """
    work = next(one for one in WORKLOADS if one.name == "W4")
    blocks = 10_500  # W4 takes 9,216
    setups = {
        "without": LevelsBench(like.config, blocks, None, like=like),
        "with": LevelsBench(like.config, blocks, LevelsConfig(host_mib=HOST_MIB // 8), like=like),
    }
    rates: dict[str, list[int]] = {name: [] for name in setups}
    steps: dict[str, list[float]] = {name: [] for name in setups}
    for bench in setups.values():
        bench.run(work.prompts(1)[:8], b"warm-up", 4)
    for turn in range(3):
        for name, bench in setups.items():
            found = bench.run(work.prompts(10 + turn), b"%d" % turn)
            rates[name].append(found["tok_s"])
            steps[name].append(found["step_ms"])
            bench.settle()
    ratios = [b / a for a, b in zip(rates["without"], rates["with"], strict=True)]
    level = setups["with"].core.stats().levels[0]
    yield {
        "part": "none",
        "tok_s": rates,
        "step_ms": steps,
        "ratio": round(statistics.median(ratios[1:]), 3),
        "ratios": [round(one, 3) for one in ratios],
        "offloaded": level.offloaded_total,
        "failed": level.failed_total,
    }
    for bench in setups.values():
        bench.close()


PARTS: dict[str, Callable[[Bench, Path], Iterator[dict[str, Any]]]] = {
    "host": measure_host,
    "packed": measure_packed,
    "return": measure_return,
    "none": measure_none,
    "disk": measure_disk,
}


def main() -> None:
    """Print one JSON line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--shape", default="Llama-3.1-8B", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0, help="of them, where it is not all")
    parser.add_argument("--dir", type=Path, default=None, help="the disk to measure")
    parser.add_argument("--setups", default=",".join(SETUPS), help="of the part `return`")
    options = parser.parse_args()
    whole = SHAPES[options.shape]
    shape = with_layers(whole, options.layers or len(whole.layers))
    shape = replace(shape, context=CONTEXT_TOKENS)
    like = Bench(shape, 64)
    print_line(describe(like.copy_rate))
    results = Results()
    parts = PARTS | {"return": partial(measure_return, wanted=options.setups.split(","))}
    for name in options.only.split(","):
        began_s = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            for found in parts[name](like, Path(folder)):
                results.add(found)
        print_line(f"{name}: {time.perf_counter() - began_s:.0f} s")
    results.write(options.json)


if __name__ == "__main__":
    main()
