"""Summary of the figures of several runs, for people and for programs.

This module prints nothing.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Container, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import Struct

from gateway.bench.figures import Figure

PACKAGES = ("torch", "aiohttp", "tokenizers", "msgspec", "numpy")
"""Packages whose versions a report has."""


class ReportRow(Struct, frozen=True):
    """One figure of one workload over its runs."""

    workload: str
    figure: str
    unit: str
    median: float
    least: float
    most: float
    runs: int


def rows(workload: str, runs: Sequence[Sequence[Figure]]) -> list[ReportRow]:
    """Return median, minimum and maximum of each figure, in the order of the first run."""
    values: dict[tuple[str, str], list[float]] = {}
    for figures in runs:
        for figure in figures:
            values.setdefault((figure.name, figure.unit), []).append(figure.value)
    return [
        ReportRow(workload, name, unit, statistics.median(v), min(v), max(v), len(v))
        for (name, unit), v in values.items()
    ]


def table(found: Iterable[ReportRow]) -> str:
    """Return a table for people: one line per figure."""
    lines: list[tuple[str, ...]] = [
        ("workload", "figure", "median", "least", "most", "unit", "runs")
    ]
    lines += [
        (row.workload, row.figure, *map(format_number, (row.median, row.least, row.most)),
         row.unit, str(row.runs))
        for row in found
    ]  # fmt: skip
    return columns(lines, {2, 3, 4, 6})


def columns(lines: Sequence[Sequence[str]], numbers: Container[int]) -> str:
    """Return aligned columns. `numbers`: indices of right-aligned columns."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def format_number(value: float) -> str:
    """Return the number with about three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def machine() -> dict[str, Any]:
    """Return the machine, versions and commit of the measurement."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no such file on this system
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this file's checkout, with a + if it was changed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # installed without its checkout
    return done.stdout.strip() or None
