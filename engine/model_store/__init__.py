"""Finding, fetching and preparing models, without torch: the gateway reads prepared folders too."""

from engine.model_store.architecture import Architecture, Layer, Moe, Rope
from engine.model_store.card import ModelCard, load_card
from engine.model_store.catalogue import (
    CATALOGUE,
    DEFAULT_ENCODER,
    DEFAULT_MODEL,
    pull,
    resolve,
    size_mib,
)
from engine.model_store.prepare import prepare, read_model
from engine.model_store.tensors import expected_shapes

__all__ = [
    "CATALOGUE",
    "DEFAULT_ENCODER",
    "DEFAULT_MODEL",
    "Architecture",
    "Layer",
    "ModelCard",
    "Moe",
    "Rope",
    "expected_shapes",
    "load_card",
    "prepare",
    "pull",
    "read_model",
    "resolve",
    "size_mib",
]
