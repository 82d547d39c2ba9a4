"""The families of models that run: each is a function from its config to an `Architecture`."""

from engine.model_store.families.families import (
    FAMILIES,
    LAYERS_MAX,
    Family,
    architecture_of,
    unsupported_family,
)

__all__ = ["FAMILIES", "LAYERS_MAX", "Family", "architecture_of", "unsupported_family"]
