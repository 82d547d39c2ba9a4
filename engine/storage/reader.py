"""Reads records from slabs into slots, for the I/O threads: a slot gets only bytes that are right.

What a record says of itself and what its row says must agree, and its bytes must have their digest.
Each thread reads into a buffer of its own first, so that a process which is killed in a call of a
disk that hangs writes to no slot afterwards. It knows no index: the row comes with the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from mmap import mmap

import xxhash

from engine.api import FIDELITIES, Namespace
from engine.storage.index.index import RecordRow
from engine.storage.plans import PlannedRead
from engine.storage.sealing.seals import RecordSeal
from engine.storage.slabs.record import HEADER_BYTES, DamagedRecord, decode_header
from engine.storage.slabs.slabs import SlabFiles


class RecordReader:
    """Reads the records of one store. Thread-safe."""

    def __init__(
        self,
        slabs: SlabFiles,
        view: Callable[[int, int], memoryview],
        store_id: bytes,
        place_bytes: int,
        uptime_s: Callable[[], float],
    ) -> None:
        """`view` returns a slot's bytes, of a size; `place_bytes`: of the largest places."""
        self._slabs, self._view, self._store_id = slabs, view, store_id
        self._place_bytes, self._uptime_s = place_bytes, uptime_s
        self._buffers = threading.local()

    def read(self, plan: PlannedRead) -> None:
        """Read a record, check it, and copy it to its slot; set the plan's verdict."""
        began_s = self._uptime_s()
        row = plan.row
        try:
            buffer = self._buffer()[: row.place_bytes]
            if self._slabs.read(row.place, buffer) < row.place_bytes:
                raise DamagedRecord("the slab ends within the record")
            self.fill(plan, self.opened(plan, buffer))
        except DamagedRecord:
            plan.verdict = "damaged"
        except KeyError:  # no such slab
            plan.verdict = "failed"
        except OSError as error:
            plan.error = error
        finally:
            plan.seconds = self._uptime_s() - began_s

    def opened(self, plan: PlannedRead, record: memoryview) -> memoryview:
        """Return the payload of a record's bytes. Raises DamagedRecord."""
        return payload_of(record, plan.row, self._store_id, plan.namespace, plan.seal)

    def fill(self, plan: PlannedRead, payload: memoryview) -> bool:
        """Copy a payload that was `opened` to its slot; set the plan's verdict, and return whether
        it is done."""
        try:
            self._view(plan.slot, plan.row.payload_bytes)[:] = payload
        except IndexError:  # no such slot
            plan.verdict = "failed"
            return False
        plan.verdict = "done"
        return True

    def _buffer(self) -> memoryview:
        """Return this thread's own buffer."""
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(mmap(-1, self._place_bytes))
        view: memoryview = self._buffers.view
        return view


def payload_of(
    record: memoryview,
    row: RecordRow,
    store_id: bytes,
    namespace: Namespace,
    seal: RecordSeal | None,
) -> memoryview:
    """Return the payload of a record's bytes if all of it is what its row says; `seal`: of its
    namespace, if the store is sealed.

    Raises DamagedRecord for what is no record, is another one, or does not open.
    """
    size = row.payload_bytes
    head: bytes | memoryview = record
    payload = record[HEADER_BYTES : HEADER_BYTES + size]
    if seal is not None:
        head, payload = seal.open(record, size)
    header = decode_header(head)
    said = (
        header.store_id,
        header.record_id,
        header.parent,
        header.namespace,
        header.run,
        header.payload_bytes,
        header.check,
        header.fidelity,
    )
    known = (
        store_id,
        row.record_id,
        row.parent,
        namespace,
        row.run,
        size,
        row.check,
        FIDELITIES[row.fidelity],
    )
    if said != known:
        raise DamagedRecord("the header is of another record")
    if xxhash.xxh3_128_digest(payload) != row.check:
        raise DamagedRecord("the payload's digest is wrong")
    return payload
