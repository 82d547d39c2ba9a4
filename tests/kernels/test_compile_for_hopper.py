"""The gate that needs no GPU: tree attention, compiled for sm_90, is what it was measured as."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

ROOT = Path(__file__).parent.parent.parent
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

CASES = {
    ("small", False),
    ("big", False),
    ("small", True),
    ("big", True),
    ("wide", True),
    ("big off a queue", False),
}

SPILLS_MAX = {("big", True): 34}
"""Local loads and stores that Triton 3.9 makes of a causal 64-row tile: 72 bytes of stack at 255
registers, used by prefill alone. Every other class makes none."""


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, bool], dict[str, Any]]:
    """What the compiler made, by (class, causal): one process, without the interpreter's switch."""
    missing = [tool for tool in ("ptxas", "cuobjdump") if not (TOOLS / tool).exists()]
    if missing:
        pytest.skip(f"this Triton brings no {' and no '.join(missing)}")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return {(report["class"], report["causal"]): report for report in reports}


@pytest.mark.parametrize("case", sorted(CASES), ids=lambda c: f"{c[0]}-{c[1]}")
def test_nothing_is_spilled(
    compiled: dict[tuple[str, bool], dict[str, Any]], case: tuple[str, bool]
) -> None:
    """A kernel bound by memory must not wait for its own registers."""
    assert compiled[case]["spills"] <= SPILLS_MAX.get(case, 0), compiled[case]


@pytest.mark.parametrize("case", sorted(CASES), ids=lambda c: f"{c[0]}-{c[1]}")
def test_products_go_through_the_matrix_units(
    compiled: dict[tuple[str, bool], dict[str, Any]], case: tuple[str, bool]
) -> None:
    """64 rows and more by warp-group instructions, 16 rows by a warp's own."""
    report = compiled[case]

    assert report["mma" if case[0] == "small" else "wgmma"] > 0, report


@pytest.mark.parametrize("case", sorted(CASES), ids=lambda c: f"{c[0]}-{c[1]}")
def test_keys_are_fetched_ahead(
    compiled: dict[tuple[str, bool], dict[str, Any]], case: tuple[str, bool]
) -> None:
    """Without asynchronous copies a tile is loaded only when it is needed."""
    assert compiled[case]["async_copies"] > 0, compiled[case]


def test_every_class_is_compiled(compiled: dict[tuple[str, bool], dict[str, Any]]) -> None:
    """A class dropped from the compile list would make the tests above pass."""
    assert compiled.keys() == CASES
