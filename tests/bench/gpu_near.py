"""Reads another engine's pool on a GPU of this host: the rate, and what that one's death costs.

    python -m tests.bench.gpu_near [--gib 1] [--json FILE]

Two processes hold pools of Llama-3.1-8B's shape, on GPU 0 and on the last one. The first one reads
blocks of the second, one after another in its pool or in random order; all bytes are compared once.
Then the second is killed while it is read, and the first goes on.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.kv.format import KvFormat
from engine.kv.near_pools import near_pools
from engine.kv.storage import KvStorage
from engine.moves import NearPools
from tests.bench.results import Results, print_line

FORMAT = KvFormat(32, 8, 128, 16, torch.bfloat16)
BLOCKS, RUNS = 4_096, 12
MODULE = "tests.bench.gpu_near"


def pool_on(gpu: int) -> tuple[KvStorage, NearPools]:
    """Return a pool on a GPU, and what reads others from there."""
    kv = KvStorage(FORMAT, BLOCKS, torch.device("cuda", gpu))
    pools = near_pools(kv)
    assert pools is not None, "CUDA gives no handle"
    return kv, pools


def hold() -> None:
    """Be the other engine: fill a pool, print its handle, and wait."""
    kv, pools = pool_on(torch.cuda.device_count() - 1)
    numbers = torch.arange(BLOCKS, device=kv.data.device).to(torch.bfloat16)
    kv.data[:] = numbers.view(-1, *[1] * (kv.data.dim() - 1))
    torch.cuda.synchronize()
    print_line(f"{pools.handle.hex()},{pools.domain}")
    sys.stdin.read()


@contextmanager
def other() -> Iterator[tuple[bytes, subprocess.Popen[str]]]:
    """Run the other engine; give the handle of its pool."""
    with subprocess.Popen(
        [sys.executable, "-m", MODULE, "--hold"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        handle, _, domain = process.stdout.readline().strip().partition(",")
        print_line(f"the other pool: {domain}")
        try:
            yield bytes.fromhex(handle), process
        finally:
            process.kill()


def milliseconds(pools: NearPools, handle: bytes, theirs: list[int], ours: list[int]) -> float:
    """Return how long a read takes."""
    began_s = time.perf_counter()
    pools.read(handle, theirs, ours)
    return (time.perf_counter() - began_s) * 1e3


def compare(kv: KvStorage, theirs: list[int], ours: list[int]) -> None:
    """Raise AssertionError unless the blocks that were read are those of the other pool."""
    wanted = torch.tensor(theirs, device=kv.data.device).to(torch.bfloat16)
    flat = kv.data[torch.tensor(ours, device=kv.data.device)].flatten(1)
    assert bool((flat == wanted[:, None]).all()), "other bytes than the other pool has"


def measure(gib: float, results: Results) -> None:
    """Time reads in order and at random, and kill the other process at last."""
    kv, pools = pool_on(0)
    count, chance = int(gib * 2**30) // FORMAT.block_bytes, random.Random(1)
    theirs = ours = list(range(count))
    with other() as (handle, process):
        first_ms = milliseconds(pools, handle, [0], [0])
        for name in ("in order", "at random"):
            times = []
            for _ in range(RUNS):
                if name == "at random":
                    theirs, ours = (chance.sample(range(BLOCKS), count) for _ in range(2))
                times.append(milliseconds(pools, handle, theirs, ours))
            compare(kv, theirs, ours)
            median = statistics.median(times)
            rate = count * FORMAT.block_bytes / median / 1e6
            spread = [round(one, 2) for one in sorted(times)]
            results.add({"read": name, "blocks": count, "ms": spread, "gb_s": round(rate, 1)})
        results.add({"first_read_ms": round(first_ms, 2)})
        outcome = "nothing"
        for number in range(200):
            if number == 20:
                process.kill()
            try:
                pools.read(handle, theirs, ours)
                outcome = "went on"
            except RuntimeError as error:
                outcome = f"{type(error).__name__}: {error}"
                break
        torch.cuda.synchronize()
        works = float(torch.ones(8, device="cuda").sum()) == 8
        process.wait()
        last = torch.cuda.device_count() - 1
        before = torch.cuda.mem_get_info(last)[0]
        pools.let_go_ended()
        freed = torch.cuda.mem_get_info(last)[0] - before
        results.add(
            {"after_the_other_was_killed": outcome, "own_gpu_works": works, "freed_bytes": freed}
        )
    with other() as (handle, _):
        results.add({"another_pool_ms": round(milliseconds(pools, handle, theirs, ours), 2)})
        compare(kv, theirs, ours)


def main() -> int:
    """Run the reads, or be the other process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold()
        return 0
    results = Results()
    measure(options.gib, results)
    results.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
