"""What a child process takes from the one that started it: its environment, its socket, its end.

Children get the variables that they need and no others: what parses model files and grammars needs
no passwords. A child's standard input is its socket (`engine.wire`). A child that can hang in a
call ends with its parent all the same, by the kernel's hand. The gateway and the engine start their
children with it; it knows none of them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Final

import msgspec

BASE: Final = (
    *("HOME", "LOGNAME", "PATH", "TEMP", "TMP", "TMPDIR", "USER", "VIRTUAL_ENV"),
    *("LANG", "LANGUAGE", "LC_*", "TZ"),
    *("COV_CORE_*", "COVERAGE_*", "GLIBC_TUNABLES", "LD_*", "MALLOC_*", "PYTHON*", "XDG_*"),
)
"""What every process needs: its folders, its language, its interpreter and its allocator."""
COMPUTING: Final = (
    *("CC", "CFLAGS", "CPATH", "CPPFLAGS", "CXX", "C_INCLUDE_PATH", "LDFLAGS", "LIBRARY_PATH"),
    *("CUDA_*", "NCCL_*", "NVIDIA_*", "PYTORCH_*", "TORCH*", "TRITON_*"),
    *("GOMP_*", "KMP_*", "MKL_*", "OMP_*", "OPENBLAS_*", "TOKENIZERS_*"),
)
"""What a process that computes needs beside: compilers, devices and threads."""
CLOUD: Final = (
    *("AWS_*", "AZURE_*", "GOOGLE_*"),
    *("*_PROXY", "*_proxy", "SSL_CERT_*"),
)
"""What a process that speaks to a remote store needs beside: credentials and the way there."""
DATABASE: Final = ("PG*",)
"""What a process that speaks to PostgreSQL needs beside."""

PR_SET_PDEATHSIG: Final = 1


def child_environment(environment: Mapping[str, str], *patterns: str) -> dict[str, str]:
    """Return the variables with names that match `BASE` or one of the patterns."""
    allowed = *BASE, *patterns
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in allowed)
    }


def end_with_parent(wire: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    `wire`: the descriptor of the socket or pipe to the parent, whose end is closed if the parent
    ended before this call: then the process ends here. A library that holds the interpreter's lock
    in a call that waits, such as the opening of a file, stops every thread, so none of them could
    see the end of the socket. For processes that owe nothing to anyone after their parent's end.
    Without effect beside Linux.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if has_ended(wire, 0.0):
        os._exit(1)


def has_ended(wire: int, wait_s: float) -> bool:
    """Return whether the other end of a socket or pipe is closed, also if bytes of it are unread;
    wait for it for at most `wait_s`."""
    poll = select.poll()
    poll.register(wire, getattr(select, "POLLRDHUP", 0))
    return any(event & ~select.POLLNVAL for _, event in poll.poll(wait_s * 1_000))


def start_child(
    module: str,
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    stderr: int | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module` with a socket as its standard input; return it, and our end.

    It has a session of its own: only the gateway handles a terminal's interrupt. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                (sys.executable, "-m", module),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=True,
                env=environment,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


def run_child(name: str, serve: Callable[[socket.socket], int]) -> int:
    """Serve the parent over standard input and return the exit status.

    SIGINT, SIGTERM and SIGHUP are ignored: the process ends when its parent closes the socket,
    after the work that it was sent. An exception is logged as one line `NAME_failed`, without its
    message, which may quote a value; the parent sees the socket end.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # imported modules live as long as the process
    try:
        with socket.socket(fileno=sys.stdin.fileno()) as wire:
            return serve(wire)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames]
        log_line(f"{name}_failed", error=type(error).__name__, frames=places)
        return 1


def log_line(event: str, **facts: object) -> None:
    """Write one JSON line to standard error; do nothing if its reader has gone."""
    now = datetime.now(UTC).replace(tzinfo=None)
    line = {"at": f"{now.isoformat(timespec='milliseconds')}Z", "event": event, **facts}
    with suppress(OSError):
        os.write(2, msgspec.json.encode(line) + b"\n")
