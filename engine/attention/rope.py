"""Rotary embedding tables: cos and sin of every position, with the model's frequency scaling.

It knows no backend. Backends and the C model read the tables.
"""

from __future__ import annotations

import math

import torch

from engine.model_store import ModelConfig


def rope_tables(config: ModelConfig, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each [context, D / 2] fp32, with the model's rope scaling applied.

    Llama 3's scaling: frequencies whose wavelength exceeds the original context over
    `low_freq_factor` are divided by `factor`, frequencies whose wavelength is below the original
    context over `high_freq_factor` stay, and frequencies between are interpolated.
    """
    half = config.head_dim // 2
    power = torch.arange(half, dtype=torch.float64) / half
    frequencies = config.rope_theta**-power
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None and scaling.kind == "divisors":
        frequencies = frequencies / torch.tensor(scaling.divisors, dtype=torch.float64)
    elif scaling is not None:
        turns = scaling.original_context * frequencies / (2 * math.pi)
        blend = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blend = blend.clamp(0.0, 1.0)
        frequencies = frequencies * (blend + (1 - blend) / scaling.factor)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()
