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

from engine.storage.plans import PlannedRead
from engine.storage.record import (
    FIDELITIES,
    HEADER_BYTES,
    DamagedRecord,
    RecordHeader,
    decode_header,
)
from engine.storage.slabs import SlabFiles


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
            payload = buffer[HEADER_BYTES : HEADER_BYTES + row.payload_bytes]
            if not is_whole or not self._agrees(plan, decode_header(buffer), payload):
                plan.verdict = "damaged"
                return
            self._view(plan.slot, row.payload_bytes)[:] = payload
            plan.verdict = "done"
        except DamagedRecord:
            plan.verdict = "damaged"
        except (KeyError, IndexError):  # no such slab; no such slot
            plan.verdict = "failed"
        except OSError as error:
            plan.error = error
        finally:
            plan.seconds = self._uptime_s() - began_s

    def _buffer(self) -> memoryview:
        """Return this thread's own buffer."""
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(mmap(-1, self._place_bytes))
        view: memoryview = self._buffers.view
        return view

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
