"""What is left of a crowd of clients that do everything, and leave when they like: nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

from engine.client.client import RequestStream
from gateway.caching import Contract
from gateway.generation.generation import Answer
from gateway.generation.idempotency import NamedRequest
from gateway.generation.output_stream import AnswerStream
from gateway.ledger.metering import Account
from tenancy.accounting.audit import check_books
from tenancy.accounting.reconcile import reconcile
from tenancy.limits import Reservation
from tests.bench.soak import PLANTED, Swarm
from tests.unit.gateway.gateway_fixture import House

REQUESTS = 600
OF_A_REQUEST = (
    *(Account, Answer, AnswerStream, Contract, NamedRequest, RequestStream, Reservation),
)


def alive() -> Counter[str]:
    """What belongs to requests, by kind."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in OF_A_REQUEST)


def descriptors() -> tuple[int, int]:
    """Open files and sockets of this process: the database's, and others. Of the database's some
    more come later: reports have places, and SQLite keeps a closed one for the next connection."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            names.append(str(link.readlink()))
    of_database = sum("test.db" in name for name in names)
    return of_database, len(names) - of_database


async def test_nothing_is_left_of_a_crowd(made: House) -> None:
    """Every dialect, streams, names, cached contents, erasures and nonsense at once, and a third of
    the clients leave early: no hold, block, task, descriptor or object stays, every answer is in
    the books once, all three counts of its tokens agree, and no word of a prompt is in the log."""
    made.set_limits(requests_per_tenant_max=8)
    await made.open()
    try:
        swarm = Swarm(made.url, tuple(made.keys.values()), made.model, seed=7)
        await swarm.run(lambda asked: asked < 30)
        await made.ask("/v1/usage", method="GET")  # a second connection to the database is opened
        await made.check_quiet()
        tasks, (_, fds) = len(asyncio.all_tasks()), descriptors()

        await swarm.run(lambda asked: asked < REQUESTS)

        await made.check_quiet()
        assert swarm.wrong == []
        assert swarm.left > REQUESTS // 5
        assert [line for line in made.lines if line["event"] == "error"] == []
        assert PLANTED not in json.dumps(made.lines)
        await made.until(lambda: len(asyncio.all_tasks()) <= tasks)
        await made.until(lambda: descriptors()[1] <= fds)
        assert descriptors()[0] < 30
        assert alive() == Counter()
        context = made.gateway.context
        context.contracts.entries.check()
        assert await asyncio.to_thread(check_books, made.store) == []
        await made.gateway._reckoning.note()
        (epoch,) = reconcile(made.store)
        assert epoch.ledger == epoch.engine == epoch.metrics
        for who in made.keys:
            status, _, _ = await made.ask("/v1/cache", method="DELETE", who=who)
            assert status == 200
        stats = await made.engine.get_stats()
        assert (stats.free_blocks, len(made.engine.namespaces)) == (stats.blocks, 0)
        assert len(context.contracts.entries) == 0
    finally:
        await made.close()
