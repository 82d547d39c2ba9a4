"""The id of a gateway among those of one database, which it holds while it runs.

A data directory has its gateway's id in a file. A copy of the directory has it too, and two
gateways under one id would take each other's rows for their own: promises, findings, samples. So
the database keeps a lock for each id that runs. A database in a file has one gateway without an id;
its own lock admits one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from engine.api import Clock
from gateway.periodic_task import PeriodicTask
from tenancy.errors import StoreError
from tenancy.storage.atomic_files import atomic_write
from tenancy.storage.interface import Store

ID_FILE = "gateway.id"
"""Names this gateway among those of one database, in the data directory."""
HOLD_S = 5.0
"""Seconds between two looks whether the lock is still held: a lost connection gives it up."""
PATIENCE_S = 20.0
"""Seconds that a start waits for the id: the server notices after so many that a host is lost."""
RETRY_S = 0.5

Log = Callable[[str, dict[str, object]], None]


def read_gateway_id(data: Path, store: Store) -> str:
    """Return the id of the gateway with this data directory; "" if the database has one gateway.

    The first call makes the id. Raises OSError.
    """
    if store.is_local:
        return ""
    path = data / ID_FILE
    if not path.exists():
        with atomic_write(path) as part:
            part.write_text(secrets.token_hex(8) + "\n")
    return path.read_text().strip()


def take_gateway_id(
    data: Path,
    store: Store,
    *,
    process: int | None = None,
    patience_s: float = PATIENCE_S,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Hold this gateway's id until the store is closed; return it. `process`: of several processes
    of a gateway, each of which has an id of its own.

    Raises StoreError if another gateway of the database still runs as it after `patience_s`.
    """
    name = read_gateway_id(data, store)
    if process is not None:
        name = f"{name}/{process}"
    while not store.hold_gateway(name):
        if patience_s <= 0:
            message = (
                f"Another gateway of {store.place} runs as {name}, the id in {data / ID_FILE}."
                " Stop that one; or, if this data directory is a copy of its own, delete that file:"
                " the next start makes a new id."
            )
            raise StoreError("gateway_id_taken", message)
        pause(RETRY_S)
        patience_s -= RETRY_S
    return name


def name_start(gateway_id: str) -> str:
    """Return a name of a start of a gateway: another one each time."""
    return f"{gateway_id}/{secrets.token_hex(4)}"


def gateway_of(start: str) -> str:
    """Return the id of the gateway of a start."""
    return start.rpartition("/")[0]


class GatewayIdHold:
    """Holds a gateway's id again after its connection to the database was lost."""

    def __init__(self, store: Store, name: str, log: Log, clock: Clock) -> None:
        self._store, self._name, self._log = store, name, log
        self._is_told = False
        self._task = PeriodicTask("gateway_id", self.renew, HOLD_S, log, clock)

    def start(self) -> None:
        """Start the task on the running event loop."""
        if self._name:
            self._task.start()

    async def close(self) -> None:
        """Stop the task; the store's end gives the id up."""
        await self._task.close()

    async def renew(self) -> None:
        """Hold the id, and log when another gateway has it."""
        try:
            is_held = await asyncio.to_thread(self._store.hold_gateway, self._name)
        except StoreError:  # other tasks report a database that is away
            return
        if not is_held and not self._is_told:
            self._log("gateway_id_taken", {"gateway": self._name})
        self._is_told = not is_held
