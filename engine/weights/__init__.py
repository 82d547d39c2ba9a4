"""Loading weights: GGUF and safetensors files in, named tensors out."""

from engine.weights.shapes import expected_shapes
from engine.weights.weights import (
    Form,
    Tensors,
    Weights,
    load_packed,
    load_weights,
    random_pieces,
    random_weights,
)

__all__ = [
    "Form", "Tensors", "Weights", "expected_shapes", "load_packed", "load_weights",
    "random_pieces", "random_weights",
]  # fmt: skip
