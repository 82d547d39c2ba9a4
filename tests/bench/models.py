"""Models that benchmarks run: the default one from this disk, and shapes with random weights.

Speed does not depend on the weights' values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from engine.config import WeightsKind
from engine.kv.format import KvFormat
from engine.kv.storage import KvStorage
from engine.model_store import (
    CATALOGUE,
    DEFAULT_MODEL,
    Architecture,
    Layer,
    ModelCard,
    Rope,
    prepare,
    resolve,
)
from engine.model_store.families import architecture_of
from engine.models.gpu_layers import gpu_form
from engine.weights import random_pieces
from kernels import reference_int8
from kernels.reference_weights import Weight, to_int4

BLOCK = 16
LONG_CONTEXT = 32_768 + 256
VOCAB = 100_000
"""Token ids that every shape for a GPU has."""
KV_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}

SMOLLM2_135M = Architecture(
    family="llama", layers=(Layer(),) * 30, hidden=576, intermediate=1536, heads=9, kv_heads=3,
    head_dim=64, vocab=49_152, context=4096, ropes={"full": Rope(1e5, 64)}, tie_embeddings=True,
)  # fmt: skip
LLAMA_8B = Architecture(
    family="llama", layers=(Layer(),) * 32, hidden=4096, intermediate=14_336, heads=32, kv_heads=8,
    head_dim=128, vocab=128_256, context=16_384, ropes={"full": Rope(500_000.0, 128)},
)  # fmt: skip
LLAMA_70B = Architecture(
    family="llama", layers=(Layer(),) * 80, hidden=8192, intermediate=28_672, heads=64, kv_heads=8,
    head_dim=128, vocab=128_256, context=16_384, ropes={"full": Rope(500_000.0, 128)},
)  # fmt: skip
LLAMA_1B = Architecture(
    family="llama", layers=(Layer(),) * 16, hidden=2048, intermediate=8192, heads=32, kv_heads=8,
    head_dim=64, vocab=128_256, context=16_384, ropes={"full": Rope(500_000.0, 64)},
    tie_embeddings=True,
)  # fmt: skip
QWEN3_8B = Architecture(
    family="qwen3", layers=(Layer(),) * 36, hidden=4096, intermediate=12_288, heads=32, kv_heads=8,
    head_dim=128, vocab=151_936, context=LONG_CONTEXT, ropes={"full": Rope(1e6, 128)},
    qk_norm="head",
)  # fmt: skip
GEMMA3_12B = Architecture(
    family="gemma3_text", layers=((Layer(window=1024),) * 5 + (Layer(),)) * 8, hidden=3840,
    intermediate=15_360, heads=16, kv_heads=8, head_dim=256, vocab=262_208, context=LONG_CONTEXT,
    ropes={"full": Rope(1e6, 256)}, qk_norm="head", place="sandwich", activation="gelu_tanh",
    embed_scale=3840**0.5, score_scale=256**-0.5, tie_embeddings=True,
)  # fmt: skip
GPT_OSS_20B = architecture_of(
    {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880,
        "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 201_088, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128,
        "num_local_experts": 32, "num_experts_per_tok": 4, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }
)  # fmt: skip
GPT_OSS_WITHOUT_EXPERTS = replace(
    GPT_OSS_20B,
    layers=tuple(replace(layer, ffn="dense") for layer in GPT_OSS_20B.layers),
    moe=None,
    context=LONG_CONTEXT,
)
QWEN3_30B_A3B = architecture_of(
    {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
        "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    }
)  # fmt: skip
QWEN35_35B_A3B = architecture_of(
    {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048,
        "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "vocab_size": 248_320, "max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-6, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "hidden_act": "silu", "tie_word_embeddings": False, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    }
)  # fmt: skip
V2_LITE = architecture_of(
    {
        "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048,
        "intermediate_size": 10_944, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 102_400, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "norm_topk_prob": False,
    }
)  # fmt: skip


def with_layers(shape: Architecture, count: int) -> Architecture:
    """Return a shape with its first `count` layers alone."""
    return replace(shape, layers=shape.layers[:count])


def packed_weights(
    shape: Architecture, kind: WeightsKind | Literal["int4"], device: torch.device | None = None
) -> dict[str, Weight]:
    """Return random weights on the GPU, in the form in which an engine with `engine.weights` of
    this kind has them; "int4": as of a file of 4 bits in groups of 128."""
    form = gpu_form("auto" if kind == "int4" else kind)
    pieces = random_pieces(shape, torch.bfloat16, 0, device or torch.device("cuda"))
    if kind == "int4":
        pieces = (
            (
                n,
                to_int4(w, 128)
                if n.endswith("_proj.weight") and isinstance(w, torch.Tensor)
                else w,
            )
            for n, w in pieces
        )
    return {name: form(name, weight) for name, weight in pieces}


def default_card(name: str = DEFAULT_MODEL, models: Path | None = None) -> ModelCard:
    """Return the card of the default model or another one, prepared in `models`. Raises
    ModelError."""
    models = models or Path(os.environ.get("TRUNKLINE_DATA_DIR", "data")) / "models"
    return prepare(name if name in CATALOGUE else Path(name).name, resolve(name, models), models)


def random_kv(form: KvFormat, blocks: int, device: torch.device) -> KvStorage:
    """Return a pool of noise."""
    kv = KvStorage(form, blocks, device)
    if form.is_int8:
        units = kv.data.flatten(-2)
        units.random_(-127, 128)
        reference_int8.scales_of(units).fill_(0.02)
        return kv
    for start in range(0, blocks, 256):  # normal_ on all of it would need as much again
        kv.data[start : start + 256].normal_()
    return kv
