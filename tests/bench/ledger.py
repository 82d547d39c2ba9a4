"""Cost of the ledger's writes and queries: `python -m tests.bench.ledger [ENTRIES]`.

Latency of one hold and one settlement alone; entries per second under concurrent load; the writer
thread's processor time per request (the figure that a busy machine changes least), with and without
rate cards and budgets, in a file and on a PostgreSQL server on the same disk; and usage queries
over so many entries (default: a million; 0 skips them) spread over 90 days, 50 tenants, three keys
each and two models. Ratios are of one run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import apsw

from tenancy.accounting.usage import usage
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.entries import ENTRY_FIELDS
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.storage.postgres import PostgresStore
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import DAY_MS, UsageEntry
from tests.bench.results import print_line
from tests.bench.timing import seconds_of
from tests.unit.tenancy.storage.postgres_server import BINARIES, Server

ALONE = 400
AT_ONCE = 20_000
BATCHES = 60
ROUNDS = 5
TENANTS = 50
KEYS = 3
DAYS = 90


def entry(request_id: str, at_ms: int) -> UsageEntry:
    return UsageEntry(
        request_id,
        *(1, 1, "m", "done", at_ms, at_ms, 1000, 600, 300, 100, 50, 600),
        read={"5m": 600},
        write={"5m": 200, "1h": 100},
        epoch="e",
    )


def writer_us(ledger: Ledger, items: int) -> float:
    """Return the writer thread's processor time for a hold and an entry, in batches of so many
    items: holds, and entries of the batch before."""
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "ledger"]
    assert writer.ident is not None, "it runs"
    clock, landed = time.pthread_getcpuclockid(writer.ident), SimpleQueue[Future[None]]()
    began, began_at, held = 0.0, time.monotonic_ns(), list[str]()
    for batch in range(BATCHES + 1):
        if batch == 1:
            began = time.clock_gettime(clock)
        names = [f"{began_at}-{batch}-{number}" for number in range(items // 2)]
        for name in names:
            ledger.write(Hold(name, 1, 1, "m", 1, 1000, 100)).add_done_callback(landed.put)
        for name in held:
            ledger.write(entry(name, 1)).add_done_callback(landed.put)
        for _ in (*names, *held):
            landed.get().result()
        held = names
    return (time.clock_gettime(clock) - began) / BATCHES / (items // 2) * 1e6


def latencies(store: Store, *, has_money: bool) -> None:
    """Measure one item alone, then many at once, then batches."""
    create_tenant(store, lambda: 1, "ada")
    if has_money:
        card = RateCard("std", input=3_000_000, output=15_000_000, cache_read=300_000)
        add_card(store, lambda: 1, card)
        set_budget(store, Budget(1, "day", hard_micros=10**15))
        set_budget(store, Budget(1, "month", hard_micros=10**15))
    ledger = Ledger(store, lambda: 1)
    times: dict[str, list[float]] = {"hold": [], "settle": []}
    for number in range(ALONE):
        name = f"alone-{number}"
        began = time.perf_counter()
        ledger.hold(Hold(name, 1, 1, "m", 1, 1000, 100)).result()
        held = time.perf_counter()
        ledger.settle(entry(name, 1)).result()
        times["hold"].append(held - began)
        times["settle"].append(time.perf_counter() - held)
    began = time.perf_counter()
    futures = [
        future
        for number in range(AT_ONCE)
        for future in (
            ledger.hold(Hold(str(number), 1, 1, "m", 1, 1000, 100)),
            ledger.settle(entry(str(number), 1)),
        )
    ]
    for future in futures:
        future.result()
    rate = AT_ONCE / (time.perf_counter() - began)
    kind = "file" if store.is_local else "server"
    what = f"{'with prices and two budgets' if has_money else 'without prices'}, {kind}"
    for name, seconds in times.items():
        p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
        print_line(f"{name} alone {what}: p50 {p50 * 1000:.2f} ms, p99 {p99 * 1000:.2f} ms")
    print_line(f"at once {what}: {rate:,.0f} requests/s (a hold and an entry each)")
    for items in (16, 32, 128):
        used = min(writer_us(ledger, items) for _ in range(ROUNDS))
        print_line(f"writer's thread {what}: {used:.0f} us a request in batches of {items} items")
    ledger.close()
    store.close()


def fill(store: SqliteStore, count: int) -> None:
    """Write so many entries without the ledger's thread: rows and their hourly sums."""
    for number in range(TENANTS):
        create_tenant(store, lambda: 1, f"tenant-{number}")
    with closing(apsw.Connection(str(store.path))) as db:
        db.execute("pragma synchronous=off; pragma cache_size=-400000").fetchall()
        for first in range(0, count, 500_000):
            with db:
                db.execute(
                    "with recursive n (i) as"
                    " (select ?1 union all select i + 1 from n where i + 1 < ?2)"
                    f" insert into ledger ({', '.join(ENTRY_FIELDS)})"
                    " select printf('%09d', i), 1 + i % ?3, 1 + i % ?4, 'm' || (i % 2), 'done',"
                    " cast(i * ?5 as integer), cast(i * ?5 as integer), 1000, 600, 300, 100, 50,"
                    " 600, '{\"5m\":600}', '{\"5m\":300}', 'default', 'standard', '', 0, 5,"
                    " 'e', 'std@1', 123456789, 5, cast(i * ?5 as integer) from n",
                    (first, min(count, first + 500_000), TENANTS, KEYS, DAYS * DAY_MS / count),
                )
    with store.change() as db:
        db.execute(
            "insert into usage_hours (tenant_id, hour_ms, key_id, model, requests, prompt_tokens,"
            " output_tokens, charge_micros) select tenant_id, booked_ms / 3600000 * 3600000,"
            " key_id, model, count(*), sum(prompt_tokens), sum(output_tokens), sum(123)"
            " from ledger group by 1, 2, 3, 4"
        )
        db.execute(
            "insert into usage_days (tenant_id, day_ms, key_id, model, requests, prompt_tokens,"
            " output_tokens, charge_micros) select tenant_id, hour_ms / 86400000 * 86400000,"
            " key_id, model, sum(requests), sum(prompt_tokens), sum(output_tokens),"
            " sum(charge_micros) from usage_hours group by 1, 2, 3, 4"
        )


def measure_queries(folder: Path, count: int) -> None:
    store = SqliteStore(folder / "many.db")
    fill(store, count)
    hours = store.query("select count(*) from usage_hours")[0][0]
    print_line(
        f"{count:,} entries, {hours:,} rows of hours, {store.path.stat().st_size / 2**20:,.0f} MiB"
    )
    month = (30 * DAY_MS + 1_234_567, 60 * DAY_MS + 7_654_321)
    asked: dict[str, Callable[[], object]] = {
        "all tenants, all time": lambda: usage(store),
        "one tenant, all time": lambda: usage(store, tenant="tenant-7"),
        "one tenant, 30 days to the millisecond, by day": lambda: usage(
            store, tenant="tenant-7", since_ms=month[0], until_ms=month[1], by=["day"]
        ),
        "one tenant, 30 days, by key and model": lambda: usage(
            store, tenant="tenant-7", since_ms=month[0], until_ms=month[1], by=["key", "model"]
        ),
        "all tenants, 30 days to the millisecond": lambda: usage(
            store, since_ms=month[0], until_ms=month[1]
        ),
    }
    for name, ask in asked.items():
        print_line(f"{name}: {statistics.median(seconds_of(ask, 7)) * 1000:.1f} ms")
    sums = "select tenant_id, sum(prompt_tokens) from ledger group by tenant_id"
    (seconds,) = seconds_of(partial(store.query, sums))
    print_line(f"the same sums over entries instead: {seconds * 1000:.0f} ms")
    store.close()


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entries", nargs="?", type=int, default=1_000_000)
    count = parser.parse_args().entries
    with tempfile.TemporaryDirectory() as folder:
        if count:
            measure_queries(Path(folder), count)
        for has_money in (False, True):
            latencies(SqliteStore(Path(folder) / f"{has_money}.db"), has_money=has_money)
    if BINARIES is not None:
        server = Server()
        for has_money in (False, True):
            store = PostgresStore(server.address(server.database()), is_ready=True)
            latencies(store, has_money=has_money)
        server.close()


if __name__ == "__main__":
    main()
