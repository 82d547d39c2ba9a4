"""Metrics of the levels of the cache, from the engine's last heartbeat.

Without levels below the device only the device's series exist. Counters start again with each
engine process, as those of `gateway.observability.metrics` do.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.statistics import LevelStats, Stats

_BYTES = {
    "bytes": ("capacity_bytes", "Room of a level: free and used."),
    "used_bytes": ("used_bytes", "Bytes that copies take on a level."),
    "promised_bytes": ("promised_bytes", "Bytes on a level that are promised."),
}
_COUNTERS = {
    "cached_tokens_by_level": ("loaded_tokens_total", "Cached prompt tokens, by where they were."),
    "load_regret_seconds": (
        "regret_s_total",
        "Time lost by loads that took longer than computing would have.",
    ),
    "damaged": ("damaged_total", "Copies whose bytes were not those that were written."),
    "failed_moves": ("failed_total", "Moves of copies that failed."),
    "level_dropped_blocks": ("dropped_total", "Copies given up for room."),
    "level_expired_blocks": ("expired_total", "Copies that ended with their retention."),
}


class LevelMetrics(Collector):
    """The metrics of all levels; `stats`: the latest heartbeat. `pending_receipts`: receipts of
    erasures that a level has not confirmed, of which one that is away knows nothing."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.pending_receipts = 0

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        stats, below = self.stats, self.stats.levels
        for name, (field, text) in _BYTES.items():
            family = GaugeMetricFamily(f"trunkline_level_{name}", text, labels=("level",))
            for one in below:
                family.add_metric((one.name,), getattr(one, field))
            yield family
        free = GaugeMetricFamily(
            "trunkline_level_free_bytes", "Bytes without a copy on a level.", labels=("level",)
        )
        up = GaugeMetricFamily(
            "trunkline_level_up", "1 if a level serves, 0 if it is off.", labels=("level",)
        )
        blocks = GaugeMetricFamily(
            "trunkline_level_blocks", "Blocks with a copy on a level.", labels=("level",)
        )
        copies = GaugeMetricFamily(
            "trunkline_level_copies_bytes",
            "Bytes that copies take on a level, by how exact they are.",
            labels=("level", "fidelity"),
        )
        blocks.add_metric(("device",), stats.used_blocks)
        for one in below:
            free.add_metric((one.name,), one.free_bytes)
            up.add_metric((one.name,), 0 if one.state == "off" else 1)
            blocks.add_metric((one.name,), one.blocks)
            for kind in one.copies:
                copies.add_metric((one.name, kind.fidelity), kind.bytes)
        yield from (free, up, blocks, copies)
        for name, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"trunkline_{name}", text, labels=("level",))
            if name == "cached_tokens_by_level":
                counter.add_metric(("device",), stats.device_tokens_total)
            for one in below:
                counter.add_metric((one.name,), getattr(one, field))
            yield counter
        yield from _flows(below, self.pending_receipts)
        yield from _recovery(below)


def _recovery(below: tuple[LevelStats, ...]) -> Iterator[Metric]:
    recovered = CounterMetricFamily(
        "trunkline_recovered_blocks",
        "Copies taken over from the previous engine.",
        labels=("level",),
    )
    lost = CounterMetricFamily(
        "trunkline_unrecovered_blocks",
        "Copies of the previous engine that were not taken over.",
        labels=("level", "reason"),
    )
    unnoted = CounterMetricFamily(
        "trunkline_unnoted_blocks",
        "Copies that the next engine will not find.",
        labels=("level",),
    )
    for one in below:
        if one.name == "host":
            recovered.add_metric((one.name,), one.recovered_total)
            unnoted.add_metric((one.name,), one.unnoted_total)
            for reason in ("torn", "orphaned", "lapsed"):
                lost.add_metric((one.name, reason), getattr(one, f"{reason}_total"))
    yield from (recovered, lost, unnoted)


def _flows(below: tuple[LevelStats, ...], pending_receipts: int) -> Iterator[Metric]:
    moves = CounterMetricFamily(
        "trunkline_moves",
        "Blocks copied between levels.",
        labels=("from", "to", "outcome"),
    )
    loads = CounterMetricFamily(
        "trunkline_loads",
        "Prompts with a prefix on a level, by what the cost model chose.",
        labels=("level", "choice"),
    )
    missed = CounterMetricFamily(
        "trunkline_not_loaded",
        "Prompts of which a level had more than was loaded, by reason.",
        labels=("level", "reason"),
    )
    uncopied = CounterMetricFamily(
        "trunkline_uncopied_evictions", "Blocks that were evicted without a copy on any level."
    )
    written = CounterMetricFamily("trunkline_disk_written_bytes", "Bytes written to disk.")
    today = GaugeMetricFamily(
        "trunkline_disk_written_today_bytes", "Bytes written to disk today (UTC)."
    )
    pending = GaugeMetricFamily(
        "trunkline_pending_erasures",
        "Erasures that a level or an engine has not confirmed.",
    )
    for one in below:
        for origin, target, count in one.moves:
            moves.add_metric((origin, target, "done"), count)
        loads.add_metric((one.name, "load"), one.chosen_total)
        loads.add_metric((one.name, "compute"), one.declined_total)
        for why, count in one.not_loaded.items():
            missed.add_metric((one.name, why), count)
        if one.name == "host":
            uncopied.add_metric((), one.uncopied_total)
        if one.name == "disk":
            written.add_metric((), one.written_bytes_total)
            today.add_metric((), one.written_bytes_today)
    known = sum(one.pending_erasures for one in below)
    pending.add_metric((), max(known, pending_receipts))
    yield from (moves, loads, missed, uncopied, written, today, pending)
