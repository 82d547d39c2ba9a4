"""The reference of int8 KV: its bytes are those of the packed format, and its order is undone."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import reference_int8, reference_kv
from tests.unit.kernels.kv_blocks import HARD_KINDS, hard_blocks

SHAPE = (2, 3, 32)


def written(blocks: torch.Tensor) -> torch.Tensor:
    """Return int8 blocks [B, L, 2, K, n] of blocks [B, L, 2, K, 16, D], written token by token."""
    count, layers, parts, kv_heads, slots, head_dim = blocks.shape
    units = torch.zeros(
        count, layers, parts, kv_heads, reference_int8.unit_bytes(head_dim), dtype=torch.int8
    )
    for slot in reversed(range(slots)):
        at = torch.full((count,), slot)
        for layer in range(layers):
            for part in range(parts):
                x = blocks[:, layer, part, :, slot]
                reference_int8.write(units[:, layer, part], torch.arange(count), at, x)
    return units


def test_blocks_written_token_by_token_are_packed_blocks() -> None:
    """A block in slots has the bytes of the packed format `int8t`, in any order of writing."""
    blocks = hard_blocks(2 * HARD_KINDS, SHAPE, torch.float32, seed=1)

    units = written(blocks)

    packed = reference_kv.pack(blocks, "int8t")
    assert torch.equal(units.flatten(1).view(torch.uint8), packed)
    assert torch.equal(
        reference_int8.widen(units), reference_kv.unpack(packed, "int8t", SHAPE, torch.float32)
    )


def test_panels_hold_the_same_bytes_in_another_order() -> None:
    units = written(hard_blocks(4, SHAPE, torch.float32, seed=2))

    panels = reference_int8.to_panels(units)

    assert not torch.equal(panels, units)
    assert torch.equal(reference_int8.from_panels(panels), units)
    values = reference_int8.values_of(units)
    keys, rest = panels[1, 0, 0, 2], panels[1, 0, 1, 2]
    assert int(keys[(7 // 4 * 16 + 5) * 4 + 7 % 4]) == int(values[1, 0, 0, 2, 5, 7])
    assert int(rest[(5 // 4 * 32 + 7) * 4 + 5 % 4]) == int(values[1, 0, 1, 2, 5, 7])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.nan, 0.0), (math.inf, 0.0), (-math.inf, 0.0), (1e30, reference_int8.MOST)],
)
def test_what_no_scale_reaches_is_finite(value: float, expected: float) -> None:
    """Every slot is finite at all times: kernels read whole tiles and mask afterwards."""
    x = torch.tensor([[[value, 1.0, -2.0, 0.5]]])

    values, scales = reference_int8.quantise(x)

    assert float(values[0, 0, 0] * scales.float()[0, 0]) == expected
    assert scales.isfinite().all()


def test_slots_never_written_read_as_zero() -> None:
    units = torch.zeros(1, 2, reference_int8.unit_bytes(16), dtype=torch.int8)

    assert not reference_int8.widen(units).any()
