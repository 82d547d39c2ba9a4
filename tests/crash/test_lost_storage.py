"""An engine elsewhere whose storage process is killed: its requests notice nothing."""

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
from tests.crash.fleet import PATIENCE_S
from tests.crash.peers import GREEDY, Answer, Pair, pair_of
from tests.e2e.patient_engine import LOOK_MS
from tests.models import prepared, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(300)]

CHANCE = random.Random(3)
PROMPTS = [tuple(CHANCE.randrange(256) for _ in range(640)) for _ in range(3)]
HOUR = Retention("hour", 3600, 7200)
WHOLE = 39 * 16
"""Tokens of a prompt that can be found: its last token is computed."""
COPIES = 40 * len(PROMPTS)


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
    below = LevelsConfig(
        host_mib=1,
        host_tokens_min=16,
        look_ms=LOOK_MS,
        disk_gib=0.25,
        slab_mib=4,
        disk_tokens_min=16,
        dir=str(folder),
    )
    config = EngineConfig(
        device="cpu", dtype="fp32", kv_blocks=64, heartbeat_s=0.05, threads=1, levels=below
    )
    async with pair_of(model, config, levels=LevelsConfig()) as pair:

        async def ask(turn: str, *, kills: bool = False) -> list[Answer]:
            answers = []
            for number in range(len(PROMPTS)):
                answers.append(await pair.ask("e0", asked(f"{turn}{number}", number)))
                if kills and number == 0:
                    os.kill(process_of(folder), signal.SIGKILL)
            return answers

        rounds = [await ask("first")]
        await disk_has(pair, COPIES)
        for turn in ("second", "third"):
            killed = process_of(folder)
            rounds.append(await ask(turn, kills=True))
            await next_process(folder, killed)
            await disk_has(pair, COPIES)

    first = [one.tokens for one in rounds[0]]
    assert [[one.tokens for one in answers] for answers in rounds] == [first] * 3
    assert {one.end.ending for answers in rounds for one in answers} == {"done"}
    found = [one.started.cached_tokens for answers in rounds[1:] for one in answers]
    assert found == [WHOLE] * len(found)
