"""Drains one of two engines of a host, each with a GPU or both on one: its promises move.

    python -m tests.bench.gpu_drain [--prompts 16] [--streams 16] [--json FILE]

Prompts of 8,192 tokens of Llama-3.1-8B's shape, 1 GiB of KV each, are promised for an hour on one
engine, beside streams that run there. It then drains: seconds until the books name the other engine
for all promises, and until it has ended; how many tokens the other one had to compute; what became
of the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from engine.api import CacheGrant, Finished, Quota, Request, Sampling
from engine.config import EngineConfig, LevelsConfig
from gateway.engines.replica import Replica
from gateway.engines.replicas import Replicas
from gateway.prompt import Renderer
from tests.bench.gpu_http import SHAPES, write_model
from tests.bench.results import Results, print_line
from tests.crash import fleet, peers
from tests.crash.peers import gateway_of, pair_of
from tests.unit.gateway.engines import promise_books
from tests.unit.gateway.engines.promise_books import PromiseBooks

SHAPE, TOKENS, BLOCKS = SHAPES["Llama-3.1-8B"], 8_192, 20_000
COMMAND = (sys.executable, "-m", "engine.server.server")
START_S = 240.0
CONFIG = EngineConfig(
    device="cuda", gpus=(0,), kv_blocks=BLOCKS, step_tokens_max=TOKENS,
    prefill_chunk_tokens_max=TOKENS, levels=LevelsConfig(host_mib=4_096),
)  # fmt: skip


async def stream(replicas: Replicas, number: int, tokens: int) -> str:
    """Run a stream beside the drain; return how it ended."""
    chance = random.Random(number)
    prompt = tuple(chance.randrange(SHAPE.vocab) for _ in range(256))
    grant = CacheGrant(b"streams", Quota(payer=b"2"))
    wanted = Request(
        f"s{number}", prompt, tokens, grant, Sampling(temperature=0), min_tokens=tokens
    )
    events = [event async for event in replicas.submit(wanted)]
    assert isinstance(events[-1], Finished)
    return events[-1].ending


async def drained(books: PromiseBooks, source: Replica, kept: fleet.KeptReplica) -> list[float]:
    """Drain an engine; return the seconds until its promises have moved, and until it has ended."""
    began_s = time.perf_counter()
    kept.keeper.begin_drain()
    await kept.running().drain(60.0)
    await books.emptied()
    moved_s = time.perf_counter() - began_s
    if kept.engine is not None:
        await kept.engine.wait_lost()
    return [round(moved_s, 2), round(time.perf_counter() - began_s, 2)]


async def measure(prompts: int, streams: int, results: Results) -> None:
    """Promise the prompts, drain, and count."""
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        card = write_model(Path(folder) / "model", SHAPE)
        async with (
            pair_of(card, CONFIG, COMMAND, gpus=(min(1, torch.cuda.device_count() - 1),)) as pair,
            gateway_of(pair) as replicas,
        ):
            for engine in pair.engines.values():
                await engine.close()  # the other gateway has nothing to move
            books = PromiseBooks(Renderer(card), replicas, time.monotonic)
            source, home = list(replicas)
            began_s = time.perf_counter()
            for _ in range(prompts):
                prompt = tuple(chance.randrange(SHAPE.vocab) for _ in range(TOKENS + 1))
                await books.write(source, prompt, TOKENS)
            print_line(f"{prompts} promised after {time.perf_counter() - began_s:.1f} s")
            running = [asyncio.create_task(stream(replicas, n, 300)) for n in range(streams)]
            await asyncio.sleep(0.5)
            seconds = await drained(books, source, pair.kept[source.name])
            ends = Counter(await asyncio.gather(*running))
            stats = await home.running().get_stats()
            peer = next(one for one in stats.levels if one.name == "peer")
            await books.moves.close()
    results.add(
        {
            "gib": prompts, "moved_s, ended_s": seconds, "promises": dict(books.ends),
            "streams": dict(ends), "computed_at_home": stats.computed_tokens_total,
            "blocks_read": peer.loaded_total, "not_read": dict(peer.not_loaded),
        }
    )  # fmt: skip


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = Results()
    with pytest.MonkeyPatch.context() as patch:
        for module in (fleet, peers, promise_books):
            patch.setattr(module, "PATIENCE_S", START_S)
        asyncio.run(measure(options.prompts, options.streams, results))
    results.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
