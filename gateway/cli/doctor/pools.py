"""What `trunkline doctor` says of the device's KV pool: how many tokens it holds, and in how many
bits."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.model_store import Architecture
from gateway.cli.doctor.check import Check
from gateway.config import Config
from gateway.engines.device_memory import runs_on_device
from gateway.levels.model_cost import (
    find_card,
    has_windows,
    kv_bytes_per_token,
    running_states_bytes,
)


def check_pools(config: Config) -> list[Check]:
    """Return a finding for each model that a server has prepared."""
    found = []
    for model in config.served_models():
        card = find_card(model.source, config.models_dir)
        if card is not None:
            name = f"KV pool {model.name}".strip()
            found.append(check_pool(name, card.config, config.engine_of(model)))
    return found


def check_pool(name: str, shape: Architecture, engine: EngineConfig) -> Check:
    """Return the finding on one engine's pool."""
    is_int8 = engine.kv_dtype == "int8"
    if is_int8 and shape.latent is not None:
        text = f"engine.kv_dtype is int8, and {shape.family} keeps latents: the engine cannot start"
        return Check(name, False, text, 'set engine.kv_dtype to "auto"')
    token_bytes = kv_bytes_per_token(shape, engine.kv_dtype)
    run_bytes = token_bytes * engine.block_size
    states_bytes = running_states_bytes(shape, engine) if runs_on_device(engine) else 0
    left_bytes = engine.kv_memory_mib * 2**20 - states_bytes
    if left_bytes < run_bytes and not engine.kv_blocks:
        text = (
            f"engine.kv_memory_mib is {engine.kv_memory_mib}, and states of running sequences take"
            f" {states_bytes / 2**20:,.0f}: the engine cannot start"
        )
        return Check(name, False, text, "raise engine.kv_memory_mib or lower engine.sequences_max")
    runs = engine.kv_blocks or left_bytes // run_bytes
    text = (
        f"{'at least ' if has_windows(shape) else ''}{runs * engine.block_size:,} tokens of"
        f" {token_bytes:,} B; {2**30 // run_bytes * engine.block_size:,} a GiB"
    )
    if is_int8:
        text += "; KV of 8 bits, so answers are near and not exact"
    return Check(name, True, text)
