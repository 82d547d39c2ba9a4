"""Packed blocks against the format's own reader."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.weights.gguf_blocks import PACKED_BLOCKS
from tests.tables import each_row


@each_row("name", PACKED_BLOCKS)
def test_packed_blocks_have_the_reference_s_values(name: str) -> None:
    """Bit for bit in fp32, of any bytes, but for values that no model has."""
    kind = GGMLQuantizationType[name]
    _, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(256, size=(60, 2 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)

    found = PACKED_BLOCKS[name](torch.from_numpy(raw).view(60, 2, size))

    assert found.shape == expected.shape
    with np.errstate(all="ignore"):
        plausible = (abs(expected) > 1e-30) & (abs(expected) < 1e30)
    assert plausible.mean() > 0.25
    assert np.array_equal(found.dense(torch.float32).numpy()[plausible], expected[plausible])
