"""Which folders may hold a store, and the lock that keeps two servers apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.storage.folder import (
    FolderInUse,
    FolderLock,
    FolderRefused,
    check_folder,
    doubt_about,
    prepare_folder,
    type_of_file_system,
    wait_for_lock,
)

MOUNTS = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /mnt/share rw - nfs4 server:/export rw
31 22 0:26 / /mnt/with\040space rw - tmpfs tmpfs rw
32 22 0:27 / /mnt/share rw - xfs /dev/vdb rw
broken line
"""


def test_a_missing_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    """With its parents."""
    folder = tmp_path / "a" / "levels"
    assert check_folder(folder) == ""
    prepare_folder(folder)
    prepare_folder(folder)

    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o704])
def test_a_folder_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    """It holds what prompts said."""
    folder = tmp_path / "levels"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(FolderRefused, match=f"mode {mode:04o}.*expected 0700.*chmod 700"):
        prepare_folder(folder)

    assert folder.stat().st_mode & 0o777 == mode


def test_a_file_or_a_link_is_refused(tmp_path: Path) -> None:
    """A link may lead where others write."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")

    assert "is a file; expected a folder" in check_folder(tmp_path / "file")
    assert "Not a directory" in check_folder(tmp_path / "file" / "levels")
    assert "is a link" in check_folder(tmp_path / "link")
    assert "is a link" in check_folder(tmp_path / "dangling")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_access_is_refused(tmp_path: Path) -> None:
    """Also where the folder would have to be made."""
    tmp_path.chmod(0o500)
    assert "not writable" in check_folder(tmp_path)
    assert "not writable" in check_folder(tmp_path / "levels")
    tmp_path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """Its owner may read it and write to it."""
    folder = tmp_path / "levels"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12_345, -1)

    assert "belongs to user 12345" in check_folder(folder)


def test_the_file_system_is_that_of_the_innermost_mount() -> None:
    """The last one mounted on a place counts; names are escaped in the kernel's table."""
    assert type_of_file_system(Path("/srv/levels"), MOUNTS) == "ext4"
    assert type_of_file_system(Path("/mnt/share/levels"), MOUNTS) == "xfs"
    assert type_of_file_system(Path("/mnt/sharelevels"), MOUNTS) == "ext4"
    assert type_of_file_system(Path("/mnt/with space/x"), MOUNTS) == "tmpfs"
    assert type_of_file_system(Path("/x"), "") == ""


def test_a_network_file_system_is_refused_and_a_doubtful_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks and syncs of a network promise less; memory is gone after a restart."""
    kind = "nfs4"
    monkeypatch.setattr("engine.storage.folder.type_of_file_system", lambda path: kind)
    assert "on a network (nfs4)" in check_folder(tmp_path)
    assert "on a network (nfs4)" in check_folder(tmp_path / "levels")

    kind = "tmpfs"
    assert check_folder(tmp_path) == ""
    assert "tmpfs: its content is gone" in doubt_about(tmp_path)
    kind = "ext4"
    assert doubt_about(tmp_path) == ""


def test_the_lock_names_its_owner(tmp_path: Path) -> None:
    """The operator learns which process to look for; the next one gets the lock."""
    lock = FolderLock(tmp_path)
    with pytest.raises(FolderInUse, match=f"in use by process {os.getpid()}"):
        FolderLock(tmp_path)

    lock.close()
    lock.close()
    FolderLock(tmp_path).close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """However that ended."""
    program = (
        "import sys, os; from pathlib import Path; from engine.storage.folder import FolderLock;"
        "lock = FolderLock(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)

    FolderLock(tmp_path).close()


def test_waiting_for_the_lock_is_bounded(tmp_path: Path) -> None:
    """The storage process of a dead engine finishes first; another server never does."""
    lock = FolderLock(tmp_path)
    pauses: list[float] = []
    with pytest.raises(FolderInUse):
        wait_for_lock(tmp_path, 1.0, pauses.append)
    assert 0.9 <= sum(pauses) <= 1.0

    wait_for_lock(tmp_path, 1.0, lambda seconds: lock.close()).close()


def test_a_lock_file_of_nonsense_names_no_owner(tmp_path: Path) -> None:
    """The message says another process, then."""
    lock = FolderLock(tmp_path)
    (tmp_path / "lock").write_text("not a pid")
    with pytest.raises(FolderInUse, match="in use by another process"):
        FolderLock(tmp_path)
    lock.close()


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    """It would be opened for writing."""
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderRefused, match="cannot be locked"):
        FolderLock(tmp_path)
