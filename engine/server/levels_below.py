"""Builds the levels below an engine's device pool from its configuration: host memory, disk.

A level that cannot be had costs hits, never the start: the engine then runs without levels, and its
statistics say why.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import LevelName, LevelStats
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig
from engine.kv.format import KvFormat
from engine.kv.packing import PackedName, compiled_kernels, packers_of
from engine.kv.storage import KvStorage
from engine.kv.transfer import BlockPacker, CpuTransferEngine
from engine.levels.levels import Levels
from engine.moves import SlotLayout, stride_of
from engine.storage.arena import HostArena
from engine.storage.client import StorageClient, disk_settings
from engine.storage.kept_memory import KeptMemory

SLOTS_MIN = 8
"""Fewer slots of host memory hold no prefix that is worth a load."""
SLAB_BLOCKS, SLAB_BLOCKS_MIN = range(8, 17), 2
"""Blocks that a slab may hold as they are: the number that wastes least in all formats. Fewer where
there would be few slabs."""
SLABS_MIN = 8
"""Slabs that memory is cut into, at least: copies of several formats pass through it at once."""
FORMATS: tuple[PackedName, ...] = ("int8c", "int4c")
"""The packed formats that copies may have: one for each fidelity that is not exact."""


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
    if kv is None:
        return _off(wanted, "no transfer engine reaches this device's memory")
    slots_min = SLOTS_MIN * kv_format.blocks_per_run
    if slots < slots_min:
        size = kv_format.block_bytes
        return _off(wanted, f"{slots} slots of {size} bytes; expected at least {slots_min}")
    packers: dict[str, BlockPacker] = {**packers_of(kv, compiled_kernels(), FORMATS)}
    sizes = [kv_format.block_bytes, *(one.block_bytes for one in packers.values())]
    if (groups := kv_format.blocks_per_run) > 1:
        sizes.insert(1, groups * kv_format.block_bytes)
    layout = layout_of(slots * stride_of(sizes[0]), sizes, groups)
    kept: KeptMemory | None = None
    try:
        if host_fds is None:
            arena = HostArena.create(layout)
        else:
            shape = f"{model_digest} {kv_format.name} {config.block_size} {sizes} {list(packers)}"
            kept = KeptMemory.open(*host_fds, layout, shape)
            arena = kept.arena
    except (OSError, ValueError) as error:
        return _off(wanted, f"no host memory: {error}")
    generation = 0 if kept is None else kept.generation
    transfer = CpuTransferEngine(kv, arena, packers=packers)
    storage = None
    if wanted.disk_gib > 0:
        run_tokens = config.block_size
        storage = StorageClient(disk_settings(wanted, arena, sizes, run_tokens, generation))
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


def layout_of(memory_bytes: int, sizes: Sequence[int], groups: int = 1) -> SlotLayout:
    """Return how memory is cut into slabs for copies of these sizes, the pool's own first.

    `groups`: KV groups, whose blocks some copies have; a slab holds a number of such copies.
    """
    strides = [stride_of(size) for size in sizes]

    def waste(blocks: int) -> float:
        slab = blocks * strides[0]
        return max(slab % stride / slab for stride in strides)

    most = min(SLAB_BLOCKS[-1], memory_bytes // strides[0] // SLABS_MIN)
    least = SLAB_BLOCKS[0] if most >= SLAB_BLOCKS[0] else SLAB_BLOCKS_MIN
    sizes_of_slabs = range(least, max(most, least) + 1)
    whole = [blocks for blocks in sizes_of_slabs if blocks % groups == 0] or [groups]
    blocks = min(whole, key=waste)
    return SlotLayout(memory_bytes, blocks * strides[0], min(sizes))


def _off(config: LevelsConfig, reason: str) -> tuple[None, tuple[LevelStats, ...]]:
    """Return no levels, and each configured one as off for this reason."""
    wanted: dict[LevelName, bool] = {
        "host": True,
        "disk": config.disk_gib > 0,
        "remote": bool(config.remote.url),
    }
    return None, tuple(LevelStats(name, "off", reason) for name, is_on in wanted.items() if is_on)
