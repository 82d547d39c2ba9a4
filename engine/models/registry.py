"""Which class builds which architecture."""

from __future__ import annotations

from engine.errors import ModelError
from engine.model_store import ModelConfig
from engine.models.layers import Ops
from engine.models.llama import LlamaModel
from engine.weights import Weights

BUILDERS = {"llama": LlamaModel, "mistral": LlamaModel}


def build_model(config: ModelConfig, weights: Weights, ops: Ops) -> LlamaModel:
    """The model of a config over its weights. Raises ModelError for an unknown architecture."""
    builder = BUILDERS.get(config.architecture)
    if builder is None:
        known = ", ".join(sorted(BUILDERS))
        raise ModelError(
            "unsupported", f"Architecture {config.architecture!r}; supported are {known}."
        )
    return builder(config, weights, ops)
