"""The registry of model architectures: architecture name → constructors.

`engine.runner` builds models through it. To add an architecture, write its class in this folder and
enter the constructor here.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import LayerAttention
from engine.errors import ModelError
from engine.kv.storage import KvStorage
from engine.model_store import ModelConfig
from engine.models.cpu_llama import CpuLlama, Kernels
from engine.models.interface import Model, ModelConstructor
from engine.models.layers import Ops
from engine.models.llama import LlamaModel
from engine.weights import Weights

ARCHITECTURES: dict[str, ModelConstructor] = {"llama": LlamaModel, "mistral": LlamaModel}
"""Models that run layer by layer, on the CPU in torch or on a GPU."""

CpuModelConstructor = Callable[[ModelConfig, Weights, Kernels, KvStorage, int], Model[CpuAttention]]
"""Builds a model that runs in C, from its config, weights, kernels, KV and context length."""

CPU_ARCHITECTURES: dict[str, CpuModelConstructor] = {"llama": CpuLlama, "mistral": CpuLlama}
"""Models that run a whole step in the C kernels."""


def build_model(config: ModelConfig, weights: Weights, ops: Ops) -> Model[LayerAttention]:
    """Build the model of a config over its weights. Raises ModelError for an unknown
    architecture."""
    check_architecture(config)
    return ARCHITECTURES[config.architecture](config, weights, ops)


def build_cpu_model(
    config: ModelConfig, weights: Weights, kernels: Kernels, kv: KvStorage, context: int
) -> Model[CpuAttention]:
    """Build the model that runs in C. Raises ModelError for an unknown architecture."""
    check_architecture(config)
    return CPU_ARCHITECTURES[config.architecture](config, weights, kernels, kv, context)


def check_architecture(config: ModelConfig) -> None:
    """Raise ModelError `unsupported` where no constructor is known for the architecture."""
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            "unsupported",
            f"unsupported architecture: {config.architecture!r}; expected one of {known}",
        )
