"""From a model's card to a GPU runner that has taken its first steps, or why there is none.

`service` calls it. It knows no step: the runner it builds does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kv.storage import KvStorage, kv_format
from engine.model_store import ModelCard, ModelConfig
from engine.models.gpu_layers import GpuOps
from engine.models.registry import build_model
from engine.runner.gpu_runner import SPARE_SEATS, GpuRunner
from engine.runner.loaded_model import LoadedModel
from engine.runner.warmup import WarmupLimits
from engine.weights import load_weights

HEAD_DIMS = (16, 32, 64, 128)
"""Powers of two: a tile's columns; and of 256 the big tiles' keys find no room."""

SHARERS_MAX = 16
"""Query heads to a KV head: one row of them is the smallest tile."""


def build_device_runner(card: ModelCard, config: EngineConfig) -> LoadedModel:
    """Load the model on the first GPU and take its first steps. Raises ModelError.

    Memory: the weights in bf16, blocks for what `kv_memory_mib` says, and scratch.
    """
    if not torch.cuda.is_available():
        raise ModelError("unsupported", "There is no CUDA device here; use --device cpu.")
    check_shape(card.config, config)
    device = torch.device("cuda")
    context = min(card.config.context, config.context_tokens_max or card.config.context)
    form = kv_format(card.config, torch.bfloat16, config.block_size)
    blocks = config.kv_blocks or max(1, config.kv_memory_mib * 2**20 // form.block_bytes)
    limits = WarmupLimits(
        block_size=config.block_size, blocks=blocks, context=context, vocab=card.config.vocab,
        sequences=config.sequences_max, step_tokens=config.step_tokens_max,
    )  # fmt: skip
    with fitting(blocks * form.block_bytes, config.step_tokens_max):
        weights = load_weights(card, torch.bfloat16, device)
        model = build_model(card.config, weights, GpuOps())
        kv = KvStorage(form, blocks, torch.bfloat16, device)
        runner = GpuRunner(
            model, kv, context=context, seats=config.sequences_max + SPARE_SEATS,
            tokens_max=config.step_tokens_max + config.sequences_max,
        )  # fmt: skip
        with torch.inference_mode():
            runner.warm_up(limits)
    return LoadedModel(runner, form, blocks, context, device="cuda", pipeline_depth=2)


def check_shape(model: ModelConfig, config: EngineConfig) -> None:
    """Are there kernels for it? Raises ModelError for what the CPU alone can compute."""
    sharers = model.heads // model.kv_heads
    if model.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        reason = f"it takes heads of {sizes} values, and this model's have {model.head_dim}"
    elif sharers > SHARERS_MAX:
        reason = (
            f"at most {SHARERS_MAX} query heads share a KV head there, and in this model {sharers}"
        )
    elif "fp32" in (config.dtype, config.kv_dtype):
        reason = "it computes and keeps KV in bf16 alone, and engine.dtype or kv_dtype is fp32"
    else:
        return
    raise ModelError("unsupported", f"The GPU cannot run this: {reason}. Use --device cpu.")


@contextmanager
def fitting(kv_bytes: int, step_tokens: int) -> Iterator[None]:
    """What is put on the device here has room there. Raises ModelError where it has not."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = (
            f"The GPU's memory does not hold the weights, {kv_bytes / 2**30:.1f} GiB of KV blocks"
            f" and steps of {step_tokens} tokens: lower engine.kv_memory_mib (or kv_blocks), or"
            " engine.step_tokens_max."
        )
        raise ModelError("no_memory", message) from error
