"""A storage process, or a keeper, is killed: what the disk had stays, and answers are as before."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from engine.api import CacheGrant, LeaseRequest, Request, Retention
from engine.config import EngineConfig, LevelsConfig
from engine.model_store import ModelCard
from engine.statistics import LevelStats
from tests.crash.fleet import PATIENCE_S, KeptReplica
from tests.crash.patient_peer import COMMAND
from tests.crash.peers import GREEDY, Answer, Pair, pair_of
from tests.e2e.patient_engine import LOOK_MS
from tests.models import prepared, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(300)]

CHANCE = random.Random(3)
PROMPTS = [tuple(CHANCE.randrange(256) for _ in range(640)) for _ in range(3)]
HOUR = Retention("hour", 3600, 7200)
WHOLE = 39 * 16
"""Tokens of a prompt in whole blocks, the last of which is computed."""


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: each start makes a folder, in microseconds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return prepared(tmp_path_factory.mktemp("stored"), tiny_config(context=4096))


def asked(name: str, number: int) -> Request:
    """Return a request for a prompt that is to be kept for an hour."""
    leases = (LeaseRequest(len(PROMPTS[number]), HOUR, f"{number:02x}"),)
    return Request(name, PROMPTS[number], 8, CacheGrant(b"n", leases=leases), GREEDY)


async def disk_of(pair: Pair) -> LevelStats:
    stats = await pair.engines["e0"].get_stats()
    return next(level for level in stats.levels if level.name == "disk")


async def disk_has(pair: Pair, copies: int) -> None:
    """Wait until the disk is open and has so many copies."""
    async with asyncio.timeout(PATIENCE_S):
        while (told := await disk_of(pair)).state != "open" or told.blocks < copies:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def stored_in(folder: Path) -> EngineConfig:
    """Return the settings of an engine with host memory, and a disk in a folder."""
    below = LevelsConfig(
        host_mib=1,
        host_tokens_min=16,
        look_ms=LOOK_MS,
        disk_gib=0.25,
        slab_mib=4,
        disk_tokens_min=16,
        dir=str(folder),
    )
    return EngineConfig(
        device="cpu", dtype="fp32", kv_blocks=192, heartbeat_s=0.05, threads=1, levels=below
    )


def process_of(folder: Path) -> int:
    """Return the id of the process that has the disk, or had it last."""
    return int((folder / "lock").read_text() or 0)


async def next_process(folder: Path, killed: int) -> None:
    """Wait until another process has the disk."""
    async with asyncio.timeout(PATIENCE_S):
        while process_of(folder) in (0, killed):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_killed_storage_process_costs_no_answer_and_no_copy(
    model: ModelCard, tmp_path: Path
) -> None:
    """What the device and host memory have is found meanwhile, and the next process has what the
    disk had."""
    folder = tmp_path / "e0"
    config = stored_in(folder)
    async with pair_of(model, config, levels=LevelsConfig()) as pair:

        async def ask(turn: str, *, kills: bool = False) -> list[Answer]:
            answers = []
            for number in range(len(PROMPTS)):
                answers.append(await pair.ask("e0", asked(f"{turn}{number}", number)))
                if kills and number == 0:
                    os.kill(process_of(folder), signal.SIGKILL)
            return answers

        rounds = [await ask("first")]
        await disk_has(pair, 1)
        for turn in ("second", "third"):
            killed, had = process_of(folder), (await disk_of(pair)).blocks
            rounds.append(await ask(turn, kills=True))
            await next_process(folder, killed)
            await disk_has(pair, had)
        rounds.append(await ask("last"))

    first = [one.tokens for one in rounds[0]]
    assert [[one.tokens for one in answers] for answers in rounds] == [first] * len(rounds)
    assert {one.end.ending for answers in rounds for one in answers} == {"done"}
    assert min(one.started.cached_tokens for one in rounds[-1]) >= WHOLE


async def test_a_lost_keeper_takes_host_memory_and_leaves_the_disk(
    model: ModelCard, tmp_path: Path
) -> None:
    """The engine of the next one on this host answers from the disk."""
    config = stored_in(tmp_path / "e0")
    async with pair_of(model, config, levels=LevelsConfig()) as pair:
        numbers = range(len(PROMPTS))
        first = [await pair.ask("e0", asked(f"first{number}", number)) for number in numbers]
        await disk_has(pair, 1)
        await pair.engines["e0"].close()
        await pair.kept["e0"].kill()
        await pair.kept["e0"].close()
        again = KeptReplica("e0", "", config=config, model=Path(model.folder), command=COMMAND)
        pair.kept["e0"] = again
        again.keeper.start()
        await pair.join("e0")
        await disk_has(pair, 1)
        second = [await pair.ask("e0", asked(f"second{number}", number)) for number in numbers]

    assert [one.tokens for one in second] == [one.tokens for one in first]
    assert {name for one in second for name, _ in one.started.loaded_tokens} == {"disk"}
