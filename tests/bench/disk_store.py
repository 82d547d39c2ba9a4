"""Measures the storage's disk: `python -m tests.bench.disk_store [--folder DIR]`.

Stores and fetches of 360 KiB blocks through a storage process, beside the same bytes written and
read by plain system calls in the same run; looks of 512 runs; the opening of an index of 100,000
rows. `--sealed` measures sealed copies beside plain ones. Takes a minute or two and 3 GB of disk.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

import xxhash

from engine.config import LevelsConfig
from engine.moves import (
    ROOT,
    Fetch,
    Fetched,
    Look,
    Looked,
    RunToStore,
    SlotLayout,
    StorageOutcome,
    StorageStats,
    Stored,
    StoreRuns,
)
from engine.storage.client import StorageClient, disk_settings
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.index_file import FOREVER_MS, INDEX_NAME
from engine.storage.memory.arena import HostArena
from engine.storage.sealing.master_key import make_key_file
from engine.storage.slabs.record import pack_run, place_bytes_of
from engine.storage.slabs.slabs import DiskCalls
from engine.storage.space.disk_space import StoreSettings
from engine.storage.store import DiskStore
from tests.bench.results import spread
from tests.bench.timing import seconds_of

BLOCK_BYTES = 360 * 2**10
RUN = 16
SLOTS = 128
RUNS = 512
ROUNDS = 5
ROWS = 100_000


class Driver:
    """A storage process and its calls, one after another or all at once."""

    def __init__(self, folder: Path, key_file: Path | None = None) -> None:
        """`key_file`: of the master key, if the copies are sealed."""
        self.arena = HostArena.create(SlotLayout.uniform(SLOTS, BLOCK_BYTES))
        rng = random.Random(1)
        for slot in range(SLOTS):
            self.arena.view(slot, BLOCK_BYTES)[:] = rng.randbytes(BLOCK_BYTES)
        views = [self.arena.view(slot, BLOCK_BYTES) for slot in range(SLOTS)]
        self.checks = [xxhash.xxh3_128_digest(view) for view in views]
        config = LevelsConfig(
            disk_gib=4.0,
            dir=str(folder),
            slab_mib=512,
            seal=key_file is not None,
            key_file=str(key_file or ""),
        )
        self.client = StorageClient(disk_settings(config, self.arena, (BLOCK_BYTES,)))
        self._ids = count(1)
        self.wait(lambda one: isinstance(one, StorageStats) and one.state == "open")

    def wait(self, is_wanted: Callable[[StorageOutcome], bool]) -> StorageOutcome:
        """Return the first wanted outcome."""
        while True:
            assert self.client.wait(30.0), "no outcome in 30 s"
            for one in self.client.poll():
                if is_wanted(one):
                    return one

    def store(self, namespace: bytes, parent: int, first: int, runs: int) -> list[int]:
        """Store runs, and return their records."""
        call_id = next(self._ids)
        what = tuple(
            RunToStore(
                tokens_of(first + at), (first + at) % SLOTS, self.checks[(first + at) % SLOTS]
            )
            for at in range(runs)
        )
        self.client.send(StoreRuns(call_id, namespace, b"p", parent, what, BLOCK_BYTES))
        outcome = self.wait(lambda one: isinstance(one, Stored) and one.call_id == call_id)
        assert isinstance(outcome, Stored)
        assert outcome.code == "", outcome
        return list(outcome.record_ids)

    def look(self, namespace: bytes) -> list[int]:
        """Look for all runs."""
        call_id = next(self._ids)
        tokens = tuple(token for at in range(RUNS) for token in tokens_of(at))
        self.client.send(Look(call_id, namespace, tokens))
        outcome = self.wait(lambda one: isinstance(one, Looked) and one.call_id == call_id)
        assert isinstance(outcome, Looked)
        return [run.record_id for run in outcome.runs]

    def fetch(self, namespace: bytes, record_ids: list[int]) -> None:
        """Fetch records into as many slots."""
        call_id = next(self._ids)
        slots = tuple(at % SLOTS for at in range(len(record_ids)))
        self.client.send(Fetch(call_id, namespace, tuple(record_ids), slots, BLOCK_BYTES))
        left = len(record_ids)
        while left:
            assert self.client.wait(30.0), "no outcome in 30 s"
            for one in self.client.poll():
                if isinstance(one, Fetched) and one.call_id == call_id:
                    assert one.is_done
                    left -= 1

    def close(self) -> None:
        """End the process."""
        self.client.close()
        self.arena.close()


def tokens_of(number: int) -> tuple[int, ...]:
    """Return a run of tokens."""
    return tuple(number * RUN + at for at in range(RUN))


def drop_page_cache(folder: Path) -> None:
    """Let the system forget the slabs' pages, so that reads come from the disk."""
    for path in folder.glob("*.slab"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def show(name: str, values: list[float], unit: str) -> None:
    """Print the median and the spread."""
    print(f"{name:44} {statistics.median(values):9.1f} {unit} {spread(values)}")


def plain_write(folder: Path, blocks: int) -> float:
    """Return the seconds that the same bytes take by pwrite and one fdatasync for 64."""
    data = random.Random(2).randbytes(BLOCK_BYTES)
    path = folder / "plain"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, blocks * BLOCK_BYTES)

    def write() -> None:
        for at in range(blocks):
            os.pwrite(fd, data, at * BLOCK_BYTES)
            if at % 64 == 63:
                os.fdatasync(fd)

    (seconds,) = seconds_of(write)
    os.close(fd)
    return seconds


def plain_read(folder: Path, blocks: int) -> float:
    """Return the seconds that the same bytes take by pread, after the page cache was dropped."""
    fd = os.open(folder / "plain", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    buffer = bytearray(BLOCK_BYTES)

    def read() -> None:
        for at in range(blocks):
            os.preadv(fd, [buffer], at * BLOCK_BYTES)

    (seconds,) = seconds_of(read)
    os.close(fd)
    return seconds


class Rates:
    """The rates of one storage process over all rounds."""

    def __init__(self, name: str, folder: Path, key_file: Path | None = None) -> None:
        self._name, self._folder = name, folder
        self._driver = Driver(folder, key_file)
        self._stores: list[float] = []
        self._looks: list[float] = []
        self._fetches: list[float] = []
        self._cached: list[float] = []

    def measure_round(self, number: int) -> None:
        """Store a namespace of `RUNS` runs, look it up, and fetch it twice."""
        driver, namespace, ids = self._driver, b"namespace %d" % number, list[int]()
        mib = RUNS * BLOCK_BYTES / 2**20

        def store() -> None:
            for first in range(0, RUNS, 64):
                ids.extend(driver.store(namespace, ids[-1] if ids else ROOT, first, 64))

        self._stores += [mib / seconds for seconds in seconds_of(store)]
        self._looks += [1e3 * seconds for seconds in seconds_of(partial(driver.look, namespace))]
        assert driver.look(namespace) == ids
        drop_page_cache(self._folder)
        cold_s, cached_s = seconds_of(partial(driver.fetch, namespace, ids), 2)
        self._fetches.append(mib / cold_s)
        self._cached.append(mib / cached_s)

    def show(self) -> None:
        """Print them, and end the process."""
        self._driver.close()
        show(f"{self._name}: store, 64 blocks at a time", self._stores, "MiB/s")
        show(f"{self._name}: look of {RUNS} runs", self._looks, "ms")
        show(f"{self._name}: fetch, from the disk", self._fetches, "MiB/s")
        show(f"{self._name}: fetch, from the page cache", self._cached, "MiB/s")


def measure_process(folder: Path, *, is_sealed: bool) -> None:
    """Measure stores, looks and fetches through the process; `is_sealed`: through one with sealed
    copies too, in turns."""
    stores = [Rates("storage process", folder / "levels")]
    if is_sealed:
        make_key_file(folder / "key")
        stores.append(Rates("sealed", folder / "sealed", folder / "key"))
    writes, reads = [], []
    mib = RUNS * BLOCK_BYTES / 2**20
    for number in range(ROUNDS):
        writes.append(mib / plain_write(folder, RUNS))
        for one in stores:
            one.measure_round(number)
        reads.append(mib / plain_read(folder, RUNS))
    for one in stores:
        one.show()
    show("plain pwrite and fdatasync", writes, "MiB/s")
    show("plain pread, from the disk", reads, "MiB/s")


def measure_open(folder: Path) -> None:
    """Measure the opening of a store of `ROWS` rows; the slabs are sparse."""
    place = place_bytes_of(4_096)
    slab_places = 2**17
    path = folder / f"{place:04d}-000001.slab"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, slab_places * place)
    os.close(fd)
    with closing(RecordIndex(folder / INDEX_NAME, may_make=True)) as index:
        with index.file.change():
            payer_id = index.names.payer_id(b"p")
            for number in range(1, ROWS + 1):
                scope = index.names.scope_for(b"namespace %d" % (number // 512))
                parent = ROOT if number % 512 == 0 or number == 1 else number - 1
                run = pack_run(tokens_of(number))
                row = RecordRow(
                    number, scope.scope_id, parent, run, payer_id, 1, number, 4_096, place,
                    b"c" * 16, 0, FOREVER_MS, 0,
                )  # fmt: skip
                index.insert(row, scope, 1)
        index.file.empty_log()
    settings = StoreSettings(folder, disk_bytes=2**34, slot_sizes=(4_096,))
    seconds = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        store = DiskStore(
            settings, lambda slot, size: memoryview(b""), lambda: 10, time.monotonic, DiskCalls()
        )
        seconds.append(1e3 * (time.perf_counter() - began_s))
        assert store.stats().records == ROWS
        store.close()
    show(f"open with {ROWS:,} rows", seconds, "ms")
    size = (folder / INDEX_NAME).stat().st_size / ROWS
    print(f"index: {size:.0f} bytes a row")


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--only", choices=["process", "open"], default=None)
    parser.add_argument("--sealed", action="store_true", help="measure sealed copies beside plain")
    options = parser.parse_args()
    if options.only != "open":
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            measure_process(Path(name), is_sealed=options.sealed)
    if options.only == "process":
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        measure_open(Path(name))


if __name__ == "__main__":
    main()
