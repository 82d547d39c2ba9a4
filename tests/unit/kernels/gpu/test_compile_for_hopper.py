"""The gate that needs no GPU: kernels, compiled for sm_90, are what they were measured as."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.experimental import gluon

pytestmark = [pytest.mark.slow, pytest.mark.compiled]

ROOT = Path(__file__).parents[4]
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

SAMPLING = "tests.unit.kernels.gpu.compile_sampling"
PACKING = "tests.unit.kernels.gpu.compile_kv_formats"
INT8 = "tests.unit.kernels.gpu.compile_int8"
LATENTS = "tests.unit.kernels.gpu.compile_latents"
EXPERTS = "tests.unit.kernels.gpu.compile_experts"
RECURRENT = "tests.unit.kernels.gpu.compile_recurrent"
PEERS = "tests.unit.kernels.gpu.compile_peer_reduce"
PLAIN, BY_HAND = (
    "tests.unit.kernels.gpu.compile_for_hopper",
    "tests.unit.kernels.gpu.compile_hand_scheduled",
)

CASES = {
    ("small", False),
    ("big", False),
    ("small", True),
    ("big", True),
    ("wide", True),
    ("big from a queue", False),
    ("big hand-scheduled from a queue", False),
    ("wide hand-scheduled", True),
    ("big hand-scheduled from a queue of 64", False),
    ("wide hand-scheduled of 64", True),
    *((f"{name} of gpt-oss", name != "small") for name in ("small", "big", "wide")),
    *((f"{name} 256 of Gemma 3", name != "small") for name in ("small", "big", "wide")),
    ("big 256", True),
    ("big 256 of Gemma 2", True),
}

SHARED_BYTES_MAX = 232_448
"""Shared memory of a block on Hopper; more fails at the launch, not in the compiler."""

CAN_COMPILE_GLUON = hasattr(gluon, "GluonASTSource")
"""Public from Triton 3.9 on; a kernel itself needs less."""

SPILLS_MAX = {
    ("big", True): 34,
    ("wide hand-scheduled", True): 17,
    ("big 256", True): 83,
    ("big 256 of Gemma 2", True): 54,
    ("big 256 of Gemma 3", True): 44,
}
"""Local loads and stores that Triton 3.9 makes of a causal 64-row tile: 72 bytes of stack at 255
registers, used by prefill alone; of the wide one scheduled hand-scheduled; and of 64 rows of 256
channels, 88 to 160 bytes of stack with four warps. With eight warps these have 24 bytes, and the
same tile, which spills nothing where it decodes, takes 1.2 to 1.8 times as long there.
Every other class makes none."""


PRODUCT_SPILLS = {"4 bits of 64": 26, "linear of 256": 2}
"""Of tiles that are faster so than smaller ones; the second by Triton 3.6 alone."""


@cache
def reports_of(module: str) -> list[dict[str, Any]]:
    """What the compiler made, in a process without the interpreter's switch."""
    missing = [tool for tool in ("ptxas", "cuobjdump") if not (TOOLS / tool).exists()]
    if missing:
        pytest.skip(f"this Triton brings no {' and no '.join(missing)}")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def compiled(module: str) -> dict[tuple[str, bool], dict[str, Any]]:
    """The reports of tree attention, by (class, causal)."""
    return {(report["class"], report["causal"]): report for report in reports_of(module)}


@pytest.mark.parametrize("module", [PLAIN, BY_HAND])
def test_tree_attention_is_compiled_as_it_was_measured(module: str) -> None:
    """Each class of tiles: a kernel bound by memory must not wait for its own registers; 64 rows
    and more go through the matrix units by warp-group instructions, 16 rows by a warp's own; keys
    are fetched ahead; and only a tile scheduled by hand hides its softmax behind a product."""
    if module == BY_HAND and not CAN_COMPILE_GLUON:
        pytest.skip("compiling Gluon without a device needs Triton 3.9")
    reports = compiled(module)

    assert reports.keys() == {
        one for one in CASES if (module == BY_HAND) == ("hand-scheduled" in one[0])
    }
    for case, report in reports.items():
        assert report["spills"] <= SPILLS_MAX.get(case, 0), report
        assert report["mma" if case[0].startswith("small") else "wgmma"] > 0, report
        assert report["async_copies"] > 0, report
        assert (report["overlaps"] > 0) == (module == BY_HAND), report


@pytest.mark.nightly
def test_sampling_kernels_compile_and_hardly_spill() -> None:
    """For logits in bf16 and fp32, at Llama's vocabulary. The interpreter takes code that the
    compiler refuses; and a pass over the vocabulary must not wait for its own registers."""
    reports = reports_of(SAMPLING)

    assert {(one["kernel"], one["logits"]) for one in reports} == {
        ("_draw_adjusted", "*fp32"),
        *((name, "*bf16") for name in ("_adjust", "_draw", "_report_parts", "_report")),
        *((name, "*fp32") for name in ("_adjust", "_draw", "_report_parts", "_report")),
    }
    for one in reports:
        assert one["spills"] <= (40 if str(one["kernel"]).startswith("_draw") else 0), one


@pytest.mark.nightly
def test_packing_kernels_compile_and_do_not_spill() -> None:
    """Each kernel for each packed format; a unit of 2 x 16 x 128 values fits the registers."""
    reports = reports_of(PACKING)

    assert {(one["kernel"], one["format"]) for one in reports} == {
        (kernel, name)
        for kernel in ("_pack_blocks", "_unpack_blocks")
        for name in ("int8c", "int4c", "int8t")
    }
    assert [one for one in reports if one["spills"]] == []


INT8_SPILLS_MAX = {"small": 32, "wide": 2}
"""Of int8, a converted tile of keys takes registers beside the loads: 64 bytes of stack in the
small class and 8 in the wide one; not measured on a device."""


@pytest.mark.nightly
def test_kernels_over_int8_kv_compile_and_hardly_spill() -> None:
    """Each tile class and the write, at an 8B model's shape; products are by the matrix units."""
    reports = reports_of(INT8)

    assert [(one["class"], one["causal"]) for one in reports] == [
        *(("small", False), ("big", False), ("small", True), ("big", True), ("wide", True)),
        ("write", False),
    ]
    for one in reports:
        assert one["spills"] <= INT8_SPILLS_MAX.get(one["class"], 0), one
        if one["class"] != "write":
            assert one["mma" if one["class"] == "small" else "wgmma"] > 0, one


@pytest.mark.nightly
def test_products_of_experts_fit_their_multiprocessor() -> None:
    """Weights enter the matrix units from registers or shared memory, fetched ahead, unspilled."""
    reports = reports_of(EXPERTS)

    routing = [one for one in reports if one["name"].startswith("routing")]
    products = [one for one in reports if one not in routing]
    assert (len(products), len(routing)) == (38, 3)
    assert all(one["spills"] == 0 for one in routing)
    for report in products:
        most = next((n for name, n in PRODUCT_SPILLS.items() if report["name"].startswith(name)), 0)
        assert report["spills"] <= most, report
        assert report["shared_bytes"] <= SHARED_BYTES_MAX, report
        assert report["wgmma"] > 0, report
        assert report["async_copies"] > 0, report


@pytest.mark.nightly
def test_attention_over_latents_fits_its_multiprocessor() -> None:
    """Records are fetched ahead; a big tile's accumulators take half of all registers."""
    reports = reports_of(LATENTS)

    assert len(reports) == 4
    for report in reports:
        assert report["spills"] <= (121 if report["name"].startswith("big") else 0), report
        assert report["shared_bytes"] <= SHARED_BYTES_MAX, report
        assert report["wgmma" if report["name"].startswith("big") else "mma"] > 0, report
        assert report["async_copies"] > 0, report


@pytest.mark.nightly
def test_kernels_of_recurrent_layers_fit_their_multiprocessor() -> None:
    """States stay in registers; chunks multiply in the matrix units."""
    reports = reports_of(RECURRENT)

    assert len(reports) == 14
    for report in reports:
        assert report["spills"] == 0, report
        assert report["shared_bytes"] <= SHARED_BYTES_MAX, report
        if report["name"].endswith(("chunks", "systems", "solutions")):
            assert report["wgmma"] > 0, report


@pytest.mark.nightly
def test_sums_over_lanes_meet_by_flags_of_the_whole_system() -> None:
    """A flag is raised by a release and seen by an acquire that other GPUs take part in: one of
    each a peer, and one more acquire in the loop that waits. Rows stay in registers."""
    reports = reports_of(PEERS)

    assert len(reports) == 13
    for report in reports:
        assert report["spills"] == 0, report
        peers = int(report["kernel"].split(" of ")[1].split(",")[0])
        assert report["releases"] >= peers - 1, report
        assert report["acquires"] >= 2 * (peers - 1), report
