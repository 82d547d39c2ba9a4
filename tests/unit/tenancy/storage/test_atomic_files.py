"""Atomic files: complete or absent, beside concurrent writers and after killed ones."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tenancy.storage.atomic_files import PART_SUFFIX, atomic_write

DYING = """
import os, signal, sys
from pathlib import Path
from tenancy.storage.atomic_files import atomic_write
with atomic_write(Path(sys.argv[1])) as part:
    part.write_text("half")
    part.with_name(part.name + "-wal").write_text("a log of it")
    print("begun", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def start_writer(target: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that writes until its input ends; then it is killed."""
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


def test_replaces_target_when_complete(tmp_path: Path) -> None:
    """Not before, and with the requested mode."""
    target = tmp_path / "a"
    target.write_text("before")
    with atomic_write(target, mode=0o600) as part:
        part.write_text("whole")
        meanwhile = target.read_text()

    assert (meanwhile, target.read_text()) == ("before", "whole")
    assert target.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["a"]


def test_failed_write_names_the_target(tmp_path: Path) -> None:
    """The system's error of a write names no file; the part file's name would help no reader."""
    target = tmp_path / "a"
    with pytest.raises(OSError, match="No space left") as caught, atomic_write(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert caught.value.filename == str(target)
    assert names(tmp_path) == []


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """Nor the files beside the part file."""

    def half() -> None:
        with atomic_write(tmp_path / "a") as part:
            part.with_name(f"{part.name}-journal").touch()
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        half()

    assert names(tmp_path) == []


def test_concurrent_writers_do_not_interfere(tmp_path: Path) -> None:
    """Each has a part file of its own; the last to finish wins."""
    with atomic_write(tmp_path / "a") as first, atomic_write(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second")

    assert first != second
    assert (tmp_path / "a").read_text() == "first"
    assert names(tmp_path) == ["a"]


def test_removes_part_files_of_dead_writers_only(tmp_path: Path) -> None:
    """They are recognised by their free locks, for any name of the target."""
    (tmp_path / f"b{PART_SUFFIX}.txt").write_text("somebody's")
    with start_writer(tmp_path / "b") as process:
        with atomic_write(tmp_path / "a") as part:
            part.write_text("whole")
        beside = names(tmp_path)
        process.communicate()
    left = names(tmp_path)
    with atomic_write(tmp_path / "a") as part:
        part.write_text("whole")

    assert process.returncode == -signal.SIGKILL
    assert beside == ["a", f"b.0{PART_SUFFIX}", f"b.0{PART_SUFFIX}-wal", f"b{PART_SUFFIX}.txt"]
    assert left == beside
    assert names(tmp_path) == ["a", f"b{PART_SUFFIX}.txt"]


def test_missing_folder_is_reported_with_the_target(tmp_path: Path) -> None:
    """Before anything is written."""
    with (
        pytest.raises(OSError, match=r"No such file .*/no/a'"),
        atomic_write(tmp_path / "no" / "a"),
    ):
        raise AssertionError
