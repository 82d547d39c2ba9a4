"""What the levels count for their statistics, and the statistics of each level.

They are put together from what the parts count by themselves. `levels` puts them together; the
scheduler and core count here what they alone see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from engine.api import LevelName, Payer
from engine.levels.copy_formats import OWN
from engine.levels.disk.disk_level import DiskLevel
from engine.levels.load_choice import LevelPace, LoadChoice, NotLoaded
from engine.levels.loads import Loads
from engine.levels.offloading import Offloading
from engine.levels.peers.fetching import PeerFetching
from engine.levels.places import RunPlaces
from engine.levels.restarts.recovery import DropReason, Recovery
from engine.moves import RemoteStats
from engine.statistics import FidelityBytes, LevelStats, PayerBytes


class LevelCounts:
    """Totals by level: cached tokens of requests that were loaded, choices between loading and
    computing, and prompts that were not loaded as far as the level had them, by why. `uncopied`:
    blocks that were evicted without a copy.
    """

    def __init__(self, loads: Loads, paces: Mapping[LevelName, LevelPace]) -> None:
        self.loaded_tokens: Counter[LevelName] = Counter()
        self.chosen: Counter[LevelName] = Counter()
        self.declined: Counter[LevelName] = Counter()
        self.uncopied = 0
        self._not_loaded: Counter[tuple[LevelName, NotLoaded]] = Counter()
        self._loads, self._paces = loads, paces

    def choose(self, level: LevelName, choice: LoadChoice) -> None:
        """Count a choice about a prompt of which a level has the next run."""
        (self.chosen if choice.blocks else self.declined)[level] += 1
        if choice.why is not None:
            self.miss(level, choice.why)

    def miss(self, level: LevelName, why: NotLoaded) -> None:
        """Count a prompt that is not loaded as far as a level has it."""
        self._not_loaded[level, why] += 1

    def started(self, loaded_tokens: Iterable[tuple[LevelName, int]]) -> None:
        """Count the cached tokens of a request that starts which were loaded for it, so that those
        of all levels and the device add up to all cached tokens.
        """
        for name, tokens in loaded_tokens:
            self.loaded_tokens[name] += tokens

    def _why(self, level: LevelName) -> dict[str, int]:
        return {why: count for (name, why), count in self._not_loaded.items() if name == level}

    def of_host(
        self,
        places: RunPlaces,
        offloading: Offloading,
        promised: Counter[Payer],
        recovery: Recovery | None,
        unusable_bytes: int,
    ) -> LevelStats:
        """Return the statistics of host memory. `promised`: blocks whose promises it keeps, by
        payer; `recovery`: where it outlives the engine; `unusable_bytes`: no room, though it is
        there. O(payers)."""
        pool, notes, loads = places.accounts.pool, places.notes, self._loads
        size, pace = pool.formats[OWN].slot_bytes, self._paces["host"]
        dropped = Counter[DropReason]() if recovery is None else recovery.dropped
        return LevelStats(
            name="host",
            state="open",
            reason=f"{unusable_bytes:,} bytes of it could not be pinned" if unusable_bytes else "",
            capacity_bytes=max(0, places.accounts.capacity_bytes - unusable_bytes),
            used_bytes=pool.used_bytes,
            promised_bytes=promised.total() * size,
            blocks=pool.used,
            offloaded_total=offloading.offloaded,
            loaded_total=loads.loaded_blocks["host"],
            failed_total=offloading.failed + loads.failed["host"],
            damaged_total=loads.damaged["host"],
            dropped_total=places.accounts.dropped_total,
            expired_total=places.expired_total,
            loaded_tokens_total=self.loaded_tokens["host"],
            regret_s_total=pace.regret_s,
            bytes_per_s=pace.bytes_per_s,
            chosen_total=self.chosen["host"],
            declined_total=self.declined["host"],
            not_loaded=self._why("host"),
            uncopied_total=self.uncopied,
            recovered_total=0 if recovery is None else recovery.recovered,
            torn_total=dropped["torn"],
            orphaned_total=dropped["orphaned"],
            lapsed_total=dropped["expired"],
            unnoted_total=0 if notes is None else notes.unnoted_total,
            payers=tuple(
                PayerBytes(share.payer, share.used, promised[share.payer] * size)
                for share in places.accounts.shares()
                if share.used
            ),
            copies=tuple(
                FidelityBytes(form.fidelity, count, count * form.slot_bytes)
                for form, count in zip(pool.formats, pool.used_slots, strict=True)
                if count
            ),
        )

    def of_disk(self, level: DiskLevel, erasures: int) -> LevelStats:
        """Return the statistics of the disk. `erasures`: those it has not confirmed. O(1)."""
        disk, loads, pace = level.stats, self._loads, self._paces["disk"]
        return LevelStats(
            name="disk",
            state=disk.state,
            reason=disk.reason,
            capacity_bytes=disk.capacity_bytes,
            used_bytes=disk.used_bytes,
            promised_bytes=disk.promised_bytes,
            blocks=disk.records,
            loaded_total=loads.loaded_blocks["disk"],
            stored_total=level.storing.stored,
            fetched_total=loads.fetched,
            failed_total=level.storing.failed + loads.failed["disk"],
            damaged_total=disk.damaged_total,
            dropped_total=disk.dropped_total,
            expired_total=disk.expired_total,
            loaded_tokens_total=self.loaded_tokens["disk"],
            regret_s_total=pace.regret_s,
            bytes_per_s=disk.read_bytes_per_s or pace.bytes_per_s,
            written_bytes_today=disk.written_bytes_today,
            written_bytes_total=disk.written_bytes_total,
            chosen_total=self.chosen["disk"],
            declined_total=self.declined["disk"],
            not_loaded=self._why("disk"),
            pending_erasures=erasures,
            payers=disk.payers,
            copies=disk.copies,
        )

    def of_remote(self, remote: RemoteStats, fetching: PeerFetching | None = None) -> LevelStats:
        """Return the statistics of the remote store; `fetching`: from one that replicas share."""
        loads, pace = self._loads, self._paces["remote"]
        chosen, declined = self.chosen["remote"], self.declined["remote"]
        not_loaded = self._why("remote")
        if fetching is not None:
            pace, not_loaded = fetching.pace, fetching.misses
            declined = sum(not_loaded.get(why, 0) for why in ("no_room", "slower", "paused"))
            chosen = fetching.begun_total - declined
        return LevelStats(
            name="remote",
            state=remote.state,
            reason=remote.reason,
            capacity_bytes=remote.capacity_bytes,
            used_bytes=remote.used_bytes,
            blocks=remote.records,
            loaded_total=loads.loaded_blocks["remote"],
            stored_total=remote.stored_total,
            fetched_total=remote.fetched_total,
            failed_total=remote.failed_total,
            damaged_total=remote.damaged_total,
            dropped_total=remote.dropped_total,
            loaded_tokens_total=self.loaded_tokens["remote"],
            regret_s_total=pace.regret_s,
            bytes_per_s=remote.read_bytes_per_s or pace.bytes_per_s,
            written_bytes_total=remote.written_bytes_total,
            chosen_total=chosen,
            declined_total=declined,
            not_loaded=not_loaded,
            pending_erasures=remote.pending_erasures,
        )
