"""A folder for KV: this user's alone, on a disk of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.levels.folder import check_folder, file_system_of

MOUNT = "36 35 0:30 / {point} rw,relatime shared:1 - {kind} server:/x rw\n"


def mounts(folder: Path, *pairs: tuple[str, str]) -> Path:
    """Return a table of mounts with (point, kind), the root first."""
    table = folder / "mountinfo"
    rows = [("/", "ext4"), *pairs]
    table.write_text("".join(MOUNT.format(point=point, kind=kind) for point, kind in rows))
    return table


def private(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


def test_a_private_folder_is_good_and_so_is_one_that_can_be_made(tmp_path: Path) -> None:
    table = mounts(tmp_path)

    assert check_folder(private(tmp_path / "here"), table) == ""
    assert check_folder(tmp_path / "not" / "yet", table) == ""


def link(path: Path) -> None:
    path.symlink_to(path.parent)


def shared(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (link, "it is a link to "),
        (Path.touch, "it is a file; expected a folder"),
        (shared, "others may use it (mode 0750); expected mode 0700: chmod 700 "),
    ],
)
def test_problem_says_what_would_be_right(
    tmp_path: Path, make: Callable[[Path], None], told: str
) -> None:
    path = tmp_path / "levels"
    make(path)

    assert check_folder(path, mounts(tmp_path)).startswith(told)


def test_folder_below_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert check_folder(tmp_path / "file" / "levels", mounts(tmp_path)) != ""


def test_unwritable_parent_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The superuser may write everywhere, so the system's answer is given."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    assert "is not writable" in check_folder(tmp_path / "levels", mounts(tmp_path))


def test_folder_of_another_user_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = private(tmp_path / "levels")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)

    assert check_folder(path, mounts(tmp_path)).startswith("it belongs to user ")


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p"])
def test_network_mounts_are_refused(tmp_path: Path, kind: str) -> None:
    """A write there may hang, and a lock may not hold; also for a folder that is yet to be made."""
    data = private(tmp_path / "data dir")
    table = mounts(tmp_path, (str(data).replace(" ", "\\040"), kind))

    assert f"on a network mount ({kind})" in check_folder(data / "levels", table)
    assert check_folder(private(tmp_path / "data"), table) == "", "a name that begins alike"


def test_file_system_is_that_of_the_latest_mount_above(tmp_path: Path) -> None:
    table = mounts(tmp_path, (str(tmp_path), "tmpfs"), (str(tmp_path), "xfs"), ("/none", "nfs"))

    assert file_system_of(tmp_path / "a", table) == "xfs"
    assert file_system_of(tmp_path, tmp_path / "no table") == ""
    table.write_text("short\n- - -\n\n")
    assert file_system_of(tmp_path, table) == ""
