"""Soak test: after a swarm of clients that disconnect at random, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from engine.client.request_stream import RequestStream
from gateway.caching import Contract
from gateway.generation.delivery import IdempotentRequest
from gateway.generation.execution import Execution
from gateway.generation.output_stream import OutputStream
from gateway.ledger.metering import LedgerReservation
from tenancy.accounting.audit import check_books
from tenancy.accounting.reconcile import reconcile
from tenancy.limits import Reservation
from tenancy.storage.sqlite import SqliteStore
from tests.e2e.swarm import PLANTED, Swarm
from tests.unit.gateway.gateway_fixture import GatewayFixture

REQUESTS = 600
OF_A_REQUEST = (
    LedgerReservation, Execution, OutputStream, Contract, IdempotentRequest, RequestStream,
    Reservation,
)  # fmt: skip


def alive() -> Counter[str]:
    """Return live objects of requests by kind."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in OF_A_REQUEST)


def descriptors(database: Path) -> tuple[int, int]:
    """Return this process's open files and sockets: those of a database, and others but for those
    of databases that other tests have left to SQLite.

    Some of the database's open later: the query pool has several connections, and SQLite keeps a
    closed one for the next.
    """
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            names.append(str(link.readlink()))
    of_any = sum("test.db" in name for name in names)
    return sum(name.startswith(str(database)) for name in names), len(names) - of_any


@pytest.mark.nightly
async def test_swarm_leaves_no_hold_block_task_or_descriptor(
    unopened_gateway: GatewayFixture,
) -> None:
    """Every dialect, streams, idempotency keys, cached contents, erasures and invalid requests
    at once; a third of the clients disconnect early. No object stays, every response has one
    entry, all three token counts agree, and the log has no text of a prompt."""
    gateway = unopened_gateway
    assert isinstance(gateway.store, SqliteStore)
    database = gateway.store.path
    gateway.set_limits(requests_per_tenant_max=8)
    await gateway.open()
    try:
        swarm = Swarm(gateway.url, tuple(gateway.keys.values()), gateway.model, seed=7)
        await swarm.run(30)
        # A second connection to the database is opened.
        await gateway.ask("/v1/usage", method="GET")
        await gateway.check_quiet()
        tasks, (_, fds) = len(asyncio.all_tasks()), descriptors(database)

        await swarm.run(REQUESTS)

        await gateway.check_quiet()
        assert swarm.wrong == []
        assert swarm.left > REQUESTS // 5
        assert [line for line in gateway.lines if line["event"] == "error"] == []
        assert PLANTED not in json.dumps(gateway.lines)
        await gateway.until(lambda: len(asyncio.all_tasks()) <= tasks)
        await gateway.until(lambda: descriptors(database)[1] <= fds)
        # Three files for each connection of the pool and of the background tasks.
        assert descriptors(database)[0] < 40
        assert alive() == Counter()
        context = gateway.gateway.context
        context.contracts.entries.check()
        assert await asyncio.to_thread(check_books, gateway.store) == []
        await gateway.gateway.reconciler.note()
        (epoch,) = reconcile(gateway.store)
        assert epoch.ledger == epoch.engine == epoch.metrics
        for who in gateway.keys:
            status, _, _ = await gateway.ask("/v1/cache", method="DELETE", who=who)
            assert status == 200
        stats = await gateway.engine.get_stats()
        assert (stats.free_blocks, len(gateway.engine.namespaces)) == (stats.blocks, 0)
        assert len(context.contracts.entries) == 0
    finally:
        await gateway.close()
