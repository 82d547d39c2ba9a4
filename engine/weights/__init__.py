"""Loading weights: GGUF and safetensors files in, named tensors out."""

from engine.weights.shapes import expected_shapes
from engine.weights.weights import Weights, load_weights, random_weights

__all__ = ["Weights", "expected_shapes", "load_weights", "random_weights"]
