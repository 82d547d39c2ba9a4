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

from engine.api import FIDELITIES
from engine.storage.plans import PlannedRead
from engine.storage.slabs.record import (
    HEADER_BYTES,
    DamagedRecord,
    RecordHeader,
    decode_header,
)
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
            is_whole = self._slabs.read(row.place, buffer) == row.place_bytes
            payload = self.opened(plan, buffer) if is_whole else None
            if payload is None:
                plan.verdict = "damaged"
                return
            self.fill(plan, payload)
        except DamagedRecord:
            plan.verdict = "damaged"
        except KeyError:  # no such slab
            plan.verdict = "failed"
        except OSError as error:
            plan.error = error
        finally:
            plan.seconds = self._uptime_s() - began_s

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

    def opened(self, plan: PlannedRead, record: memoryview) -> memoryview | None:
        """Return the payload of a record's bytes, or None if they are another record's.

        Raises DamagedRecord for what is no record, or does not open.
        """
        size = plan.row.payload_bytes
        header: bytes | memoryview = record
        payload = record[HEADER_BYTES : HEADER_BYTES + size]
        if plan.seal is not None:
            header, payload = plan.seal.open(record, size)
        return payload if self._agrees(plan, decode_header(header), payload) else None

    def _agrees(self, plan: PlannedRead, header: RecordHeader, payload: memoryview) -> bool:
        row = plan.row
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
            self._store_id,
            row.record_id,
            row.parent,
            plan.namespace,
            row.run,
            row.payload_bytes,
            row.check,
            FIDELITIES[row.fidelity],
        )
        return said == known and xxhash.xxh3_128_digest(payload) == row.check
