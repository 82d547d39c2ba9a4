"""Builds a warmed-up runner on a GPU from a model card.

Models run in fused kernels under CUDA graphs; those with sizes that the kernels do not take run in
torch on the device. It knows no step. `engine.server.composition` calls `build_gpu_runner`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.attention.gpu_backend import lacks_latent_kernel
from engine.attention.interface import attention_spec, lacks_attention_windows
from engine.config import SPARE_SEATS, EngineConfig
from engine.errors import ModelError
from engine.kv.format import KvFormat, kv_format
from engine.kv.storage import KvPool, KvShards, KvStorage
from engine.lanes.crew import Crew
from engine.lanes.exchange import ExchangeSize, check_exchanges, exchanges
from engine.lanes.ops import LaneOps
from engine.lanes.sharding import sharing
from engine.model_store import Architecture, ModelCard
from engine.model_store.tensors import lane_architecture
from engine.models.decoder import DecoderModel
from engine.models.gpu_layers import GpuOps, gpu_form
from engine.runner.cpu_runner import build_runner
from engine.runner.gpu_runner import SCORED_ROWS, GpuRunner
from engine.runner.loaded_model import (
    LoadedModel,
    blocks_of,
    check_room_for_states,
    context_of,
)
from engine.runner.warmup import WarmupLimits
from engine.states.gpu_states import GpuStates, lacks_rule_kernel
from engine.states.layout import StateLayout
from engine.states.places import blocks_of_state
from engine.weights import Weights, load_shares

log = logging.getLogger("trunkline.engine")

HEAD_DIM_STEP, HEAD_DIM_MIN, HEAD_DIM_MAX = 8, 16, 256
"""Head dimensions of the kernels: multiples of the first, from the second to the third. With more
than 256 channels the keys of a tile do not fit shared memory."""

DRAFTED_TOKENS_MAX = 256
"""Tokens of the longest step that may verify drafts; its graph is captured at the start."""

GROUP_SIZE_MAX = 16
"""Most query heads per KV head: one token's group fills the smallest tile."""


def build_gpu_runner(card: ModelCard, config: EngineConfig) -> LoadedModel:
    """Load a model on the GPUs that `config.gpus` names, by default one, and warm it up. Raises
    ModelError.

    Memory: the weights as `config.weights` says, `kv_memory_mib` of blocks, and scratch. Several
    GPUs share weights and blocks evenly.
    """
    if not torch.cuda.is_available():
        raise ModelError(
            "unsupported", 'no CUDA device found; expected one, or engine.device = "auto"'
        )
    check_dtypes(config)
    devices = lane_devices(len(config.gpus), torch.cuda.device_count())
    lanes = len(devices)
    share = sharing(card.config, lanes)
    lacking = lacking_kernel(lane_architecture(card.config, lanes))
    if lacking and lanes > 1:
        raise ModelError("unsupported", f"engine.gpus names {lanes} GPUs: {lacking}")
    if lacking:
        log.warning("gpu_kernels_not_used: %s; steps run in torch on the GPU, slower", lacking)
        with out_of_memory_as_model_error(config.kv_memory_mib * 2**20, config.step_tokens_max):
            return build_runner(card, config, devices[0])
    context = context_of(card.config, config)
    kv_dtype = torch.int8 if config.kv_dtype == "int8" else torch.bfloat16
    kv_form = kv_format(card.config, kv_dtype, config.block_size, has_groups=True, lanes=lanes)
    states_bytes = states_of(card.config, config, kv_form)
    blocks = blocks_of(kv_form, config, states_bytes)
    limits = WarmupLimits(
        block_size=config.block_size, blocks=blocks, context=context, vocab=card.config.vocab,
        sequences=config.sequences_max, step_tokens=config.step_tokens_max,
        kv_groups=kv_form.blocks_per_run,
    )  # fmt: skip
    kv_bytes = blocks * kv_form.block_bytes + states_bytes
    with out_of_memory_as_model_error(kv_bytes, config.step_tokens_max):
        form = gpu_form(config.weights)
        weights = load_shares(card, torch.bfloat16, devices, form, share)
        runner, kv = assemble(
            card.config, weights, kv_form, blocks, devices, context=context,
            seats=config.sequences_max + SPARE_SEATS,
            tokens_max=config.step_tokens_max + config.sequences_max + card.config.run_up,
        )  # fmt: skip
        with torch.inference_mode():
            runner.warm_up(limits)
            is_drafting = config.speculation == "auto"
            draft_step_s = runner.time_steps(DRAFTED_TOKENS_MAX) if is_drafting else ()
    return LoadedModel(
        runner, kv, context, pipeline_depth=2, draft_step_s=draft_step_s,
        attention_lacks=lacks_attention_windows(card.config, kv_form),
        state_blocks=runner.state_blocks,
    )  # fmt: skip


def states_of(model: Architecture, config: EngineConfig, form: KvFormat) -> int:
    """Return the bytes of running sequences' states, which lie at the runner's seats beside the
    blocks. Raises ModelError `no_memory` where they leave no room for a kept one."""
    if not model.recurrent_layers:
        return 0
    lanes = max(1, len(config.gpus))
    layout = StateLayout(lane_architecture(model, lanes), torch.bfloat16)
    taken = (config.sequences_max + SPARE_SEATS + 1) * layout.bytes * lanes
    kept = 0 if model.run_up else blocks_of_state(layout, form.shard.block_bytes)
    check_room_for_states(model, kept, form, config, taken)
    return taken


def lane_devices(wanted: int, found: int) -> list[torch.device]:
    """Return the devices of an engine's lanes; `wanted` 0: one. Raises ModelError `unsupported` if
    there are fewer."""
    lanes = max(1, wanted)
    if found < lanes:
        raise ModelError(
            "unsupported", f"engine.gpus names {lanes} GPUs; CUDA finds {found}: expected as many"
        )
    return [torch.device("cuda", index) for index in range(lanes)]


def assemble(
    config: Architecture, weights: Sequence[Weights], form: KvFormat, blocks: int,
    devices: Sequence[torch.device], *, context: int, seats: int, tokens_max: int,
    dtype: torch.dtype = torch.bfloat16, graphs: bool = True,
) -> tuple[GpuRunner, KvPool]:  # fmt: skip
    """Return a runner over each lane's weights, which are removed, and its KV: blocks of `form`.

    `dtype`: of the weights. Raises ModelError if the devices cannot work together.
    """
    lanes = len(devices)
    shards = [KvStorage(form.shard, blocks, device) for device in devices]
    limits: dict[str, Any] = {
        "context": context, "seats": seats, "tokens_max": tokens_max, "graphs": graphs,
    }  # fmt: skip
    own = lane_architecture(config, lanes)
    states = [
        GpuStates(own, dtype, shard.data.device, seats, shard.data.view(torch.uint8).flatten(1))
        for shard in (shards if config.recurrent_layers else ())
    ]
    limits["states"] = states
    if lanes == 1:
        model = DecoderModel(config, weights[0], GpuOps(), *states)
        return GpuRunner(model, shards[0], **limits), shards[0]
    crew = Crew(devices)
    size = ExchangeSize(
        max(tokens_max, seats), config.hidden, max(seats, SCORED_ROWS), config.vocab // lanes
    )
    found = exchanges(crew, size, dtype)
    if devices[0].type == "cuda":
        check_exchanges(crew, found)
    models = [
        DecoderModel(own, share, LaneOps(exchange), kept)
        for share, exchange, kept in zip(weights, found, states or (None,) * lanes, strict=True)
    ]
    (first, *beside) = zip(models, shards, strict=True)

    def check_lanes() -> None:
        for number, exchange in enumerate(found):
            if exchange.has_failed:
                raise RuntimeError(f"GPU {number} waited in vain for another one of the engine")

    runner = GpuRunner(
        *first, **limits, vocab=config.vocab, crew=crew, beside=beside, check_lanes=check_lanes
    )
    return runner, KvShards(form, shards)


def lacking_kernel(model: Architecture) -> str:
    """Return why the fused kernels do not fit a model, or "" if they do."""
    spec = attention_spec(model)
    if lacking := lacks_rule_kernel(model):
        return lacking
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
