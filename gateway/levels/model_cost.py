"""What a model's tokens cost without running it: bytes of KV, and the time to compute them.

Both follow from the shape in the model's prepared card. The time is a lower bound: the arithmetic
of the weights at the rate of this machine's matrix products. `trunkline doctor` asks.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelError
from engine.model_store import Architecture, load_card

VALUE_BYTES = {"auto": 2, "bf16": 2, "fp32": 4, "int8": 1}
"""Bytes of a value of KV by `engine.kv_dtype`."""
SCALE_BYTES = {"int8": 2}
"""Bytes that a token's key or value of one head takes beside its values."""


def find_architecture(source: Path, models_dir: Path) -> Architecture | None:
    """Return the shape of a model that a server has prepared; None before its first start."""
    for path in sorted((models_dir / "prepared").glob("*/model_card.json")):
        try:
            card = load_card(path.parent)
        except ModelError:  # of another version, or damaged
            continue
        if card.source == str(source):
            return card.config
    return None


def has_windows(shape: Architecture) -> bool:
    """Return whether a layer reads only a window."""
    return any(layer.window for layer in shape.layers)


def kv_bytes_per_token(shape: Architecture, kv_dtype: str) -> int:
    """Return the bytes of one token's keys and values, or latents, in all layers."""
    parts = 2 if shape.latent is None else 1
    head_bytes = shape.head_dim * VALUE_BYTES[kv_dtype] + SCALE_BYTES.get(kv_dtype, 0)
    return parts * len(shape.layers) * shape.kv_heads * head_bytes


def weights_of(shape: Architecture) -> int:
    """Return how many weights a model's products have; norms and biases, below a thousandth of
    them, are left out."""
    latent, moe = shape.latent, shape.moe
    if latent is None:
        attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    else:
        queries, rank = shape.heads * (latent.nope + latent.rope), latent.query_rank
        attention = (queries + shape.hidden) * rank if rank else queries * shape.hidden
        attention += shape.hidden * (latent.rank + latent.rope + shape.heads * latent.value)
        attention += shape.heads * latent.rank * (latent.nope + latent.value)
    dense = 3 * shape.hidden * shape.intermediate
    experts = 0
    if moe is not None:
        inner = moe.experts * moe.intermediate + moe.shared_intermediate
        experts = shape.hidden * (moe.experts + 3 * inner)
    layers = sum(attention + (experts if one.ffn == "moe" else dense) for one in shape.layers)
    return layers + shape.vocab * shape.hidden * (1 if shape.tie_embeddings else 2)


def flops_per_token(shape: Architecture) -> int | None:
    """Return the products and sums of a prompt's token with the weights; None for experts."""
    if shape.moe is not None or shape.latent is not None:
        return None
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return 2 * len(shape.layers) * (attention + 3 * shape.hidden * shape.intermediate)
