"""Builds the levels below an engine's device pool from its configuration: host memory, disk.

A level that cannot be had costs hits, never the start: the engine then runs without levels, and its
statistics say why.
"""

from __future__ import annotations

from engine.api import LevelStats
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.kv.format import KvFormat
from engine.kv.storage import KvStorage
from engine.kv.transfer import CpuTransferEngine
from engine.levels.levels import Levels
from engine.storage.arena import HostArena
from engine.storage.client import StorageClient, disk_settings
from engine.storage.kept_memory import KeptMemory

SLOTS_MIN = 8
"""Fewer slots of host memory hold no prefix that is worth a load."""


def build_levels(
    cache: PrefixCache,
    config: EngineConfig,
    kv_format: KvFormat,
    kv: KvStorage | None,
    *,
    model_digest: str = "",
    host_fds: tuple[int, int] | None = None,
    now_s: float = 0.0,
) -> tuple[Levels | None, tuple[LevelStats, ...]]:
    """Return the configured levels; or None, with what statistics say of levels that are off.

    `kv`: the device's blocks, None where no transfer engine reaches them. `host_fds`: the memory
    files that outlive the engine (`engine.client.host_memory`); without them host memory ends with
    it. `model_digest`: tells the model and the format of its KV. Raises nothing: a machine that
    gives no memory has no levels.
    """
    wanted = config.levels
    if not wanted.is_on:
        return None, ()
    slots = (wanted.host_mib or wanted.stage_mib) * 2**20 // kv_format.block_bytes
    if kv_format.windows:
        return None, _off(f"the model has windows of {kv_format.windows} tokens")
    if kv is None:
        return None, _off("no transfer engine reaches this device's memory")
    if slots < SLOTS_MIN:
        return None, _off(f"{slots} slots of {kv_format.block_bytes} bytes; at least {SLOTS_MIN}")
    kept: KeptMemory | None = None
    try:
        if host_fds is None:
            arena = HostArena.create(slots, kv_format.block_bytes)
        else:
            shape = f"{model_digest} {kv_format.name} {config.block_size}"
            kept = KeptMemory.open(*host_fds, slots, kv_format.block_bytes, shape)
            arena = kept.arena
    except (OSError, ValueError) as error:
        return None, _off(f"no host memory: {error}")
    generation = 0 if kept is None else kept.generation
    transfer = CpuTransferEngine(kv, arena)
    storage = None
    if wanted.disk_gib > 0:
        storage = StorageClient(disk_settings(wanted, arena, config.block_size, generation))
    levels = Levels(
        cache,
        wanted,
        transfer,
        storage,
        close_memory=arena.close if kept is None else kept.close,
        wipe=arena.wipe,
        kept=kept,
        now_s=now_s,
    )
    return levels, ()


def _off(reason: str) -> tuple[LevelStats, ...]:
    return (LevelStats("host", "off", reason),)
