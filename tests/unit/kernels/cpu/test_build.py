"""The C kernels against plain torch: products, packing, threads, and the compiling itself."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.models.cpu_llama import interleaved_columns
from kernels import reference
from kernels.cpu import build as cpu

ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 33, 400)
SHAPES = ((64, 96), (32, 40), (96, 576), (160, 5000))
"""depth, columns: 40 and 5,000 leave panels half empty, 5,000 makes tasks of several panels."""


@pytest.fixture(scope="module")
def kernels() -> Iterator[cpu.Kernels]:
    library = cpu.compiled()
    if library is None:
        pytest.skip("no C compiler here")
    made = cpu.Kernels(library, 2)
    yield made
    made.close()


def kinds(kernels: cpu.Kernels) -> list[int]:
    return [cpu.WIDE, cpu.PAIRS, *([cpu.DOT] if kernels.has_dot else [])]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor, kind: int) -> torch.Tensor:
    """What the kernel sees of an activation."""
    return x.bfloat16().double() if kind == cpu.DOT else x.double()


@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_products_are_matrix_products(kernels: cpu.Kernels, depth: int, columns: int) -> None:
    """Every number of rows takes another path through the tiles; so does every way of storing."""
    weight = random(columns, depth, seed=1).bfloat16()
    for kind in kinds(kernels):
        packed = kernels.pack(weight.float() if kind == cpu.WIDE else weight)
        for rows in ROWS:
            a = random(rows, depth, seed=rows)
            out, added = torch.full((rows, columns), 7.0), torch.full((rows, columns), 7.0)

            kernels.product(a, packed, out, cpu.STORE, kind)
            kernels.product(a, packed, added, cpu.ADD, kind)

            expected = rounded(a, kind) @ weight.double().T
            assert float((out - expected).abs().max()) < 1e-5 * depth
            assert torch.equal(added, out + 7.0)


def test_a_product_of_no_rows_is_nothing(kernels: cpu.Kernels) -> None:
    """A step whose rows need no logits asks for it."""
    packed = kernels.pack(random(64, 32))

    kernels.product(torch.empty(0, 32), packed, torch.empty(0, 64), cpu.STORE, cpu.WIDE)


@pytest.mark.parametrize("intermediate", [32, 48, 1536])
def test_silu_gates_while_the_panels_are_at_hand(kernels: cpu.Kernels, intermediate: int) -> None:
    """Gate and up lie in turns; 48 is an odd number of panels of each."""
    gate_up = random(2 * intermediate, 64, seed=3)
    packed = kernels.pack(gate_up, interleaved_columns(intermediate))
    for rows in (1, 5, 40):
        a = random(rows, 64, seed=rows) * 4
        out = torch.empty(rows, intermediate)

        kernels.product(a, packed, out, cpu.SILU, cpu.WIDE)

        expected = reference.silu_mul(a.double() @ gate_up.double().T)
        assert float((out - expected).abs().max() / expected.abs().max()) < 1e-6


def test_gates_far_out_neither_overflow_nor_vanish(kernels: cpu.Kernels) -> None:
    """e^-x is infinite for a gate of -200, and silu of it is 0."""
    gate_up = torch.zeros(32, 2)
    gate_up[:16, 0] = gate_up[16:, 1] = 1.0
    packed = kernels.pack(gate_up, interleaved_columns(16))
    gates = torch.tensor([-2000.0, -200.0, -88.0, -20.0, 0.0, 20.0, 200.0, 1e30])
    a = torch.stack([gates, torch.ones_like(gates)], 1)
    out = torch.empty(len(gates), 16)

    kernels.product(a, packed, out, cpu.SILU, cpu.WIDE)

    assert torch.allclose(out[:, 0], torch.nn.functional.silu(gates), rtol=1e-6, atol=1e-30)


def test_a_row_has_the_same_bits_in_any_company(kernels: cpu.Kernels) -> None:
    """What makes seeded sampling reproducible whatever else is in the batch."""
    depth, columns = 576, 200
    weight, a = random(columns, depth, seed=1), random(300, depth, seed=2)
    for kind in kinds(kernels):
        packed = kernels.pack(weight if kind == cpu.WIDE else weight.bfloat16())
        alone = torch.empty(300, columns)
        for row in range(300):
            kernels.product(a[row : row + 1], packed, alone[row : row + 1], cpu.STORE, kind)
        for rows in (2, 3, 4, 5, 6, 7, 11, 16, 300):
            together = torch.empty(rows, columns)

            kernels.product(a[:rows], packed, together, cpu.STORE, kind)

            assert torch.equal(together, alone[:rows]), (kind, rows)


def test_a_nan_stays_in_its_row(kernels: cpu.Kernels) -> None:
    """One broken sequence fails; the others of its step do not."""
    a = random(8, 64)
    a[3, 10] = float("nan")
    for kind in kinds(kernels):
        weight = random(64, 64, seed=1)
        packed = kernels.pack(weight if kind == cpu.WIDE else weight.bfloat16())
        out = torch.empty(8, 64)

        kernels.product(a, packed, out, cpu.STORE, kind)

        assert out.isnan().any(1).tolist() == [row == 3 for row in range(8)]


def test_thousands_of_phases_lose_no_task(kernels: cpu.Kernels) -> None:
    """Threads sleep and wake between phases; a lost wake hangs here, a lost task is a wrong sum."""
    a, weight = random(7, 32), random(640, 32, seed=1)
    packed, expected = kernels.pack(weight), torch.empty(7, 640)
    kernels.product(a, packed, expected, cpu.STORE, cpu.WIDE)
    crowd = cpu.Kernels(_library(), 5)
    try:
        for _ in range(3000):
            out = torch.empty(7, 640)
            crowd.product(a, packed, out, cpu.STORE, cpu.WIDE)

            assert torch.equal(out, expected)
    finally:
        crowd.close()


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def are_gone(ids: set[str]) -> bool:
    """A joined thread leaves the list a moment later."""
    for _ in range(100_000):
        if not ids & threads():
            return True
        os.sched_yield()
    return False


def test_closing_ends_the_threads() -> None:
    """An engine in a thread starts and stops often in tests, and must leave nothing."""
    before = threads()
    crowd = cpu.Kernels(_library(), 4)
    workers = threads() - before

    crowd.close()

    assert len(workers) == 3
    assert are_gone(workers)


def test_threads_end_when_nobody_refers_to_them() -> None:
    """A runner that is dropped without a word leaves no thread either."""
    before = threads()
    crowd = cpu.Kernels(_library(), 3)
    workers = threads() - before

    del crowd
    gc.collect()

    assert len(workers) == 2
    assert are_gone(workers)


def test_the_library_is_compiled_once_and_appears_whole(tmp_path: Path) -> None:
    """Two starts at the same time each write their own file and rename it."""
    first = cpu.compiled(tmp_path)
    if first is None:
        pytest.skip("no C compiler here")
    made = first.stat().st_mtime_ns

    second = cpu.compiled(tmp_path)

    assert second == first
    assert first.stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [first]


def test_no_compiler_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine then takes the torch path; it does not fail."""
    monkeypatch.setenv("PATH", os.fspath(tmp_path))

    assert cpu.compiled(tmp_path / "cache") is None


def test_a_compiler_that_fails_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing half made is left for the next start to find."""
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    cache = tmp_path / "cache"

    assert cpu.compiled(cache) is None
    assert list(cache.iterdir()) == []


def _library() -> Path:
    library = cpu.compiled()
    if library is None:
        pytest.skip("no C compiler here")
    return library
