"""The C kernels against torch: products, packing, threads and compilation."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.models.packing import interleaved_columns
from kernels import reference
from kernels.cpu import build as cpu
from kernels.reference_weights import Kind, Packed

ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 33, 400)
SHAPES = ((64, 96), (32, 40), (96, 576), (160, 5000))
"""(depth, columns): 40 and 5,000 leave panels half empty; 5,000 makes tasks of several panels."""


@pytest.fixture(scope="module")
def kernels(library: Path) -> Iterator[cpu.Kernels]:
    kernels = cpu.Kernels(library, 2)
    yield kernels
    kernels.close()


def kinds(kernels: cpu.Kernels) -> list[int]:
    """Return the kinds that this CPU can multiply."""
    dot = [cpu.DOT] if kernels.has_dot else []
    return [cpu.WIDE, cpu.PAIRS, *dot, *({kernels.bf16_kind} & {cpu.TILES})]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor, kind: int) -> torch.Tensor:
    """Return an activation as the kernel rounds it."""
    return x.bfloat16().double() if kind in (cpu.DOT, cpu.TILES) else x.double()


@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_products_equal_torch(kernels: cpu.Kernels, depth: int, columns: int) -> None:
    """Every number of rows takes another path through the tiles; so does every kind of storage."""
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


@pytest.mark.parametrize(("rows", "depth"), [(32, 2), (40, 34), (600, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_hold_16_columns_side_by_side(
    kernels: cpu.Kernels, rows: int, depth: int, dtype: torch.dtype
) -> None:
    """In words of a value, or of two in bf16; 40 rows leave columns of zeros, 34 is no whole number
    of lines, and 600 are several tasks."""
    weight = random(rows, depth, seed=2).to(dtype)
    columns = torch.arange(cpu.padded_columns(rows), dtype=torch.int32).flip(0)
    columns[columns >= rows] = -1
    out = torch.full((len(columns) * depth,), 7.0, dtype=dtype)

    packed = kernels.pack(weight, columns, out)

    words = 2 if dtype == torch.bfloat16 else 1
    chosen = torch.cat([weight, torch.zeros(1, depth, dtype=dtype)])[columns.long()]
    panels = chosen.view(-1, cpu.PANEL, depth // words, words).transpose(1, 2)
    assert packed is out
    assert torch.equal(out, panels.flatten())


def mxfp4(columns: int, depth: int) -> torch.Tensor:
    """Return random values of MXFP4 in bf16, some groups all zero, exponents from -9 to 9."""
    generator = torch.Generator().manual_seed(9)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(8, (columns, depth // 32, 32), generator=generator)
    signs = torch.randint(2, codes.shape, generator=generator) * 2 - 1
    exponents = torch.randint(-9, 10, (columns, depth // 32, 1), generator=generator).float()
    values = magnitudes[codes] * signs * 2.0**exponents
    values[3, 0] = 0
    return values.flatten(1).bfloat16()


@pytest.mark.parametrize(("depth", "columns"), [(64, 96), (32, 40), (96, 576), (160, 1000)])
def test_mxfp4_products_are_those_of_the_same_weights_in_bf16(
    kernels: cpu.Kernels, depth: int, columns: int
) -> None:
    """To the last bit, in a quarter of the memory."""
    weight = mxfp4(columns, depth)
    packed, small = kernels.pack(weight), kernels.pack_mxfp4(weight)
    assert small is not None
    assert small.nbytes * 64 == packed.nbytes * 17
    for kind in [kind for kind in kinds(kernels) if kind != cpu.WIDE]:
        for rows in ROWS:
            a = random(rows, depth, seed=rows)
            out, expected = torch.empty(rows, columns), torch.empty(rows, columns)

            kernels.product(a, small, out, cpu.STORE, kind, cpu.MXFP4)
            kernels.product(a, packed, expected, cpu.STORE, kind)

            assert torch.equal(out, expected), (kind, rows)


@pytest.mark.parametrize(
    "value", [0.75, 5.0, 12.0, 0.25, float("nan"), float("inf"), 2.0**-130, 1.0 + 2.0**-7]
)
def test_weights_that_are_no_mxfp4_are_not_packed_as_such(
    kernels: cpu.Kernels, value: float
) -> None:
    """In a group with 0.5 and 6 none of these can be held; nor can a K of half a group."""
    weight = torch.zeros(32, 64, dtype=torch.bfloat16)
    weight[5, 32:34] = torch.tensor([0.5, -6.0])
    assert kernels.pack_mxfp4(weight) is not None

    weight[5, 40] = value

    assert kernels.pack_mxfp4(weight) is None
    assert kernels.pack_mxfp4(torch.zeros(32, 48, dtype=torch.bfloat16)) is None


def coded(kind: Kind, group: int, columns: int, depth: int) -> Packed:
    """Return random codes, the least and the largest of 8 bits among them."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(256, (columns, depth), generator=generator, dtype=torch.uint8)
    codes = codes[:, : depth // 2] if kind == "int4" else codes.view(torch.int8)
    scales, minima = torch.rand(2, columns, depth // group, generator=generator).half().float() / 64
    return Packed(kind, codes, scales, group, -minima * 8)


def has_codes(kernels: cpu.Kernels) -> None:
    if not kernels.has_codes:
        pytest.skip("codes are multiplied where the CPU multiplies pairs of bf16, or has AVX2")


def rounded_by_group(a: torch.Tensor, kind: int, group: int) -> torch.Tensor:
    """Return activations as products of codes round them: to bf16, or to 16 bits with a scale for
    each group, fp32."""
    if kind == cpu.DOT:
        return a.bfloat16().double()
    groups = a.view(len(a), -1, group)
    most = groups.abs().amax(-1, keepdim=True)
    whole = (groups * (32767 / most.clamp(min=1e-30))).round()
    return (whole.double() * (most / 32767).double()).view(a.shape)


@pytest.mark.parametrize("packing", cpu.CODE_PACKINGS)
@pytest.mark.parametrize(("depth", "columns"), [(64, 96), (32, 40), (96, 576), (160, 1000)])
def test_products_of_codes_round_no_weight(
    kernels: cpu.Kernels, packing: tuple[Kind, int], depth: int, columns: int
) -> None:
    """Exact but for the order of fp32 sums, and a row has the same bits in any batch."""
    has_codes(kernels)
    kind = kernels.bf16_kind
    weight, name = coded(*packing, columns, depth), cpu.CODE_PACKINGS[packing]
    packed, exact = kernels.pack_codes(weight), weight.dense(torch.float64)
    for rows in ROWS:
        a = random(rows, depth, seed=rows)
        out, alone = torch.empty(rows, columns), torch.empty(1, columns)
        expected = rounded_by_group(a, kind, packing[1]) @ exact.T

        kernels.product(a, packed, out, cpu.STORE, kind, name)
        kernels.product(a[-1:].contiguous(), packed, alone, cpu.STORE, kind, name)

        assert float((out - expected).norm() / expected.norm()) < 1e-5, rows
        assert torch.equal(alone[0], out[-1]), rows


@pytest.mark.parametrize("packing", cpu.CODE_PACKINGS)
def test_what_is_no_number_shows_in_its_own_row_of_products_of_codes(
    kernels: cpu.Kernels, packing: tuple[Kind, int]
) -> None:
    """Rounding to integers must not hide it: a request whose logits are no numbers fails."""
    has_codes(kernels)
    packed, name = kernels.pack_codes(coded(*packing, 32, 64)), cpu.CODE_PACKINGS[packing]
    for value in (float("nan"), float("inf"), float("-inf")):
        for rows in (4, 7):
            a, expected, out = random(rows, 64), torch.empty(rows, 32), torch.empty(rows, 32)
            a[1] = 0
            kernels.product(a, packed, expected, cpu.STORE, kernels.bf16_kind, name)
            a[2, 40] = value

            kernels.product(a, packed, out, cpu.STORE, kernels.bf16_kind, name)

            assert not out[2].isfinite().any(), (value, rows)
            others = torch.arange(rows) != 2
            assert torch.equal(out[others], expected[others])
            assert not out[1].any()


@pytest.mark.parametrize("packing", cpu.CODE_PACKINGS)
def test_codes_are_packed_in_the_order_that_is_asked_for(
    kernels: cpu.Kernels, packing: tuple[Kind, int]
) -> None:
    """Gate and up in turns; a column of -1 is zeros."""
    has_codes(kernels)
    weight, a = coded(*packing, 32, 64), random(3, 64)
    order = torch.arange(63, -1, -1, dtype=torch.int32) - 32
    order[order < 0] = -1
    out, expected = torch.empty(3, 64), torch.empty(3, 32)
    name = cpu.CODE_PACKINGS[packing]

    kind = kernels.bf16_kind

    kernels.product(a, kernels.pack_codes(weight, order), out, cpu.STORE, kind, name)

    kernels.product(a, kernels.pack_codes(weight), expected, cpu.STORE, kind, name)
    assert torch.equal(out[:, :32], expected.flip(1))
    assert not out[:, 32:].any()


def test_product_of_no_rows_does_nothing(kernels: cpu.Kernels) -> None:
    """A step without logits calls it."""
    packed = kernels.pack(random(64, 32))

    kernels.product(torch.empty(0, 32), packed, torch.empty(0, 64), cpu.STORE, cpu.WIDE)


@pytest.mark.parametrize("intermediate", [32, 48, 1536])
def test_silu_epilogue_equals_reference(kernels: cpu.Kernels, intermediate: int) -> None:
    """Panels of gate and up alternate; 48 is an odd number of panels of each."""
    gate_up = random(2 * intermediate, 64, seed=3)
    packed = kernels.pack(gate_up, interleaved_columns(intermediate))
    for rows in (1, 5, 40):
        a = random(rows, 64, seed=rows) * 4
        out = torch.empty(rows, intermediate)

        kernels.product(a, packed, out, cpu.SILU, cpu.WIDE)

        expected = reference.gated_mul(a.double() @ gate_up.double().T, "silu")
        assert float((out - expected).abs().max() / expected.abs().max()) < 1e-6


def test_extreme_gates_neither_overflow_nor_vanish(kernels: cpu.Kernels) -> None:
    """e^-x is infinite for a gate of -200, and silu of it is 0."""
    gate_up = torch.zeros(32, 2)
    gate_up[:16, 0] = gate_up[16:, 1] = 1.0
    packed = kernels.pack(gate_up, interleaved_columns(16))
    gates = torch.tensor([-2000.0, -200.0, -88.0, -20.0, 0.0, 20.0, 200.0, 1e30])
    a = torch.stack([gates, torch.ones_like(gates)], 1)
    out = torch.empty(len(gates), 16)

    kernels.product(a, packed, out, cpu.SILU, cpu.WIDE)

    assert torch.allclose(out[:, 0], torch.nn.functional.silu(gates), rtol=1e-6, atol=1e-30)


def test_row_bits_do_not_depend_on_batch(kernels: cpu.Kernels) -> None:
    """Seeded sampling is reproducible in any batch because of this."""
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


def test_nan_stays_in_its_row(kernels: cpu.Kernels) -> None:
    """A broken sequence fails; the other sequences of the step do not."""
    a = random(8, 64)
    a[3, 10] = float("nan")
    for kind in kinds(kernels):
        weight = random(64, 64, seed=1)
        packed = kernels.pack(weight if kind == cpu.WIDE else weight.bfloat16())
        out = torch.empty(8, 64)

        kernels.product(a, packed, out, cpu.STORE, kind)

        assert out.isnan().any(1).tolist() == [row == 3 for row in range(8)]


def test_pool_loses_no_task(kernels: cpu.Kernels, library: Path) -> None:
    """Threads sleep and wake between phases: a lost wake-up hangs here, a lost task changes the
    sum."""
    a, weight = random(7, 32), random(640, 32, seed=1)
    packed, expected = kernels.pack(weight), torch.empty(7, 640)
    kernels.product(a, packed, expected, cpu.STORE, cpu.WIDE)
    pool_kernels = cpu.Kernels(library, 5)
    try:
        for _ in range(3000):
            out = torch.empty(7, 640)
            pool_kernels.product(a, packed, out, cpu.STORE, cpu.WIDE)

            assert torch.equal(out, expected)
    finally:
        pool_kernels.close()


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def are_gone(ids: set[str]) -> bool:
    """Wait until the threads are gone: a joined thread leaves the list with a delay."""
    for _ in range(100_000):
        if not ids & threads():
            return True
        os.sched_yield()
    return False


def test_close_ends_threads(library: Path) -> None:
    """Tests start and stop many engines in one process."""
    before = threads()
    pool_kernels = cpu.Kernels(library, 4)
    workers = threads() - before

    pool_kernels.close()

    assert len(workers) == 3
    assert are_gone(workers)


def test_garbage_collection_ends_threads(library: Path) -> None:
    """A runner that is dropped without `close` must leave no thread."""
    before = threads()
    pool_kernels = cpu.Kernels(library, 3)
    workers = threads() - before

    del pool_kernels
    gc.collect()

    assert len(workers) == 2
    assert are_gone(workers)


def test_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent starts each write a temporary file and rename it. One source compiles as all do,
    in a tenth of the time."""
    monkeypatch.setattr(cpu, "SOURCES", cpu.SOURCES[:1])
    first = cpu.compile_library(tmp_path)
    if first is None:
        pytest.skip("no C compiler")
    compiled_at = first.stat().st_mtime_ns

    second = cpu.compile_library(tmp_path)

    assert second == first
    assert first.stat().st_mtime_ns == compiled_at
    assert list(tmp_path.iterdir()) == [first]


def test_missing_compiler_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine then computes in torch."""
    monkeypatch.setenv("PATH", os.fspath(tmp_path))

    assert cpu.compile_library(tmp_path / "cache") is None


def test_failing_compiler_gives_none_and_logs_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No partial file is left for the next start."""
    compiler = tmp_path / "bin" / "gcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'immintrin.h: No such file' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    cache = tmp_path / "cache"

    assert cpu.compile_library(cache) is None
    assert list(cache.iterdir()) == []
    assert "kernels_not_compiled: immintrin.h: No such file" in caplog.text
