"""A storage that is killed at any instant keeps what it said it stored, and nothing it erased.

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

from tests.crash.storage_checks import Stores, check_contents, check_structure, read_said
from tests.crash.tracing import needs_strace

ROOT = Path(__file__).parents[2]
CHILD = [sys.executable, "-m", "tests.crash.storage_child"]
IS_LONG = os.environ.get("CRASH") == "long"  # make crash
KILLS = 1_000 if IS_LONG else 20
"""In each of two folders."""
EACH = 1 if IS_LONG else 12
LIES = ("unstored", "rows_first")

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(14_400 if IS_LONG else 600)]


@pytest.mark.parametrize(
    ("first", "is_sealed"),
    [
        pytest.param(3, False, marks=pytest.mark.nightly),
        pytest.param(4, False, marks=pytest.mark.nightly),
        (5, True),
    ],
)
def test_random_kills_lose_nothing_stored_and_bring_nothing_back(
    tmp_path: Path, first: int, is_sealed: bool
) -> None:
    """One folder through many deaths, each after a random number of lines."""
    rng = random.Random(first)
    folder = tmp_path / "levels"
    stored: Stores = {}
    erased: set[bytes] = set()
    checked = 0
    for seed in range(KILLS):
        with subprocess.Popen(
            [*CHILD, str(folder), str(seed), *(["sealed"] if is_sealed else [])],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        ) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(rng.randrange(1, 80))]
            child.send_signal(signal.SIGKILL)
            lines += [line for line in child.stdout if line.endswith("\n")]
        read_said([line for line in lines if line], stored, erased)
        check_structure(folder, is_sealed=is_sealed)
        for old in [name for name in stored if int(name.split(b"-")[1]) < seed - 1]:
            del stored[old]  # older lives have been checked often enough
        checked += check_contents(folder, stored, erased, is_sealed=is_sealed)

    sys.stdout.write(f"{KILLS} kills, {checked} paths checked, {len(erased)} erased\n")
    assert checked > KILLS


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(tmp_path: Path, lie: str) -> None:
    """The controls: a store that was said too early, and rows before their bytes."""
    folder = tmp_path / "levels"
    child = subprocess.run(
        [*CHILD, str(folder), "0", lie],
        capture_output=True,
        cwd=ROOT,
        check=False,
        text=True,
        timeout=60,
    )
    assert child.returncode == -signal.SIGKILL
    stored: Stores = {}
    erased: set[bytes] = set()
    read_said(child.stdout.splitlines(), stored, erased)

    with pytest.raises(AssertionError):
        check_both(folder, stored, erased)


def check_both(folder: Path, stored: Stores, erased: set[bytes]) -> None:
    """Check structure and contents."""
    check_structure(folder)
    check_contents(folder, stored, erased)


@needs_strace
@pytest.mark.parametrize("calls", ["pwritev,pwrite64,fdatasync", "fallocate,ftruncate,unlink"])
def test_kill_at_each_system_call_loses_nothing(tmp_path: Path, calls: str) -> None:
    """A new store killed at its first such call, at a later one, and so on."""
    points = 0
    for number in range(1, 400 if IS_LONG else 60, EACH):
        folder = tmp_path / str(number)
        inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}"]
        inject += ["-e", f"inject={calls}:signal=KILL:when={number}"]
        with subprocess.Popen(
            [*inject, *CHILD, str(folder), "1"],
            stdout=subprocess.PIPE, cwd=ROOT, text=True, start_new_session=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            lines = []
            for line in child.stdout:  # ends when the child has, too, which outlives its tracer
                lines.append(line)
                if len(lines) == 180:
                    os.killpg(child.pid, signal.SIGKILL)
        stored: Stores = {}
        erased: set[bytes] = set()
        read_said(lines, stored, erased)
        if stored:
            check_structure(folder)
        check_contents(folder, stored, erased)
        points += 1
        if len(lines) >= 180:
            break

    sys.stdout.write(f"killed at {points} points\n")
    assert points > 2
