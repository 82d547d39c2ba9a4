"""Builds a warmed-up runner on a GPU from a model card.

Models run in fused kernels under CUDA graphs; those with sizes that the kernels do not take run in
torch on the device. It knows no step. `engine.server.composition` calls `build_gpu_runner`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.attention.gpu_backend import lacks_latent_kernel
from engine.attention.interface import attention_spec, lacks_attention_windows
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture, ModelCard
from engine.models.decoder import DecoderModel
from engine.models.gpu_layers import GpuOps, gpu_form
from engine.runner.cpu_runner import build_runner
from engine.runner.gpu_runner import SPARE_SEATS, GpuRunner
from engine.runner.loaded_model import LoadedModel, blocks_of, context_of
from engine.runner.warmup import WarmupLimits
from engine.weights import load_packed

log = logging.getLogger("trunkline.engine")

HEAD_DIM_STEP, HEAD_DIM_MIN, HEAD_DIM_MAX = 8, 16, 256
"""Head dimensions of the kernels: multiples of the first, from the second to the third. With more
than 256 channels the keys of a tile do not fit shared memory."""

GROUP_SIZE_MAX = 16
"""Most query heads per KV head: one token's group fills the smallest tile."""


def build_gpu_runner(card: ModelCard, config: EngineConfig) -> LoadedModel:
    """Load a model on the first GPU and warm it up. Raises ModelError.

    Memory: the weights as `config.weights` says, `kv_memory_mib` of blocks, and scratch.
    """
    if not torch.cuda.is_available():
        raise ModelError(
            "unsupported", 'no CUDA device found; expected one, or engine.device = "auto"'
        )
    check_dtypes(config)
    device = torch.device("cuda")
    lacking = lacking_kernel(card.config)
    if lacking:
        log.warning("gpu_kernels_not_used: %s; steps run in torch on the GPU, slower", lacking)
        with out_of_memory_as_model_error(config.kv_memory_mib * 2**20, config.step_tokens_max):
            return build_runner(card, config, device)
    context = context_of(card.config, config)
    kv_dtype = torch.int8 if config.kv_dtype == "int8" else torch.bfloat16
    kv_form = kv_format(card.config, kv_dtype, config.block_size, has_groups=True)
    blocks = blocks_of(kv_form, config)
    limits = WarmupLimits(
        block_size=config.block_size, blocks=blocks, context=context, vocab=card.config.vocab,
        sequences=config.sequences_max, step_tokens=config.step_tokens_max,
        kv_groups=kv_form.blocks_per_run,
    )  # fmt: skip
    with out_of_memory_as_model_error(blocks * kv_form.block_bytes, config.step_tokens_max):
        weights = load_packed(card, torch.bfloat16, device, gpu_form(config.weights))
        model = DecoderModel(card.config, weights, GpuOps())
        kv = KvStorage(kv_form, blocks, device)
        runner = GpuRunner(
            model, kv, context=context, seats=config.sequences_max + SPARE_SEATS,
            tokens_max=config.step_tokens_max + config.sequences_max,
        )  # fmt: skip
        with torch.inference_mode():
            runner.warm_up(limits)
    lacks = lacks_attention_windows(card.config, kv_form)
    return LoadedModel(runner, kv, context, pipeline_depth=2, attention_lacks=lacks)


def lacking_kernel(model: Architecture) -> str:
    """Return why the fused kernels do not fit a model, or "" if they do."""
    spec = attention_spec(model)
    if model.latent is not None:
        return lacks_latent_kernel(model.latent)
    if spec.head_dim % HEAD_DIM_STEP or not HEAD_DIM_MIN <= spec.head_dim <= HEAD_DIM_MAX:
        return (
            f"head_dim is {spec.head_dim}; kernels take multiples of {HEAD_DIM_STEP} from"
            f" {HEAD_DIM_MIN} to {HEAD_DIM_MAX}"
        )
    if spec.group_size > GROUP_SIZE_MAX:
        return f"{spec.group_size} query heads share a KV head; kernels take {GROUP_SIZE_MAX}"
    return ""


def check_dtypes(config: EngineConfig) -> None:
    """Raise ModelError `unsupported` for a dtype that the GPU does not run."""
    if "fp32" in (config.dtype, config.kv_dtype):
        raise ModelError(
            "unsupported",
            "the GPU cannot run this model: engine.dtype or engine.kv_dtype is fp32; expected bf16,"
            " or int8 of KV; use --device cpu",
        )


@contextmanager
def out_of_memory_as_model_error(kv_bytes: int, step_tokens: int) -> Iterator[None]:
    """Turn torch's out-of-memory error into ModelError `no_memory`, which names the settings to
    lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = (
            f"GPU memory is too small for the weights, {kv_bytes / 2**30:.1f} GiB of KV blocks and"
            f" steps of {step_tokens} tokens: lower engine.kv_memory_mib (or kv_blocks) or"
            " engine.step_tokens_max"
        )
        raise ModelError("no_memory", message) from error
