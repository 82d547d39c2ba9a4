"""A store that two real engines share: the second one starts warm, and an erasure reaches both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.api import CacheGrant, LeaseRequest, Retention
from engine.config import LevelsConfig, RemoteConfig
from engine.statistics import LevelStats
from tests.crash.fleet import PATIENCE_S
from tests.crash.peers import CONFIG, Answer, Pair, pair_of, request
from tests.models import prepared, tiny_config
from tests.unit.engine.storage.local_storage import write_key
from tests.unit.engine.storage.shared_rig import MASTER

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

CHANCE = random.Random(1)
PROMPT = tuple(CHANCE.randrange(256) for _ in range(700))
RUNS = 43
"""Whole runs of the prompt."""
LOOK_MS = 5_000.0


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: folders are listed, in microseconds."""


@asynccontextmanager
async def sharing(tmp_path: Path) -> AsyncIterator[Pair]:
    """Start two engines, each with a disk of its own, which share a folder as a store."""
    card = prepared(tmp_path, tiny_config(context=4096))
    key_file = write_key(tmp_path / "key", MASTER).key_file
    far = RemoteConfig(
        f"file://{tmp_path / 'shared'}", timeout_ms=10_000, tokens_min=64, shared=True
    )

    def levels(name: str) -> LevelsConfig:
        folder = str(tmp_path / name)
        return LevelsConfig(
            host_mib=8, disk_gib=0.25, dir=folder, slab_mib=4, disk_tokens_min=16,
            look_ms=LOOK_MS, seal=True, key_file=key_file, remote=far,
        )  # fmt: skip

    config = replace(CONFIG, levels=levels("e0"))
    async with pair_of(card, config, levels=levels("e1")) as pair:
        yield pair


async def far_level(pair: Pair, name: str) -> LevelStats:
    """Return what an engine says of the shared store."""
    stats = await pair.engines[name].get_stats()
    found = (level for level in stats.levels if level.name == "remote")
    return next(found, LevelStats("remote", "off"))


async def until(pair: Pair, name: str, is_so: Callable[[LevelStats], bool]) -> LevelStats:
    """Wait until an engine says so of the shared store."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            level = await far_level(pair, name)
            if is_so(level):
                return level


def fetched(answer: Answer) -> int:
    """Return the cached tokens that came from the shared store."""
    return dict(answer.started.loaded_tokens).get("remote", 0)


def files(tmp_path: Path) -> list[Path]:
    """Return the files of the store but for its proof."""
    found = (tmp_path / "shared").rglob("*")
    return [path for path in found if path.is_file() and path.name != "proof"]


async def put(pair: Pair, tmp_path: Path, namespace: bytes = b"n") -> Answer:
    """Have e0 compute the prompt and put all of it; return its answer."""
    await until(pair, "e0", lambda level: level.state == "open")
    await until(pair, "e1", lambda level: level.state == "open")
    lease = LeaseRequest(len(PROMPT), Retention("hour", 3_600, 7_200), "lease")
    asked = replace(request("first", PROMPT), grant=CacheGrant(namespace, leases=(lease,)))
    first = await pair.ask("e0", asked)
    await until(pair, "e0", lambda level: level.blocks >= RUNS)
    await until(pair, "e0", lambda level: bool(list((tmp_path / "shared").glob("*/m/*"))))
    return first


async def test_a_new_replica_starts_warm_and_an_erasure_reaches_both(tmp_path: Path) -> None:
    """The answer is the computed one, the hit is the other engine's; nothing is put twice."""
    async with sharing(tmp_path) as pair:
        first = await put(pair, tmp_path)
        warm = await pair.ask("e1", request("b", PROMPT))
        assert warm.tokens == first.tokens
        assert (warm.started.cached_tokens, fetched(warm)) == (688, 688)
        before = len(files(tmp_path))
        again = await pair.ask("e1", request("c", PROMPT))
        assert fetched(again) == 0
        assert len(files(tmp_path)) == before
        receipts = [await pair.engines[name].erase(b"n") for name in ("e0", "e1")]
        told = [one for receipt in receipts for one in receipt.levels if one.level == "remote"]
        assert [one.code for one in told] == ["", ""]
        assert told[0].blocks >= RUNS
        assert files(tmp_path) == []
        cold = await pair.ask("e1", request("d", PROMPT))
        assert (cold.tokens, cold.started.cached_tokens) == (first.tokens, 0)


async def test_what_a_killed_engine_has_put_serves_the_other(tmp_path: Path) -> None:
    """Its objects and its manifest stay; when it is back it puts nothing again."""
    async with sharing(tmp_path) as pair:
        first = await put(pair, tmp_path)
        before = sorted(files(tmp_path))
        await pair.kept["e0"].kill()
        warm = await pair.ask("e1", request("b", PROMPT))
        assert (warm.tokens, fetched(warm)) == (first.tokens, 688)
        await pair.kept["e0"].pid()
        await pair.join("e0")
        back = await until(pair, "e0", lambda level: level.state == "open")
        assert back.stored_total == 0
        assert sorted(files(tmp_path)) == before
