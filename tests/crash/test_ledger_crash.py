"""A ledger killed at any instant loses no confirmed entry, duplicates none and leaves no hold open.

Each check has a control that must fail; otherwise a test that kills nothing would pass.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tenancy.storage.atomic_files import PART_SUFFIX
from tests.crash.ledger_checks import check_ledger
from tests.crash.tracing import needs_strace

ROOT = Path(__file__).parents[2]
CHILD = [sys.executable, "-m", "tests.crash.ledger_child"]
IS_LONG = os.environ.get("CRASH") == "long"  # make crash
CALLS = "pwrite64,fdatasync,fsync,ftruncate"
MORE_CALLS = [CALLS, "openat,unlink,fcntl"] if IS_LONG else [CALLS]
KILLS = 200 if IS_LONG else 12
EACH = {True: 1, False: 1} if IS_LONG else {True: 24, False: 8}
"""The long form kills at every system call, the quick one at every eighth; in a new file, where
most of them make tables, at every 24th."""

MANY = "100000"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600 if IS_LONG else 240)]


def test_random_kills_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    """One file through many deaths, each after a random number of confirmed entries."""
    rng = random.Random(1)  # confirmed entries; the operating system decides the instant
    path, confirmed = tmp_path / "test.db", set[str]()
    for _ in range(KILLS):
        with subprocess.Popen([*CHILD, str(path), MANY], stdout=subprocess.PIPE, cwd=ROOT) as child:
            assert child.stdout is not None
            for _ in range(rng.randrange(1, 60)):
                confirmed.add(child.stdout.readline().decode().strip())
            child.send_signal(signal.SIGKILL)
            confirmed.update(line.decode().strip() for line in child.stdout if line[-1:] == b"\n")

        entries = check_ledger(path, confirmed)
        assert entries >= len(confirmed) > 0


def test_detects_an_entry_confirmed_too_early(tmp_path: Path) -> None:
    """The control: confirming before durability fails the check above."""
    path = tmp_path / "test.db"
    child = subprocess.run(
        [*CHILD, str(path), MANY, "8"], capture_output=True, timeout=60, check=False, cwd=ROOT
    )
    confirmed = set(child.stdout.decode().split())

    assert child.returncode == -signal.SIGKILL
    with pytest.raises(AssertionError):
        check_ledger(path, confirmed)


@needs_strace
@pytest.mark.parametrize("calls", MORE_CALLS)
@pytest.mark.parametrize("is_new", [True, False], ids=["new file", "file with entries"])
def test_kill_at_each_system_call_loses_nothing(tmp_path: Path, is_new: bool, calls: str) -> None:
    """The migration, the commits and the checkpoint, killed at their first system call, their
    second, and so on, until one run completes."""
    path, confirmed, points, number = tmp_path / "test.db", set[str](), 0, 1
    if not is_new:
        subprocess.run(
            [*CHILD, str(path), "8"], check=True, capture_output=True, timeout=60, cwd=ROOT
        )
    while True:
        if is_new:
            path = tmp_path / f"{number}.db"
            confirmed.clear()
        inject = ["strace", "-f", "-qq", "-o", "/dev/null"]
        for suffix in ("", "-wal", "-shm", ".lock", f".known.0{PART_SUFFIX}"):
            inject += ["-P", f"{path}{suffix}"]
        inject += ["-e", f"trace={calls}", "-e", f"inject={calls}:signal=KILL:when={number}"]
        run = subprocess.run(
            [*inject, *CHILD, str(path), "8"],
            capture_output=True,
            check=False,
            timeout=60,
            cwd=ROOT,
        )
        confirmed.update(run.stdout.decode().split())
        check_ledger(path, confirmed)
        if run.returncode == 0:
            break
        points += 1
        number += EACH[is_new]

    sys.stdout.write(f"killed at {points} points\n")
    assert points > 5


@needs_strace
def test_failed_sync_confirms_nothing(tmp_path: Path) -> None:
    """The callers get an error, and entries confirmed before are stored."""
    path, refused = tmp_path / "test.db", 0
    for number in (1, 2, 3, 5, 8):
        path = tmp_path / f"{number}.db"
        inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync"]
        inject += ["-e", f"inject=fdatasync:error=EIO:when={number}"]
        run = subprocess.run(
            [*inject, *CHILD, str(path), "16"],
            capture_output=True,
            check=False,
            timeout=60,
            cwd=ROOT,
        )
        refused += run.returncode == 3

        check_ledger(path, set(run.stdout.decode().split()))
    assert refused >= 3
