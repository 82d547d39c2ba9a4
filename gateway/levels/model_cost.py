"""What a model's tokens cost without running it: bytes of KV, and the time to compute them.

Both follow from the shape in the model's prepared card. The time is a lower bound: the arithmetic
of the weights at the rate of this machine's matrix products. `trunkline doctor` asks.
"""

from __future__ import annotations

import math
from pathlib import Path

from engine.config import SPARE_SEATS, EngineConfig
from engine.errors import ModelError
from engine.model_store import Architecture, ModelCard, expected_shapes, load_card, resolve

VALUE_BYTES = {"auto": 2, "bf16": 2, "fp32": 4, "int8": 1}
"""Bytes of a value of KV by `engine.kv_dtype`."""
SCALE_BYTES = {"int8": 2}
"""Bytes that a token's key or value of one head takes beside its values."""


def find_card(name: str, models_dir: Path) -> ModelCard | None:
    """Return the card of a model that a server has prepared, by its name in the catalogue or its
    path; None before its first start, or where there are no such files."""
    try:
        source = resolve(name, models_dir)
    except ModelError:
        return None
    for path in sorted((models_dir / "prepared").glob("*/model_card.json")):
        try:
            card = load_card(path.parent)
        except ModelError:  # of another version, or damaged
            continue
        if card.source == str(source):
            return card
    return None


def has_windows(shape: Architecture) -> bool:
    """Return whether a layer reads only a window."""
    return any(layer.window for layer in shape.layers)


def kv_bytes_per_token(shape: Architecture, kv_dtype: str) -> int:
    """Return the bytes of one token's keys and values, or latents, in all layers."""
    parts = 2 if shape.latent is None else 1
    layers = len(shape.layers) - len(shape.layers_without_kv)
    head_bytes = shape.head_dim * VALUE_BYTES[kv_dtype] + SCALE_BYTES.get(kv_dtype, 0)
    return parts * layers * shape.kv_heads * head_bytes


def state_bytes(shape: Architecture) -> int:
    """Return the bytes of a sequence's state on a GPU, all recurrent layers: the last inputs of
    convolutions in bf16, and matrices in fp32, each a multiple of 64 (`engine.states.layout`)."""
    rule = shape.rule
    channels = shape.hidden if rule is None else rule.channels
    parts = [2 * max(0, shape.conv_width - 1) * channels]
    parts.append(0 if rule is None else 4 * math.prod(rule.state))
    return len(shape.recurrent_layers) * sum(-(-part // 64) * 64 for part in parts)


def running_states_bytes(shape: Architecture, engine: EngineConfig) -> int:
    """Return the bytes of `kv_memory_mib` that states of running sequences take on a GPU."""
    return (engine.sequences_max + SPARE_SEATS + 1) * state_bytes(shape)


def weights_of(shape: Architecture) -> int:
    """Return how many weights a model has. O(tensors)."""
    return sum(math.prod(one) for one in expected_shapes(shape).values())


def flops_per_token(shape: Architecture) -> int | None:
    """Return the products and sums of a prompt's token with the weights; None for experts."""
    if shape.moe is not None or shape.latent is not None:
        return None
    maps = [one for name, one in expected_shapes(shape).items() if ".layers." in name]
    return 2 * sum(math.prod(one) for one in maps if len(one) > 1)
