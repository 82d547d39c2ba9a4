"""A server whose engines part long prompts: a real gateway and ledger, real engines and a model.

What clients and the ledger are told is what one engine would have done, and `trunkline reconcile`
finds nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from msgspec.structs import replace

from engine.config import LevelsConfig
from engine.model_store import prepare
from engine.strides import STRIDE_TOKENS
from tests.crash.fleet import PATIENCE_S, KeptReplica, gateway_settings
from tests.crash.parting_server import PROGRAM
from tests.crash.patient_peer import COMMAND
from tests.crash.peers import CONFIG
from tests.crash.test_process_deaths import Place, ended
from tests.crash.test_replicated_server import count_of
from tests.models import tiny_config, write_folder
from tests.server_process import Server, run_server

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(300)]

CHANCE = random.Random(2)
WORDS = ["ab", "cd ", "efg", "h, ", "ijk ", "lm. "]
TEXTS = ["".join(CHANCE.choices(WORDS, k=1_150)) for _ in range(3)]
ROLES = {"e0": "prefill", "e1": "decode", "e2": "decode"}


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: each start makes a folder, in microseconds."""


async def chat(server: Server, text: str, **more: Any) -> dict[str, int]:
    """Return the usage of a chat; raises TimeoutError where its client leaves."""
    messages = [{"role": "user", "content": text}]
    async with server.request(messages=messages, max_tokens=8, **more) as (status, content):
        answer = json.loads(await content.read())
    assert status == 200, answer
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"prompt": usage["prompt_tokens"], "cached": cached}


async def leave(server: Server, text: str, after_s: float) -> None:
    """Ask, and leave."""
    try:
        async with asyncio.timeout(after_s):
            await chat(server, text)
    except TimeoutError:
        pass


async def until_both_fetch(server: Server, session: ClientSession) -> None:
    """Wait until all engines serve and have told their queues."""
    async with asyncio.timeout(PATIENCE_S):
        while await count_of(server, session, "trunkline_replica_facts_total") < 2 * len(ROLES):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def booked(place: Place) -> Sequence[tuple[int, int, int]]:
    """Return prompt, read and physically cached tokens of the whole answers, in their order."""
    wanted = "prompt_tokens, cache_read_tokens, physical_cached_tokens"
    with closing(place.look()) as store:
        return store.query(f"select {wanted} from ledger where ending = 'done' order by rowid")


async def test_answers_apart_are_billed_as_one_engines(tmp_path: Path) -> None:
    """A first prompt is computed, whoever computes it; the same again is read. Clients that leave
    at any time change nothing in the books."""
    model = write_folder(tmp_path / "tiny", tiny_config(context=8192))
    card = prepare("tiny", model, tmp_path / "prepared")
    place = Place(tmp_path, None)
    async with AsyncExitStack() as opened:
        ports = {}
        for name, role in ROLES.items():
            config = replace(CONFIG, role=role, kv_memory_mib=24, levels=LevelsConfig(host_mib=24))
            kept = KeptReplica(name, "", config=config, model=Path(card.folder), command=COMMAND)
            opened.push_async_callback(kept.close)
            kept.keeper.start()
            ports[name] = kept.port
        place.settings.write_text(gateway_settings(ports, prompts_apart="auto"))
        starting = run_server(model, place.data, place.settings, PROGRAM)
        server = await asyncio.to_thread(starting.__enter__)
        try:
            async with ClientSession() as session:
                await until_both_fetch(server, session)
                first = [await chat(server, text) for text in TEXTS]
                again = [await chat(server, text) for text in TEXTS]
                apart = await count_of(server, session, "trunkline_prompts_apart_total")
                others = ["".join(CHANCE.choices(WORDS, k=1_150)) for _ in range(12)]
                waits = [0.02 * (1 + number) for number in range(12)]
                await asyncio.gather(*map(leave, [server] * 12, others, waits))
            status = await ended(server)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)

    assert status == 0
    assert apart >= 3
    assert all(one["cached"] < 16 for one in first)  # the template's first tokens
    assert [one for one in again if one["cached"] < one["prompt"] - 2 * STRIDE_TOKENS] == []
    sums = [(one["prompt"], one["cached"], one["cached"]) for one in (*first, *again)]
    assert booked(place)[:6] == sums
    place.check()
