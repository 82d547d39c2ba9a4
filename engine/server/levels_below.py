"""Builds the levels below an engine's device pool from its configuration: host memory, disk.

A level that cannot be had costs hits, never the start: the engine then runs without levels, and its
statistics say why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from engine.api import LevelName
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig, RemoteConfig
from engine.kv.copy_device import CudaDevice
from engine.kv.device_packing import gpu_packers_of
from engine.kv.device_transfer import DeviceTransferEngine
from engine.kv.format import KvFormat
from engine.kv.move_queue import DamagedSlotError
from engine.kv.near_pools import near_pools
from engine.kv.packing import (
    PackedFormat,
    PackedName,
    UnpackableError,
    compiled_kernels,
    packed_format,
    packers_of,
)
from engine.kv.pinned_memory import PinningError
from engine.kv.slot_formats import SizedPacker, copy_sizes
from engine.kv.storage import KvPool, KvStorage
from engine.kv.transfer import BlockPacker, CpuTransferEngine
from engine.levels.levels import Levels
from engine.moves import Move, SlotLayout, TransferEngine, stride_of
from engine.server.links.keeper_link import ListenSettings
from engine.server.links.peer_fetches import PeerFetches
from engine.statistics import LevelStats
from engine.storage.client import StorageClient, disk_settings
from engine.storage.memory.arena import HostArena
from engine.storage.memory.kept_memory import KeptMemory

log = logging.getLogger("trunkline.engine")

FAILED_LOG_S = 10.0
"""Seconds between two lines about moves that failed."""
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
    kv: KvPool,
    model_digest: str = "",
    host_fds: tuple[int, int] | None = None,
    now_s: float = 0.0,
    listen: ListenSettings | None = None,
) -> tuple[Levels | None, tuple[LevelStats, ...]]:
    """Return the configured levels; or None, with what statistics say of levels that are off.

    `kv`: the device's blocks. `host_fds`: the memory files that outlive the engine
    (`engine.client.host_memory`); without them host memory ends with it. `model_digest`: tells the
    model and the format of its KV. `listen`: the engine's name and certificate, where it may have
    peers. Raises nothing: a machine that gives no memory has no levels.
    """
    wanted, kv_format = config.levels, kv.format
    if not wanted.is_on:
        return None, ()
    if cache.states.blocks:
        return _off(wanted, "recurrent layers keep states, of which there are no copies")
    slots = wanted.arena_mib * 2**20 // kv_format.block_bytes
    groups = kv_format.blocks_per_run
    if slots < SLOTS_MIN * groups:
        size, least = kv_format.block_bytes, SLOTS_MIN * groups
        return _off(wanted, f"{slots} slots of {size} bytes; expected at least {least}")
    packed: dict[str, SizedPacker] = {
        name: one for name in FORMATS if (one := _packed(name, kv_format)) is not None
    }
    sizes = copy_sizes(kv_format, packed)
    layout = layout_of(slots * stride_of(sizes[0]), sizes, groups)
    kept: KeptMemory | None = None
    try:
        if host_fds is None:
            arena = HostArena.create(layout)
        else:
            names = list(packed)
            shape = f"{model_digest} {kv_format.name} {config.block_size} {sizes} {names}"
            kept = KeptMemory(*host_fds, layout, shape)
            arena = kept.arena
    except (OSError, ValueError) as error:
        return _off(wanted, f"no host memory: {error}")
    generation = 0 if kept is None else kept.generation
    transfer = _transfer_engine(kv, arena)
    storage = None
    off: tuple[LevelStats, ...] = ()
    if wanted.remote.shared and cache.windows.windows:
        reason = "shared copies of models with attention windows differ from run to run"
        off = (LevelStats("remote", "off", reason),)
        wanted = replace(wanted, remote=RemoteConfig())
    if wanted.disk_gib > 0:
        run_tokens = config.block_size
        what = wanted, arena, sizes, run_tokens, generation, model_digest
        storage = StorageClient(disk_settings(*what))
    peers = None if listen is None else _peers_of(listen, cache, kv, model_digest, arena)
    levels = Levels(
        cache,
        wanted,
        transfer,
        storage,
        close_memory=arena.close if kept is None else kept.close,
        wipe=arena.wipe,
        kept=kept,
        now_s=now_s,
        peers=peers,
        near=peers,
        pools=None if peers is None else peers.pools,
        view=arena.view,
    )
    return levels, off


def _peers_of(
    listen: ListenSettings, cache: PrefixCache, kv: KvPool, model_digest: str, arena: HostArena
) -> PeerFetches:
    """Return the other engines, with the pools of those on this host where they can be read."""
    pools = None if cache.windows.windows else near_pools(kv)
    return PeerFetches(listen.name, listen.tls, model_digest, arena.view, pools)


def _transfer_engine(kv: KvPool, arena: HostArena) -> TransferEngine:
    """Return what copies between the blocks and the arena."""
    failures = FailedMoveLog()
    if isinstance(kv, KvStorage) and not kv.data.is_cuda:
        packers: dict[str, BlockPacker] = {**packers_of(kv, compiled_kernels(), FORMATS)}
        return CpuTransferEngine(kv, arena, packers=packers, on_error=failures.note)
    return DeviceTransferEngine(
        kv,
        arena,
        [CudaDevice(shard.data.device) for shard in kv.shards],
        packers=gpu_packers_of(kv, FORMATS),
        on_error=failures.note,
        on_unpinned=failures.note_unpinned,
    )


class FailedMoveLog:
    """Logs moves that failed: the first one, and then one in a while, with how many there were.

    Damaged and unpackable copies are counted and reported elsewhere. Any thread calls it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = 0
        self._next_at_s = float("-inf")

    def note(self, move: Move, error: Exception) -> None:
        """Note a move that failed."""
        if isinstance(error, (DamagedSlotError, UnpackableError, PinningError)):
            return
        self._since += 1
        if self._clock() >= self._next_at_s:
            self._next_at_s = self._clock() + FAILED_LOG_S
            what = f"{move.kind} of block {move.block}, slot {move.slot}"
            log.warning("kv_move_failed: %s: %s; %d such moves", what, error, self._since)
            self._since = 0

    def note_unpinned(self, size: int, error: Exception) -> None:
        """Note memory that is not used, since it could not be pinned."""
        log.warning("kv_memory_not_pinned: %d MiB of host memory: %s", size // 2**20, error)


def _packed(name: PackedName, kv_format: KvFormat) -> PackedFormat | None:
    """Return a packed format of the pool's shards; None if it does not fit them."""
    try:
        return packed_format(name, kv_format.shard)
    except ValueError:
        return None


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
