"""Blocks of 4 bits against the format's own reader."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.weights.gguf_blocks import PACKED_BLOCKS
from tests.tables import each_row


@each_row("name", PACKED_BLOCKS)
def test_packed_blocks_have_the_reference_s_values(name: str) -> None:
    """Bit for bit in fp32, of any bytes whose scales are numbers."""
    kind = GGMLQuantizationType[name]
    _, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(90, 120, (6, 2 * size), dtype=np.uint8)
    expected = gguf.quants.dequantize(raw, kind)

    found = PACKED_BLOCKS[name](torch.from_numpy(raw).view(6, 2, size))

    assert found.shape == expected.shape
    assert np.array_equal(found.dense(torch.float32).numpy(), expected)
