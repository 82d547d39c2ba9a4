"""The first answer after an engine was killed: python -m tests.bench.restart [--kinds host disk]

A prompt of 2,048 tokens under a promise, the default model on the CPU, and the real supervisor: the
engine is killed with SIGKILL, and once the next one serves, the same prompt is asked again. By
turns: without levels, with a disk alone (its stage ends with the engine), with host memory.
Prints seconds to ready, seconds to the first token and what was found, with all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from engine.api import CacheGrant, LeaseRequest, Request, Retention, Sampling, Started, Tokens
from engine.config import EngineConfig, LevelsConfig
from engine.statistics import LevelStats
from gateway.engines.composition import own_engine
from tests.bench.models import default_card
from tests.bench.results import middle_and_spread

PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK = 2_048, 4, 16
COPIES = PROMPT_TOKENS // BLOCK
KINDS = ("none", "disk", "host")
PATIENCE_S = 60.0


def levels(kind: str, folder: str) -> LevelsConfig:
    """Return the levels of one kind."""
    if kind == "none":
        return LevelsConfig()
    if kind == "host":
        return LevelsConfig(host_mib=256)
    return LevelsConfig(disk_gib=0.5, dir=folder, slab_mib=64)


class Life:
    """One supervisor, and the engines that it starts."""

    def __init__(self, model: Path, kind: str, folder: str) -> None:
        self._started: asyncio.Queue[int] = asyncio.Queue()
        below = levels(kind, folder)
        config = EngineConfig(kv_memory_mib=128, device="cpu", heartbeat_s=0.1, levels=below)
        self.engine = own_engine(model, config, self._on_report, keeps_host_memory=kind == "host")

    def _on_report(self, event: str, facts: dict[str, Any]) -> None:
        if event == "engine_started":
            self._started.put_nowait(int(facts["pid"]))

    async def ready(self) -> int:
        """Return the process id of the next engine that serves."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._started.get()

    async def ask(self, name: str, tokens: tuple[int, ...]) -> tuple[float, dict[str, int]]:
        """Return the seconds to the first token, and the tokens loaded by level."""
        lease = LeaseRequest(PROMPT_TOKENS, Retention("hour", 3600, 7200), "lease")
        grant = CacheGrant(b"n", leases=(lease,))
        began_s, first_s, loaded = time.monotonic(), 0.0, dict[str, int]()
        request = Request(name, tokens, OUTPUT_TOKENS, grant, Sampling(temperature=0))
        async for event in self.engine.submit(request):
            if isinstance(event, Started):
                loaded = dict(event.loaded_tokens)
            elif isinstance(event, Tokens) and not first_s:
                first_s = time.monotonic() - began_s
        return first_s, loaded

    async def settle(self, name: str) -> None:
        """Wait until a level serves and has every run of the prompt."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                below = (await self.engine.get_stats()).levels
                if any((one.name, one.state) == (name, "open") and _has_all(one) for one in below):
                    return
                await asyncio.sleep(0.01)


def _has_all(level: LevelStats) -> bool:
    return level.blocks >= COPIES


class Restart(Struct, frozen=True):
    """One round: seconds to the cold first token, from the kill to ready, and from there to the
    first token; tokens loaded by level, and copies recovered."""

    cold_s: float
    ready_s: float
    first_s: float
    loaded: dict[str, int]
    recovered: int


async def restart(model: Path, kind: str) -> Restart:
    """Run one round."""
    chance = random.Random(1)
    tokens = tuple(chance.randrange(40_000) for _ in range(PROMPT_TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        life = Life(model, kind, folder)
        life.engine.start()
        try:
            pid = await life.ready()
            cold_s, _ = await life.ask("cold", tokens)
            if kind != "none":
                await life.settle(kind)
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await life.ready()
            ready_s = time.monotonic() - killed_s
            if kind == "disk":
                await life.settle(kind)
            first_s, loaded = await life.ask("again", tokens)
            below = (await life.engine.get_stats()).levels
            return Restart(
                cold_s, ready_s, first_s, loaded, below[0].recovered_total if below else 0
            )
        finally:
            await life.engine.close()


def main() -> None:
    """Print one line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    model = Path(default_card().folder)
    found: dict[str, list[Restart]] = {kind: [] for kind in arguments.kinds}
    for _ in range(rounds):
        for kind in arguments.kinds:
            found[kind].append(asyncio.run(restart(model, kind)))
    for kind, each in found.items():
        first = middle_and_spread([one.first_s for one in each], ".3f", " s")
        ready = middle_and_spread([one.ready_s for one in each], ".2f", " s")
        print(
            f"{kind:5} first token after ready {first}, ready {ready},"
            f" cold {statistics.median(one.cold_s for one in each):.3f} s,"
            f" loaded {each[-1].loaded}, recovered {each[-1].recovered} of {COPIES}"
        )


if __name__ == "__main__":
    main()
