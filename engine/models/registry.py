"""Builds models: the decoder that runs layer by layer, or the one that runs a whole step in C.

`engine.runner` builds models through it.
"""

from __future__ import annotations

from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import LayerAttention
from engine.kv.storage import KvStorage
from engine.model_store import Architecture
from engine.models.cpu_llama import CpuLlama, Kernels
from engine.models.decoder import DecoderModel
from engine.models.interface import Model
from engine.models.layers import Ops
from engine.weights import Weights


def build_model(config: Architecture, weights: Weights, ops: Ops) -> Model[LayerAttention]:
    """Build the model of a config over its weights, in torch or on a GPU by `ops`."""
    return DecoderModel(config, weights, ops)


def build_cpu_model(
    config: Architecture, weights: Weights, kernels: Kernels, kv: KvStorage, context: int
) -> Model[CpuAttention]:
    """Build the model that runs in C, for architectures that `load_kernels` accepts."""
    return CpuLlama(config, weights, kernels, kv, context)
