"""A file is whole or not there, whoever else writes one, and whoever died at it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tenancy.storage.atomic_files import PART, written_whole

DYING = """
import os, signal, sys
from pathlib import Path
from tenancy.storage.atomic_files import written_whole
with written_whole(Path(sys.argv[1])) as part:
    part.write_text("half")
    part.with_name(part.name + "-wal").write_text("a log of it")
    print("begun", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def another(target: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes, until its input ends: then it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", DYING, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[4])},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_it_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    """Not before, over what was there; for whom it is meant."""
    target = tmp_path / "a"
    target.write_text("before")
    with written_whole(target, mode=0o600) as part:
        part.write_text("whole")
        meanwhile = target.read_text()

    assert (meanwhile, target.read_text()) == ("before", "whole")
    assert target.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["a"]


def test_what_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    """Nor does what was put beside it."""

    def half() -> None:
        with written_whole(tmp_path / "a") as part:
            part.with_name(f"{part.name}-journal").touch()
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        half()

    assert names(tmp_path) == []


def test_two_at_once_are_not_in_each_others_way(tmp_path: Path) -> None:
    """Each has a file of its own; who ends last has the place."""
    with written_whole(tmp_path / "a") as first, written_whole(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second")

    assert first != second
    assert (tmp_path / "a").read_text() == "first"
    assert names(tmp_path) == ["a"]


def test_what_a_dead_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    """Known by the lock, which the kernel lets go of; of other names in the folder too."""
    (tmp_path / f"b{PART}.txt").write_text("somebody's")
    with another(tmp_path / "b") as process:
        with written_whole(tmp_path / "a") as part:
            part.write_text("whole")
        beside = names(tmp_path)
        process.communicate()
    left = names(tmp_path)
    with written_whole(tmp_path / "a") as part:
        part.write_text("whole")

    assert process.returncode == -signal.SIGKILL
    assert beside == ["a", f"b.0{PART}", f"b.0{PART}-wal", f"b{PART}.txt"]
    assert left == beside
    assert names(tmp_path) == ["a", f"b{PART}.txt"]


def test_where_there_is_no_folder_it_is_said(tmp_path: Path) -> None:
    """Before anything is written, by the name that was asked for."""
    with (
        pytest.raises(OSError, match=r"No such file .*/no/a'"),
        written_whole(tmp_path / "no" / "a"),
    ):
        raise AssertionError
