"""A child gets the variables that it needs, and ends with its parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from engine.processes import CLOUD, COMPUTING, DATABASE, child_environment, has_ended
from tests.tables import each_row

PATIENCE_S = 30

STUCK = """
import ctypes, sys
from engine.processes import end_with_parent
end_with_parent(0)
print("stuck", flush=True)
ctypes.PyDLL(None).pause()  # holds the interpreter's lock, as a library's open() of a file may
"""
PARENT = f"""
import socket, subprocess, sys
ours, theirs = socket.socketpair()
child = subprocess.Popen([sys.executable, "-c", {STUCK!r}], stdin=theirs, stdout=subprocess.PIPE)
theirs.close()
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_whose_every_thread_is_stopped_ends_with_its_killed_parent() -> None:
    """No thread of it can see the end of the socket; on a device it would hold the memory."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([child], [], [], PATIENCE_S)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        os.close(child)

    assert ended


def test_a_child_that_comes_after_its_parents_end_ends_too() -> None:
    """The kernel signals only an end that comes after the child has asked for it."""
    ours, theirs = os.pipe()
    os.close(theirs)
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdin=ours, stdout=subprocess.PIPE
    ) as late:
        os.close(ours)
        try:
            said = late.communicate(timeout=PATIENCE_S)[0]
        finally:
            late.kill()

    assert (late.returncode, said) == (1, b"")


def test_an_end_is_seen_though_bytes_before_it_are_unread() -> None:
    """A parent may write its first message and be killed at once."""
    reader, writer = os.pipe()
    os.write(writer, b"hello")
    assert not has_ended(reader, 0.0)
    os.close(writer)

    assert has_ended(reader, PATIENCE_S)
    os.close(reader)


SECRETS = (
    "PGPASSWORD",
    "AWS_SECRET_ACCESS_KEY",
    "WEBHOOK_SECRET",
    "TRUNKLINE_SEAL_KEY",
    "HF_TOKEN",
)
NEEDED = ("PATH", "HOME", "LC_ALL", "TZ", "PYTHONPATH")


@each_row(
    ("patterns", "more"),
    [
        ((), ()),
        (COMPUTING, ("CC", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")),
        (DATABASE, ("PGPASSWORD",)),
        (CLOUD, ("AWS_SECRET_ACCESS_KEY", "https_proxy")),
        (("TRUNKLINE_SEAL_KEY",), ("TRUNKLINE_SEAL_KEY",)),
    ],
)
def test_a_child_gets_what_it_needs_and_no_other_secret(
    patterns: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Also no variable that a later version of anything invents."""
    there = (*SECRETS, *NEEDED, "CC", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "https_proxy")

    found = child_environment(dict.fromkeys((*there, "SOMETHING_NEW"), "x"), *patterns)

    assert found.keys() == {*NEEDED, *more}
