"""Temporary folders, and their removal after a killed process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tenancy.own_folder import YOUNG_S, own_folder

HOLD = """
import sys
from pathlib import Path
from tests.unit.tenancy.own_folder import own_folder

with own_folder("t-", Path(sys.argv[1])) as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def age(folder: Path) -> None:
    """Make the folder look old."""
    long_ago = folder.stat().st_mtime - 2 * YOUNG_S
    os.utime(folder, (long_ago, long_ago))


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_folder_is_private_and_removed(tmp_path: Path) -> None:
    """With its content, also after an exception."""

    def fail() -> None:
        with own_folder("t-", tmp_path) as folder:
            (folder / "socket").touch()
            assert folder.stat().st_mode & 0o777 == 0o700
            raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        fail()

    assert names(tmp_path) == set()


def test_removes_abandoned_folders_and_keeps_locked_ones(tmp_path: Path) -> None:
    """Both are old: age alone decides nothing."""
    holders = [
        subprocess.Popen(
            (sys.executable, "-c", HOLD, str(tmp_path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = []
    for holder in holders:
        assert holder.stdout is not None
        folders.append(Path(holder.stdout.readline().strip()))
        age(folders[-1])
    dead, living = holders
    dead.send_signal(signal.SIGKILL)
    dead.communicate()

    with own_folder("t-", tmp_path) as own:
        left = names(tmp_path)
    living.communicate("")

    assert left == {folders[1].name, own.name}
    assert names(tmp_path) == set()


def test_keeps_new_folders_other_names_and_links(tmp_path: Path) -> None:
    """A new folder may not be locked yet; a link may point anywhere."""
    place, target = tmp_path / "place", tmp_path / "target"
    for folder in (place / "t-young", place / "other", target):
        folder.mkdir(parents=True)
    (place / "t-link").symlink_to(target)
    (place / "t-file").touch()
    for old in (place / "other", place / "t-file", target):
        age(old)

    with own_folder("t-", place) as own:
        left = names(place)

    assert left == {"t-young", "other", "t-link", "t-file", own.name}
    assert target.is_dir()
