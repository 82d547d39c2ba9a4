"""A power cut at any write or sync of the storage: no wrong byte, no lost promise, nothing erased.

A disk that only reports its syncs is the control: the same check must detect it.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

from engine.errors import EngineError
from engine.moves import Stored
from engine.storage.batch_writer import BatchWriter, RunAll
from engine.storage.plans import WriteBatch
from engine.storage.slabs.slabs import DiskCalls
from tests.crash.power_cut import Disk, disk_of
from tests.fakes import FakeClock
from tests.unit.engine.storage.local_storage import LocalRig
from tests.unit.engine.storage.storage_rig import RUN, content_of

IS_LONG = os.environ.get("CRASH") == "long"  # make crash
CUTS = 600 if IS_LONG else 24
LIES = 12
CALLS_MAX = 700
STORES = 200

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(7_200 if IS_LONG else 240)]


class CutCalls(DiskCalls):
    """The slabs' calls on a disk whose power can be cut."""

    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self._disk = disk

    def lay_out(self, fd: int, length: int) -> None:
        self._disk.tick()
        super().lay_out(fd, length)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        self._disk.tick()
        data = b"".join(parts)
        self._remember(fd, offset, data)
        return super().write(fd, [data], offset)

    def erase(self, fd: int, offset: int, length: int) -> None:
        self._disk.tick()
        self._remember(fd, offset, bytes(length))
        super().erase(fd, offset, length)

    def sync(self, fd: int) -> None:
        self._disk.tick()
        self._disk.synced(str(Path(f"/proc/self/fd/{fd}").readlink()))

    def _remember(self, fd: int, offset: int, data: bytes) -> None:
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        old = os.pread(fd, len(data), offset)
        self._disk.pending.append((name, offset, data, old))


def image_of(disk: Disk, folder: Path, target: Path, rng: random.Random) -> Path:
    """Copy the folder as it is found after the power returns: each write since its file's last
    sync is kept, undone or torn."""
    shutil.copytree(folder, target)
    for name, offset, new, old in reversed(disk.pending):
        fate, copy = rng.random(), target / Path(name).name
        if fate < 0.4 or not copy.exists():
            continue
        kept = 0 if fate < 0.8 else rng.randrange(0, len(new) + 1, 512)
        with copy.open("r+b") as there:
            there.seek(offset + kept)
            there.write(old.ljust(len(new), b"\0")[kept:])
    return target


def tokens_of(number: int) -> tuple[int, ...]:
    """Return a path of one to three runs."""
    return tuple(number + at for at in range((1 + number % 3) * RUN))


class Life:
    """What a storage has said until the power was cut."""

    def __init__(self) -> None:
        self.stored: dict[bytes, dict[int, bool]] = {}  # by number: whether it was promised
        self.erased: set[bytes] = set()

    def live(self, folder: Path, disk: Disk, seed: int, *, may_erase: bool = True) -> None:
        """Store and erase until the power is cut."""
        rng = random.Random(seed)
        with disk_of(disk), suppress(apsw.Error, OSError):
            rig = LocalRig(folder, clock=FakeClock(1_000.0), calls=CutCalls(disk))
            try:
                for number in range(STORES):
                    self._step(rig, rng, number, may_erase)
            finally:
                rig.close()

    def _step(self, rig: LocalRig, rng: random.Random, number: int, may_erase: bool) -> None:
        namespace = b"namespace-%d" % (number % 5)
        is_promised = rng.random() < 0.5
        command = rig.store_command(
            namespace, tokens_of(number), promise_s=1e6 if is_promised else 0.0
        )
        self.erased.discard(namespace)  # the power may be cut within this store
        if rig.send_store(command).code == "":
            self.stored.setdefault(namespace, {})[number] = is_promised
        if may_erase and rng.random() < 0.1:
            victim = b"namespace-%d" % rng.randrange(5)
            self.stored.pop(victim, None)
            rig.erase(victim)
            self.erased.add(victim)

    def check(self, folder: Path, *, may_damage: bool = True) -> int:
        """Open what is left; return how many paths were found."""
        rig = LocalRig(folder, clock=FakeClock(2_000.0))
        found = 0
        try:
            for namespace in self.erased:
                assert not rig.storage.has_records(namespace), f"{namespace!r} came back"
            for namespace, numbers in self.stored.items():
                for number, is_promised in numbers.items():
                    ids = rig.found(namespace, tokens_of(number))
                    whole = len(tokens_of(number)) // RUN
                    data = rig.fetch(namespace, ids[whole - 1 :])
                    if is_promised:
                        assert len(ids) == whole, f"promised {number} is lost"
                        assert data != [None], f"promised {number} is damaged"
                    if data not in ([], [None]):
                        assert data == [content_of(namespace, tokens_of(number))]
                        found += 1
            assert may_damage or rig.disk.stats().damaged_total == 0
        finally:
            rig.close()
        return found


def test_a_power_cut_loses_no_promise_and_serves_no_wrong_byte(tmp_path: Path) -> None:
    """At many random instants."""
    found = 0
    for seed in range(CUTS):
        disk, life = Disk(cut_at=random.Random(seed).randrange(1, CALLS_MAX)), Life()
        folder = tmp_path / str(seed)
        life.live(folder, disk, seed)
        after = image_of(disk, folder, tmp_path / f"{seed}.after", random.Random(seed))
        found += life.check(after)
        shutil.rmtree(after)
        shutil.rmtree(folder)

    sys.stdout.write(f"{CUTS} cuts, {found} paths found\n")
    assert found > CUTS


def test_detects_a_lying_disk(tmp_path: Path) -> None:
    """The control: where syncs do nothing, promises are lost."""
    assert noticed(tmp_path, is_lying=True) >= LIES // 2


def test_detects_rows_before_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the order: a row committed and synced before its bytes are."""
    commit = BatchWriter.commit

    def skip(self: BatchWriter, batch: WriteBatch, run_all: RunAll) -> None:
        """Write nothing yet."""

    def commit_first(self: BatchWriter, batch: WriteBatch) -> list[Stored]:
        runs = [
            (run, store.command.slot_bytes)
            for store in batch.stores
            for run in store.runs
            if run.place is not None
        ]
        outcomes = commit(self, batch)
        self._index.file.empty_log()
        for run, slot_bytes in runs:
            self._write_run(batch, run, slot_bytes)
        return outcomes

    monkeypatch.setattr(BatchWriter, "write", skip)
    monkeypatch.setattr(BatchWriter, "commit", commit_first)
    assert noticed(tmp_path) >= LIES // 2


def noticed(tmp_path: Path, *, is_lying: bool = False) -> int:
    """Return in how many lives the check finds something."""
    found = 0
    for seed in range(LIES):
        cut_at = random.Random(seed).randrange(CALLS_MAX // 3, CALLS_MAX)
        disk, life = Disk(cut_at=cut_at, is_lying=is_lying), Life()
        folder = tmp_path / str(seed)
        life.live(folder, disk, seed, may_erase=False)
        after = image_of(disk, folder, tmp_path / f"{seed}.after", random.Random(seed))
        try:
            life.check(after, may_damage=False)
        except (AssertionError, apsw.Error, OSError, EngineError):
            found += 1
    return found


def test_without_a_control_nothing_is_noticed(tmp_path: Path) -> None:
    """The check of the controls finds nothing in a storage that keeps its order."""
    assert noticed(tmp_path) == 0
