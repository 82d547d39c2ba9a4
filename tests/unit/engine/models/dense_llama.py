"""A Llama without cache, batch or fusion, which every path through the engine must match.

It reads weights by their published names and recomputes a whole sequence in fp64.
"""

from __future__ import annotations

import math

import torch

from engine.model_store import Architecture
from engine.weights import Tensors


def dense_logits(config: Architecture, weights: Tensors, tokens: list[int]) -> torch.Tensor:
    """Return the logits [T, vocab] fp64 of every position, computed on the CPU."""
    w = {name: tensor.cpu().double() for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][tokens]
    rotations = rope_rotations(config, len(tokens))
    for layer in range(len(config.layers)):
        prefix = f"model.layers.{layer}."
        normed = rms(x, w[f"{prefix}input_layernorm.weight"], config.norm_eps)
        q, k, v = (
            (normed @ w[f"{prefix}self_attn.{name}_proj.weight"].T).view(
                len(tokens), -1, config.head_dim
            )
            for name in "qkv"
        )
        repeat = config.heads // config.kv_heads
        q, k = rotated(q, rotations), rotated(k, rotations).repeat_interleave(repeat, 1)
        v = v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        weight = scores.masked_fill(future, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weight, v).flatten(1)
        x = x + mixed @ w[f"{prefix}self_attn.o_proj.weight"].T
        normed = rms(x, w[f"{prefix}post_attention_layernorm.weight"], config.norm_eps)
        gate, up = (normed @ w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"{prefix}mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms(x, w["model.norm.weight"], config.norm_eps) @ head.T


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope_rotations(config: Architecture, length: int) -> torch.Tensor:
    """Return e^(i * position * frequency) [T, D / 2]; Llama 3's scaling is written out by cases."""
    angles = []
    for i in range(config.head_dim // 2):
        s = config.ropes["full"]
        frequency = s.theta ** (-2 * i / config.head_dim)
        if s.kind == "llama3":
            wavelength = 2 * math.pi / frequency
            if wavelength > s.original_context / s.low_freq_factor:
                frequency /= s.factor
            elif wavelength > s.original_context / s.high_freq_factor:
                smooth = s.original_context / wavelength - s.low_freq_factor
                smooth /= s.high_freq_factor - s.low_freq_factor
                frequency *= (1 - smooth) / s.factor + smooth
        elif s.kind == "linear":
            frequency /= s.factor
        angles.append(torch.arange(length, dtype=torch.float64) * frequency)
    angle = torch.stack(angles, -1)
    return torch.polar(torch.ones_like(angle), angle)


def rotated(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D]; channels i and i + D / 2 are one complex number."""
    first, second = x.chunk(2, -1)
    products = torch.complex(first, second) * rotations[:, None]
    return torch.cat([products.real, products.imag], -1)
