"""What a new replica wins by a shared store: python -m tests.bench.shared_store [--rounds N]

Two real engines with a disk each share a folder. One computes a prompt of 3,000 tokens of 32 KiB
and puts it; then the other one, which has none of it, is asked. It prints the seconds to the first
token of both, and the ratio, a line for each prompt. The first is another one, to warm both up.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

from msgspec.structs import replace

from engine.api import CacheGrant, LeaseRequest, Request, Retention, Started, Tokens
from engine.config import EngineConfig, LevelsConfig, RemoteConfig
from engine.statistics import LevelStats
from tests.bench.results import Results
from tests.crash.peers import Pair, pair_of, request
from tests.crash.test_shared_store import until
from tests.models import prepared, tiny_config
from tests.unit.engine.storage.local_storage import write_key
from tests.unit.engine.storage.shared_rig import MASTER

TOKENS, VOCAB, BLOCK = 3_000, 256, 16
MODEL = tiny_config(heads=8, kv_heads=8, layers=8, head_dim=64, context=4_096)
COMMAND = (sys.executable, "-m", "engine.server.server")


async def first_token(pair: Pair, name: str, wanted: Request) -> tuple[float, int]:
    """Return the seconds to the first token, and the tokens that the store had."""
    began_s, first_s, loaded = perf_counter(), 0.0, 0
    async for event in pair.engines[name].submit(wanted):
        if isinstance(event, Started):
            loaded = dict(event.loaded_tokens).get("remote", 0)
        if isinstance(event, Tokens) and not first_s:
            first_s = perf_counter() - began_s
    return first_s, loaded


def has_blocks(count: int, level: LevelStats) -> bool:
    """Return whether a level has so many."""
    return level.blocks >= count


async def measure(folder: Path, rounds: int) -> None:
    """Print a line for each prompt."""
    key_file = write_key(folder / "key", MASTER).key_file
    far = RemoteConfig(f"file://{folder / 'shared'}", shared=True)

    def levels(name: str) -> LevelsConfig:
        return LevelsConfig(
            host_mib=512, disk_gib=2, slab_mib=64, dir=str(folder / name), seal=True,
            key_file=key_file, remote=far,
        )  # fmt: skip

    config = EngineConfig(device="cpu", dtype="fp32", kv_memory_mib=512, threads=1)
    config = replace(config, levels=levels("e0"))
    chance, results = random.Random(1), Results()
    async with pair_of(prepared(folder, MODEL), config, COMMAND, levels=levels("e1")) as pair:
        for name in pair.engines:
            await until(pair, name, lambda level: level.state == "open")
        blocks = 0
        for number in range(rounds + 1):
            prompt = tuple(chance.randrange(VOCAB) for _ in range(TOKENS))
            lease = LeaseRequest(TOKENS, Retention("hour", 3_600, 7_200), f"lease {number}")
            asked = request(f"{number}", prompt, b"n%d" % number)
            grant = CacheGrant(b"n%d" % number, leases=(lease,))
            computed_s, _ = await first_token(pair, "e0", replace(asked, grant=grant))
            blocks += TOKENS // BLOCK
            await until(pair, "e0", partial(has_blocks, blocks))
            while len(list((folder / "shared").glob("*/m/*"))) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            fetched_s, tokens = await first_token(pair, "e1", asked)
            if number:
                figures = {"computed_s": computed_s, "fetched_s": fetched_s}
                ratio = round(computed_s / fetched_s, 2)
                shown = {name: round(one, 2) for name, one in figures.items()}
                results.add({**shown, "ratio": ratio, "fetched_tokens": tokens})


def main() -> None:
    """Measure in a folder that is removed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.shared_store")
    parser.add_argument("--rounds", type=int, default=5)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), parser.parse_args().rounds))


if __name__ == "__main__":
    main()
