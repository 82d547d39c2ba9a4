"""KV of 8 bits in C: the reference's bytes, and attention over them beside fp64."""

from __future__ import annotations

import ctypes
import math
import random
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from pathlib import Path

import pytest
import torch

from engine.attention.batch import make_batch
from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import AttentionSpec
from engine.models.cpu_decoder import c_place
from engine.plan import StepPlan
from kernels import reference_int8
from kernels.cpu import build
from kernels.reference import paged_attention
from tests.unit.engine.attention.test_cpu_backend import random_tree
from tests.unit.kernels.kv_blocks import HARD_KINDS, hard_blocks, int8_units

BLOCK = 16


def built(folder: Path, *flags: str) -> ctypes.CDLL:
    """Return the kernels, compiled with further flags; skip where gcc does not."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    library = folder / "kernels.so"
    sources = [str(build.FOLDER / name) for name in build.SOURCES]
    command = ["gcc", *build.FLAGS, *flags, "-o", str(library), *sources, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"gcc does not build with {flags}: {done.stderr[:200]}")
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def native(library: Path) -> ctypes.CDLL:
    """The kernels as the engine builds them."""
    return ctypes.CDLL(str(library))


PORTABLE = {
    "without VNNI": ("-mno-avx512vnni", "-mno-amx-tile"),
    "AVX2": ("-mno-avx512f", "-mno-amx-tile"),
}


def bytes_of(c: ctypes.CDLL, blocks: torch.Tensor) -> torch.Tensor:
    """Return the blocks [B, 1, 2, K, 16, D] as C writes them, in panels."""
    count, _, parts, kv_heads, slots, head_dim = blocks.shape
    size = reference_int8.unit_bytes(head_dim)
    out = torch.zeros(count, 1, parts, kv_heads, size, dtype=torch.int8)
    for block in range(count):
        for part in range(parts):
            for head in range(kv_heads):
                unit = out[block, 0, part, head]
                for slot in range(slots):
                    x = blocks[block, 0, part, head, slot].contiguous()
                    c.int8_write(
                        c_void_p(x.data_ptr()), head_dim, part, slot, c_void_p(unit.data_ptr())
                    )
    return out


def hard_tokens(head_dim: int) -> torch.Tensor:
    """Return hard blocks, with values that are no numbers and values that no scale reaches."""
    blocks = hard_blocks(2 * HARD_KINDS, (1, 2, head_dim), torch.float32, seed=head_dim)
    for at, value in enumerate((math.nan, -math.nan, math.inf, -math.inf, 1e30, -1e38)):
        blocks[at, 0, at % 2, 1, at, at : 2 * at + 1] = value
    return blocks


def check_bytes(c: ctypes.CDLL) -> None:
    """Compare what C writes with the reference, with `==`."""
    for head_dim in (32, 64, 96, 128):
        blocks = hard_tokens(head_dim)
        expected = reference_int8.to_panels(int8_units(blocks))

        assert torch.equal(bytes_of(c, blocks), expected)


def check_attention(
    c: ctypes.CDLL, seeds: Sequence[int], tolerance: float, **features: float
) -> None:
    """Compare attention over random trees with fp64 over the same blocks."""
    for seed in seeds:
        plan = random_tree(random.Random(seed))
        heads, kv_heads, dim = [(4, 4, 32), (6, 2, 64), (9, 3, 64), (8, 1, 128)][seed % 4]
        generator = torch.Generator().manual_seed(seed)
        blocks = max(max(row.block_ids) for row in plan.rows if row.block_ids) + 1
        kv = 3 * torch.randn(blocks, 1, 2, kv_heads, BLOCK, dim, generator=generator)
        units = int8_units(kv)

        got, q = attended(c, plan, units, heads, generator, **features)

        wide, at = reference_int8.widen(units), 0
        sinks = q.new_tensor([0.5] * heads) if features.get("sinks") else None
        for row in plan.rows:
            expected = paged_attention(
                q[at : at + row.count], wide, 0, row.block_ids, row.start,
                window=int(features.get("window", 0)), cap=features.get("cap", 0.0), sinks=sinks,
            )  # fmt: skip
            assert float((got[at : at + row.count] - expected).abs().max()) < tolerance, (seed, row)
            at += row.count


def attended(
    c: ctypes.CDLL, plan: StepPlan, units: torch.Tensor, heads: int, generator: torch.Generator,
    window: float = 0, cap: float = 0.0, sinks: float = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what C computes over int8 blocks in slots, and the queries, both [T, H, D]."""
    kv_heads, dim = units.shape[-2], units.shape[-1] // BLOCK - 2
    backend = CpuAttention(AttentionSpec(heads, kv_heads, dim, dim**-0.5))
    batch = make_batch(plan, BLOCK, lambda _: 0)
    backend.begin(plan, batch)
    assert backend.work is not None
    work, place = backend.work, backend.work.places[0]
    qkv = torch.randn(work.tokens, heads + 2 * kv_heads, dim, generator=generator)
    out = torch.full((work.tokens, heads, dim), math.nan)
    panels = reference_int8.to_panels(units).contiguous()
    sink = torch.full((heads,), 0.5)
    layer = build.CLayer(window=int(window), sinks=sink.data_ptr() if sinks else None)
    model = build.CModel(
        heads=heads, kv_heads=kv_heads, head_dim=dim, kv_kind=build.BYTES, kv_rows=1,
        scale=dim**-0.5, cap=cap, layer=ctypes.pointer(layer), kv=panels.data_ptr(),
    )  # fmt: skip
    in_c = c_place(place)
    c_work = build.CWork(
        tokens=work.tokens, bundles=len(place.bundles), positions=work.positions.data_ptr(),
        place=ctypes.pointer(in_c), qkv=qkv.data_ptr(), attended=out.data_ptr(),
    )  # fmt: skip
    for bundle in range(len(place.bundles)):
        for head in range(kv_heads):
            c.attend(ctypes.byref(model), ctypes.byref(c_work), 0, bundle, head)
    return out, qkv[:, :heads]


LIMBS, WIDENED = 2e-3, 2e-5
"""Errors of outputs of about 3: of queries rounded to 16 bits, and of sums in fp32. With one limb
of 8 bits the first would be 0.1."""

FEATURES: tuple[dict[str, float], ...] = (
    {},
    {"window": 24},
    {"cap": 3.0},
    {"sinks": 1},
    {"window": 40, "cap": 5.0, "sinks": 1},
)


def test_c_writes_the_references_bytes(native: ctypes.CDLL) -> None:
    """Outliers, denormals, zeros, what is no number and what is too large."""
    check_bytes(native)


@pytest.mark.slow
def test_attention_over_8_bits_equals_reference(native: ctypes.CDLL) -> None:
    """Prompts and decoding rows in one batch, runs shared at several levels, ragged lengths."""
    check_attention(native, range(4), LIMBS)
    for seed, features in enumerate(FEATURES[1:], 4):
        check_attention(native, [seed], LIMBS, **features)


@pytest.mark.slow
@pytest.mark.parametrize("flags", PORTABLE.values(), ids=PORTABLE)
def test_other_cpus_write_and_read_the_same_bytes(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Without VNNI a tile is widened to fp32; on a CPU that has neither, both are this path."""
    c = built(tmp_path, *flags)

    check_bytes(c)
    check_attention(c, range(4), WIDENED)
    for seed, features in enumerate(FEATURES[1:], 4):
        check_attention(c, [seed], WIDENED, **features)


def test_a_scale_of_another_slot_is_seen(native: ctypes.CDLL) -> None:
    """The comparison can fail: with two tokens' scales exchanged the outcome is another."""
    plan = random_tree(random.Random(3))
    blocks = max(max(row.block_ids) for row in plan.rows if row.block_ids) + 1
    kv = torch.randn(blocks, 1, 2, 2, BLOCK, 64, generator=torch.Generator().manual_seed(4))
    kv *= torch.linspace(0.5, 3.0, BLOCK)[:, None]
    units = int8_units(kv)
    expected, _ = attended(native, plan, units, 6, torch.Generator().manual_seed(5))
    scales = reference_int8.scales_of(units)
    scales.copy_(scales.roll(1, -1))

    got, _ = attended(native, plan, units, 6, torch.Generator().manual_seed(5))

    assert float((got - expected).abs().max()) > 0.1


def test_probabilities_far_below_the_largest_count_nothing(native: ctypes.CDLL) -> None:
    """Later tiles whose scores are lower by more than a hundred leave the outcome finite."""
    plan = random_tree(random.Random(2))
    blocks = max(max(row.block_ids) for row in plan.rows if row.block_ids) + 1
    kv = 400 * torch.randn(blocks, 1, 2, 2, BLOCK, 64, generator=torch.Generator().manual_seed(6))
    units = int8_units(kv)

    got, _ = attended(native, plan, units, 6, torch.Generator().manual_seed(7))

    assert got.isfinite().all()


def test_query_that_is_no_number_gives_no_number(native: ctypes.CDLL) -> None:
    """The sequence then fails by its own logits."""
    limbs, row = torch.zeros(2 * 32, dtype=torch.int8), (c_float * 3)()
    q = torch.ones(32)
    q[7] = math.nan
    if not hasattr(native, "int8_query"):
        pytest.skip("no VNNI")

    native.int8_query(c_void_p(q.data_ptr()), c_int32(32), c_void_p(limbs.data_ptr()), row)

    assert math.isnan(row[0])
