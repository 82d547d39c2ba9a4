"""Whether system calls can be traced here, so that a process is killed at a chosen one."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def strace_works() -> bool:
    strace = shutil.which("strace")
    if strace is None:
        return False
    probe = subprocess.run([strace, "-qq", "true"], capture_output=True, check=False, timeout=60)
    return probe.returncode == 0


needs_strace = pytest.mark.skipif(not strace_works(), reason="strace is not here or may not trace")
