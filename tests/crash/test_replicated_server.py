"""A server whose engines are elsewhere and are killed under load: no answer is cut, none is billed
twice.

A real gateway with a real ledger, keepers, TLS and engine processes over the fake runner, whose
answers are known. `CRASH=long` (`make crash`) kills more often; `DEATHS` says how often.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.model_store import ModelCard
from tests.crash import quick_engine
from tests.crash.fleet import CONFIG, KeptReplica, gateway_settings
from tests.crash.test_process_deaths import IS_LONG, Place, ended, until
from tests.server_process import Server, run_server

DEATHS = int(os.environ.get("DEATHS", "1000" if IS_LONG else "4"))
BUDGET_S = float(os.environ.get("DEATHS_S", "3000"))
"""Seconds after which no further engine is killed."""
CLIENTS = 6
ASKED_AGAIN_MAX = 300
PATIENCE_S = 60.0
NAMES = ("e0", "e1")
LENGTHS = (1, 40, 150, 400)
SEEDS = (None, 7)
COMMAND = (sys.executable, "-m", quick_engine.__name__)
QUICK_CONFIG = replace(CONFIG, heartbeat_s=0.2)

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(BUDGET_S + 600)]


@asynccontextmanager
async def kept_engines(
    card: ModelCard,
    config: EngineConfig = QUICK_CONFIG,
    command: tuple[str, ...] = COMMAND,
    disks: Path | None = None,
) -> AsyncIterator[dict[str, KeptReplica]]:
    """Start engines of a model under keepers. `disks`: where each has a folder for its disk."""
    async with AsyncExitStack() as opened:
        kept = {}
        for name in NAMES:
            own = config
            if disks is not None:
                own = replace(config, levels=replace(config.levels, dir=str(disks / name)))
            one = kept[name] = KeptReplica(
                name, "", config=own, model=Path(card.folder), command=command
            )
            opened.push_async_callback(one.close)
            one.keeper.start()
        yield kept


async def count_of(server: Server, session: ClientSession, metric: str) -> int:
    """Return the sum of a metric's samples."""
    async with session.get(f"{server.admin_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [line.split() for line in lines if re.match(rf"{metric}[{{ ]", line)]
    return int(sum(float(words[-1]) for words in found))


async def until_all_serve(server: Server, session: ClientSession, deaths: int) -> None:
    """Wait until the gateway has seen so many deaths, and all engines take requests again."""
    wanted = {"trunkline_engine_restarts_total": deaths, "trunkline_replica_ready": len(NAMES)}
    async with asyncio.timeout(PATIENCE_S):
        while {name: await count_of(server, session, name) for name in wanted} != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class CheckedLoad:
    """Clients without a pause. Each prompt is another one, since one that is in the step at two
    deaths is taken for their cause; answers are asked again when nothing dies any more."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.texts: dict[tuple[int, int, int | None], str] = {}
        self.entered: dict[str, int] = {}
        """Output tokens of the whole answers, by request id."""
        self.wrong: list[str] = []
        self.is_over = False
        self._prompts = itertools.count()

    def has(self, answers: int) -> bool:
        """Return whether so many answers were whole."""
        return len(self.entered) >= answers

    async def ask(self, prompt: int, tokens: int, seed: int | None, *, is_streamed: bool) -> str:
        """Send one request; return its text."""
        messages = [{"role": "user", "content": f"hello {prompt}"}]
        options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "messages": messages}
        if seed is not None:
            options |= {"temperature": 1, "seed": seed}
        if is_streamed:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self.server.request(**options) as (status, content):
            text = (await content.read()).decode()
        if status != 200:
            return f"{status}: {text}"
        if not is_streamed:
            said = json.loads(text)
            self.entered[said["id"].partition("-")[2]] = said["usage"]["completion_tokens"]
            return str(said["choices"][0]["message"]["content"])
        if not text.endswith("data: [DONE]\n\n"):
            return f"a cut stream: {text[-200:]}"
        events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
        self.entered[events[0]["id"].partition("-")[2]] = events[-1]["usage"]["completion_tokens"]
        parts = [one["choices"][0]["delta"].get("content") for one in events if one["choices"]]
        return "".join(part or "" for part in parts)

    async def run(self, number: int) -> None:
        """Ask until it is over; every other client streams."""
        chance = random.Random(number)
        while not self.is_over:
            asked = next(self._prompts), chance.choice(LENGTHS), chance.choice(SEEDS)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    self.texts[asked] = await self.ask(*asked, is_streamed=bool(number % 2))
            except (ClientError, LookupError, ValueError, TimeoutError) as error:
                self.texts[asked] = f"no answer: {error!r}"

    async def check(self, asked: list[tuple[int, int, int | None]]) -> None:
        """Ask again, and compare."""
        while asked:
            one = asked.pop()
            if (text := await self.ask(*one, is_streamed=False)) != self.texts[one]:
                self.wrong.append(f"{one}: {self.texts[one][:300]!r}; expected {text[:300]!r}")


async def test_killed_engines_cut_no_answer_and_bill_none_twice(
    model: Path, card: ModelCard, tmp_path: Path
) -> None:
    """Under load, each kill hits requests that wait, begin, or have given tokens: every answer is
    whole and that of an engine that lives, with one entry; engine, ledger and metrics agree."""
    place = Place(tmp_path, None)
    began_s, deaths = time.monotonic(), 0
    async with kept_engines(card) as kept:
        ports = {name: one.port for name, one in kept.items()}
        place.settings.write_text(gateway_settings(ports))
        starting = run_server(model, place.data, place.settings)
        server = await asyncio.to_thread(starting.__enter__)
        try:
            async with ClientSession() as session:
                load = CheckedLoad(server)
                clients = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
                chance = random.Random(3)
                while deaths < DEATHS and time.monotonic() - began_s < BUDGET_S:
                    await until_all_serve(server, session, deaths)
                    goal = len(load.entered) + chance.randrange(4)
                    await until(partial(load.has, goal))
                    await kept[chance.choice(NAMES)].kill()
                    deaths += 1
                load.is_over = True
                await asyncio.gather(*clients)
                answers, again = len(load.texts), list(load.texts)[-ASKED_AGAIN_MAX:]
                await asyncio.gather(*(load.check(again) for _ in range(CLIENTS)))
                moved = await count_of(server, session, "trunkline_moved_requests_total")
            status = await ended(server)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)
    print(f"{deaths} kills, {moved} moves, {answers} answers")  # noqa: T201 (make crash)

    assert load.wrong == []
    assert status == 0
    assert place.entries() == {name: ("done", count) for name, count in load.entered.items()}
    assert moved
    place.check()


async def test_prompts_of_one_call_over_both_engines_have_whole_books(
    model: Path, card: ModelCard, tmp_path: Path
) -> None:
    """Each engine counts its prompts, and the call has one entry."""
    place = Place(tmp_path, None)
    async with kept_engines(card) as kept:
        place.settings.write_text(gateway_settings({name: one.port for name, one in kept.items()}))
        starting = run_server(model, place.data, place.settings)
        server = await asyncio.to_thread(starting.__enter__)
        try:
            async with ClientSession(headers={"Authorization": f"Bearer {server.key}"}) as session:
                await until_all_serve(server, session, 0)
                prompts = [f"{number} " * 60 for number in range(8)]
                body = {"model": "tiny", "prompt": prompts, "max_tokens": 20, "ignore_eos": True}
                async with session.post(f"{server.url}/v1/completions", json=body) as response:
                    answer = await response.json()
            status = await ended(server)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)

    assert answer["usage"]["completion_tokens"] == 8 * 20
    assert status == 0
    with closing(place.look()) as store:
        counted = store.query("select count(*) from engine_epochs where output_tokens > 0")
    assert counted == [(2,)]
    assert [tokens for _, tokens in place.entries().values()] == [8 * 20]
    place.check()
