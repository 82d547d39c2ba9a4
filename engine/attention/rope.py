"""Rotary embedding tables: cos and sin of every position, with the model's frequency scaling.

It knows no backend. Backends and the C model read the tables.
"""

from __future__ import annotations

import math

import torch

from engine.model_store import Architecture, Rope

RopeTable = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [context, channels / 2] fp32."""


def rope_tables(config: Architecture, context: int) -> dict[str, RopeTable]:
    """Return the tables that layers name; that of layers without rotation is named "".

    Tables have D / 2 columns: the loader puts the channels that rotate where rotation by halves of
    the whole head finds them, and the columns of the others hold cos 1 and sin 0. With latents the
    tables have only the rotating channels, which come first.
    """
    width = config.head_dim // 2 if config.latent is None else config.latent.rope // 2
    no_rotation = torch.ones(context, width), torch.zeros(context, width)
    return {
        name: rope_table(config.ropes[name], context, width) if name else no_rotation
        for name in {layer.rope for layer in config.layers}
    }


def rope_table(rope: Rope, context: int, width: int) -> RopeTable:
    """Return cos and sin, each [context, width], columns behind the rotating channels 1 and 0."""
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies(rope, context))
    cos, sin = torch.ones(context, width), torch.zeros(context, width)
    cos[:, : rope.dim // 2] = (angles.cos() * rope.amplitude).float()
    sin[:, : rope.dim // 2] = (angles.sin() * rope.amplitude).float()
    return cos, sin


def frequencies(rope: Rope, context: int) -> torch.Tensor:
    """Return the frequencies [dim / 2] fp64 of a table that serves `context` tokens.

    Llama 3's scaling: frequencies whose wavelength exceeds the original context over
    `low_freq_factor` are divided by `factor`, frequencies whose wavelength is below the original
    context over `high_freq_factor` stay, and frequencies between are interpolated. YaRN: Peng et
    al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023). Divisors are
    chosen once, by the context, so that a cached key is rotated as the query that reads it.
    """
    half = rope.dim // 2
    plain = rope.theta ** -(torch.arange(half, dtype=torch.float64) / half)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "divisors":
        is_long = bool(rope.long_divisors) and context > rope.original_context
        divisors = rope.long_divisors if is_long else rope.divisors
        return plain / torch.tensor(divisors, dtype=torch.float64)
    if rope.kind == "llama3":
        turns = rope.original_context * plain / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return plain * (blend + (1 - blend) / rope.factor)
    if rope.kind == "yarn":
        low, high = (_dimension(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, rope.dim - 1.0)
        ramp = (torch.arange(half, dtype=torch.float64) - low) / max(high - low, 0.001)
        blend = ramp.clamp(0.0, 1.0)
        return plain * (1 - blend) + plain / rope.factor * blend
    return plain


def _dimension(rope: Rope, turns: float) -> float:
    """Return the dimension whose frequency makes `turns` turns in the original context."""
    wavelength = rope.original_context / (turns * 2 * math.pi)
    return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))
