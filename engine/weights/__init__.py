"""Loading weights: GGUF and safetensors files in, named tensors out."""

from engine.weights.freed_memory import give_back_freed
from engine.weights.weights import (
    Form,
    Share,
    Tensors,
    Weights,
    load_packed,
    load_shares,
    load_weights,
    random_pieces,
    random_weights,
)

__all__ = [
    "Form", "Share", "Tensors", "Weights", "give_back_freed", "load_packed", "load_shares",
    "load_weights", "random_pieces", "random_weights",
]  # fmt: skip
