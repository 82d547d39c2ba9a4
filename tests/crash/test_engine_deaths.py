"""Real engines under the real supervisor, killed: host memory outlives them, and every answer over
it equals the one that is computed from nothing.

`CRASH=long` (`make crash`) kills more often.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.api import (
    CacheGrant,
    Finished,
    LeaseRequest,
    Request,
    Retention,
    Sampling,
    Started,
    Tokens,
)
from engine.config import EngineConfig, LevelsConfig
from engine.errors import EngineError
from engine.model_store import prepare
from gateway.engines.composition import own_engine
from gateway.processes.child_process import RestartPolicy
from tests.e2e.patient_engine import COMMAND, LOOK_MS
from tests.models import write_folder

DEATHS = 40 if os.environ.get("CRASH") == "long" else 2
PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK = 160, 4, 16
COPIES = PROMPT_TOKENS // BLOCK
WHOLE = (PROMPT_TOKENS - 1) // BLOCK
LEASED = 4
"""Prompts that are promised; all together have no room on the device."""
LIFE_REQUESTS = (20, 40)
PATIENCE_S = 90.0
HOUR = Retention("hour", 3600, 7200)

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(1_800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a prepared tiny model."""
    folder = tmp_path_factory.mktemp("models")
    card = prepare("tiny", write_folder(folder / "tiny"), folder)
    return Path(card.folder)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Return a folder for a disk level."""
    tmp_path.chmod(0o700)
    return tmp_path


def levels(folder: Path | None = None, host_mib: int = 4) -> LevelsConfig:
    """Return host memory, and a disk if there is a folder for it."""
    disk: dict[str, Any] = {}
    if folder is not None:
        disk = {"disk_gib": 0.05, "dir": str(folder), "slab_mib": 4}
    return LevelsConfig(host_mib=host_mib, host_tokens_min=BLOCK, look_ms=LOOK_MS, **disk)


class SupervisedEngine:
    """An engine process under its supervisor."""

    def __init__(self, model: Path, below: LevelsConfig) -> None:
        self.started: asyncio.Queue[int] = asyncio.Queue()
        self.accepted = 0
        """Drafts that requests which ended had accepted."""
        config = EngineConfig(kv_blocks=64, threads=1, heartbeat_s=0.05, device="cpu", levels=below)
        self.engine = own_engine(
            model, config, self._on_report, command=COMMAND, restarts=RestartPolicy((0.1,))
        )

    def _on_report(self, event: str, facts: dict[str, Any]) -> None:
        if event == "engine_started":
            self.started.put_nowait(int(facts["pid"]))

    async def ready(self) -> int:
        """Return the process id of the next engine that serves."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.started.get()

    async def ask(
        self, name: str, tokens: tuple[int, ...], *, is_leased: bool = True, **more: Any
    ) -> tuple[list[int], dict[str, int]]:
        """Return the answer to a prompt, and what was loaded for it. Raises EngineError.

        `more`: further fields of the request.
        """
        lease = LeaseRequest(PROMPT_TOKENS, HOUR, f"{tokens[0]:02x}")
        grant = CacheGrant(b"n", leases=(lease,) if is_leased else ())
        wanted: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "sampling": Sampling(temperature=0)}
        wanted |= more
        request = Request(name, tokens, grant=grant, **wanted)
        found, loaded = list[int](), dict[str, int]()
        async with asyncio.timeout(PATIENCE_S):
            async for event in self.engine.submit(request):
                if isinstance(event, Started):
                    loaded = dict(event.loaded_tokens)
                elif isinstance(event, Tokens):
                    found += [token.token_id for token in event.tokens]
                elif isinstance(event, Finished) and event.ending != "done":
                    raise EngineError(event.code, event.message)
                elif isinstance(event, Finished):
                    self.accepted += sum(one.accepted for one in event.usage.drafts)
        return found, loaded

    async def host_has(self, blocks: int) -> None:
        """Wait until host memory has so many blocks."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if (await self.engine.get_stats()).levels[0].offloaded_total >= blocks:
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def supervised(model: Path, below: LevelsConfig) -> AsyncIterator[SupervisedEngine]:
    """Run an engine."""
    own = SupervisedEngine(model, below)
    own.engine.start()
    try:
        yield own
    finally:
        await own.engine.close()


def prompts(count: int) -> list[tuple[int, ...]]:
    """Return prompts of the tiny model's tokens."""
    chance = random.Random(5)
    return [tuple(chance.randrange(3, 250) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


@pytest.mark.parametrize("has_disk", [pytest.param(False, marks=pytest.mark.nightly), True])
async def test_a_killed_engines_prefix_comes_back_from_host_memory(
    model: Path, disk: Path, *, has_disk: bool
) -> None:
    """All of it, with the same answer; what was erased before stays away."""
    below = levels(disk if has_disk else None)
    kept, erased = prompts(2)
    async with supervised(model, below) as own:
        pid = await own.ready()
        first, _ = await own.ask("first", kept)
        await own.ask("erased", erased)
        await own.host_has(2 * COPIES)
        answer, away = await own.engine.erase(b"n", lease_id=f"{erased[0]:02x}")
        assert (answer.levels[0].blocks, away) == (COPIES, frozenset())
        os.kill(pid, signal.SIGKILL)
        await own.ready()
        again, loaded = await own.ask("again", kept)
        _, gone = await own.ask("gone", erased)
        stats = (await own.engine.get_stats()).levels[0]

    assert again == first
    assert loaded == {"host": WHOLE * BLOCK}
    assert gone == {}
    assert (stats.recovered_total, stats.torn_total, stats.damaged_total) == (COPIES, 0, 0)


async def test_answers_stay_right_over_deaths_at_any_moment(model: Path, disk: Path) -> None:
    """In the middle of offloads, stores and loads; host memory is too small for all prompts."""
    asked = prompts(24)
    async with supervised(model, LevelsConfig()) as plain:
        await plain.ready()
        right = [
            (await plain.ask(f"r{number}", tokens, is_leased=False))[0]
            for number, tokens in enumerate(asked)
        ]
    chance, loads, number = random.Random(7), 0, 0
    async with supervised(model, levels(disk, host_mib=1)) as own:
        pid = await own.ready()
        for _ in range(DEATHS):
            last = number + chance.randrange(*LIFE_REQUESTS)
            try:
                while True:
                    number += 1
                    which = chance.randrange(len(asked))
                    if number == last:
                        asyncio.get_running_loop().call_later(
                            chance.uniform(0.0, 0.05), os.kill, pid, signal.SIGKILL
                        )
                    answer, loaded = await own.ask(
                        f"a{number}", asked[which], is_leased=which < LEASED
                    )
                    loads += bool(loaded)
                    assert answer == right[which]
            except EngineError as error:
                if error.code not in ("engine_died", "not_ready"):
                    raise  # it was not killed
            assert number >= last, "it died of itself"
            pid = await own.ready()
        stats = (await own.engine.get_stats()).levels[0]

    assert loads > 0
    assert stats.damaged_total == 0


LONG_ANSWER = 40
"""Tokens of answers in the middle of whose drafts an engine dies."""


def half_right(answer: list[int], chance: random.Random) -> tuple[int, ...]:
    """Return a prediction of an answer that is wrong at some places."""
    return tuple(token if chance.random() < 0.8 else chance.randrange(3, 250) for token in answer)


async def test_a_death_in_the_middle_of_drafts_loses_nothing(model: Path) -> None:
    """Promised blocks that accepted drafts have filled come back, and none of a rejected draft: the
    next engine answers with what host memory kept as one that computes all of it."""
    asked, chance = prompts(3), random.Random(8)
    wanted: dict[str, Any] = {"max_tokens": LONG_ANSWER}
    async with supervised(model, LevelsConfig()) as plain:
        await plain.ready()
        first = [
            (await plain.ask(f"r{number}", one, is_leased=False, drafts=False, **wanted))[0]
            for number, one in enumerate(asked)
        ]
        longer = [(*one, *answer) for one, answer in zip(asked, first, strict=True)]
        second = [
            (await plain.ask(f"s{number}", one, is_leased=False, drafts=False, **wanted))[0]
            for number, one in enumerate(longer)
        ]
        assert plain.accepted == 0
    loads = 0
    async with supervised(model, levels()) as own:
        pid = await own.ready()
        for death in range(DEATHS):
            for number, tokens in enumerate(asked):
                said = half_right(first[number], chance)
                answer, _ = await own.ask(f"{death}a{number}", tokens, prediction=said, **wanted)
                assert answer == first[number]
            dying = asyncio.create_task(
                own.ask(f"{death}d", longer[0], prediction=half_right(second[0], chance), **wanted)
            )
            asyncio.get_running_loop().call_later(
                chance.uniform(0.0, 0.05), os.kill, pid, signal.SIGKILL
            )
            with contextlib.suppress(EngineError):
                assert (await dying)[0] == second[0]
            pid = await own.ready()
            for number, tokens in enumerate(longer):
                said = half_right(second[number], chance)
                answer, loaded = await own.ask(
                    f"{death}b{number}", tokens, prediction=said, **wanted
                )
                assert answer == second[number]
                loads += bool(loaded)

    assert own.accepted > DEATHS * LONG_ANSWER
    assert loads > 0
