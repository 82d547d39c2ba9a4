"""Finding, fetching and preparing models, without torch: the gateway reads prepared folders too."""

from engine.model_store.card import ModelCard, ModelConfig, RopeScaling, load_card
from engine.model_store.catalogue import CATALOGUE, DEFAULT_MODEL, pull, resolve
from engine.model_store.prepare import prepare

__all__ = [
    "CATALOGUE",
    "DEFAULT_MODEL",
    "ModelCard",
    "ModelConfig",
    "RopeScaling",
    "load_card",
    "prepare",
    "pull",
    "resolve",
]
