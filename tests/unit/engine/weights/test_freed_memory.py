"""Memory of freed tensors, as the system counts it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from engine.weights import give_back_freed

MIB = 2**20


def resident_mib() -> int:
    """Return this process's memory that no file backs, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) // 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files of a process")
def test_freed_tensors_leave_the_process() -> None:
    """Those that the C library would keep, as what lies behind them is still in use."""
    torch.ones(24 * MIB, dtype=torch.uint8)  # from now on smaller ones are kept when freed
    tensors = [torch.ones(MIB, dtype=torch.uint8) for _ in range(96)]
    kept = torch.ones(MIB, dtype=torch.uint8)
    before = resident_mib()
    del tensors

    give_back_freed()

    assert resident_mib() <= before - 80
    assert kept.all()
