"""Write responses to the database in batches, off the event loop.

Many answers end at once, and each would wait for a transaction of its own. A task writes all that
are waiting in one transaction and then the next ones. `gateway.generation.stored_responses` gives
it the responses; it knows no dialect.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from gateway.config import Config
from tenancy.responses.stored_responses import StoredResponse, store_responses
from tenancy.responses.stored_sums import Obstacle, StorageQuota
from tenancy.storage.interface import Store

BATCH_RECORDS_MAX = 64
"""Responses that one transaction stores."""
BATCH_BYTES_MAX = 16 * 2**20
"""Bytes of one transaction, unless a single response has more."""


def storage_quota(config: Config) -> StorageQuota:
    """Return the bounds on what one tenant stores."""
    return StorageQuota(config.responses.per_tenant_max, config.responses.tenant_bytes_max)


Waiting = tuple[StoredResponse, asyncio.Future[Obstacle]]


class ResponseWriter:
    """Writes responses; each tenant's first come, first served. Belongs to one event loop."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._quota = storage_quota(config)
        self._thread_bytes_max = config.server.body_bytes_max
        self._waiting: OrderedDict[int, deque[Waiting]] = OrderedDict()
        """Waiting responses by tenant; the tenants in the order of their turns."""
        self._task: asyncio.Task[None] | None = None

    async def write(self, record: StoredResponse) -> Obstacle:
        """Store a response; return why it is not stored, or an empty text once it is durable.

        A cancelled caller does not stop the write. Raises StoreError, and any other error of the
        write.
        """
        written: asyncio.Future[Obstacle] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(record.tenant_id, deque()).append((record, written))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_waiting())
        return await written

    async def close(self) -> None:
        """Wait until everything is written."""
        if self._task is not None:
            await self._task

    async def _write_waiting(self) -> None:
        while self._waiting:
            batch = self._take_batch()
            records = [record for record, _ in batch]
            found: list[Obstacle] | Exception
            try:
                found = await asyncio.to_thread(
                    store_responses, self._store, records, self._quota, self._thread_bytes_max
                )
            except Exception as error:  # raised to each caller: none may wait for ever
                found = error
            for number, (_, written) in enumerate(batch):
                if written.done():  # its caller was cancelled
                    continue
                if isinstance(found, Exception):
                    written.set_exception(found)
                else:
                    written.set_result(found[number])

    def _take_batch(self) -> list[Waiting]:
        """Take a response of each tenant in turn: one with many or large ones delays no other."""
        batch: list[Waiting] = []
        size = 0
        while self._waiting and len(batch) < BATCH_RECORDS_MAX:
            tenant_id, queue = next(iter(self._waiting.items()))
            size += queue[0][0].total_size
            if batch and size > BATCH_BYTES_MAX:
                break
            batch.append(queue.popleft())
            if queue:
                self._waiting.move_to_end(tenant_id)
            else:
                del self._waiting[tenant_id]
        return batch
