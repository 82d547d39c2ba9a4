"""Every metric of the gateway, once. Names are `trunkline_*`, plus those of model servers that
existing autoscalers and dashboards read, where they mean the same.

One registry per running gateway; no globals. Tenants are labels only up to a configured number.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from engine.api import Stats

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHERS = "others"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Telemetry:
    """Counters, gauges and histograms of one gateway."""

    def __init__(self, tenants_as_labels_max: int) -> None:
        self.registry = CollectorRegistry()
        self._tenants_max = tenants_as_labels_max
        self._tenants: set[str] = set()
        one = self.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"trunkline_{name}", text, labels, registry=one)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=one)

        self.requests = counter(
            "requests_total", "Requests that ended.", "tenant", "route", "ending"
        )
        self.refusals = counter("refusals_total", "Requests refused, by stable code.", "code")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens.", "tenant")
        self.cached_tokens = counter(
            "cached_tokens_total", "Prompt tokens found in the cache.", "tenant"
        )
        self.output_tokens = counter("output_tokens_total", "Output tokens.", "tenant")
        self.unreadable = counter("unreadable_requests_total", "Connections that spoke no HTTP.")
        self.first_token_s = Histogram(
            "trunkline_first_token_seconds",
            "Time from a request's arrival to its first token.",
            ("cache",),
            buckets=_SECONDS,
            registry=one,
        )
        self.duration_s = Histogram(
            "trunkline_request_seconds", "Time of a whole request.", buckets=_SECONDS, registry=one
        )
        self._gauges = {
            "blocks": gauge("trunkline_kv_blocks", "Blocks of the pool."),
            "free_blocks": gauge("trunkline_kv_free_blocks", "Blocks nobody refers to."),
            "cached_blocks": gauge("trunkline_kv_cached_blocks", "Blocks only the tree holds."),
            "pinned_blocks": gauge("trunkline_kv_pinned_blocks", "Blocks in some block table."),
            "waiting": gauge("trunkline_waiting_requests", "Requests not running."),
            "running": gauge("trunkline_running_requests", "Requests running."),
            "waiting_tokens": gauge("trunkline_waiting_tokens", "Prompt tokens not begun."),
            "step": gauge("trunkline_engine_step", "Steps of this engine's life."),
            "evicted_blocks_total": gauge(
                "trunkline_evicted_blocks", "Blocks evicted in this engine's life."
            ),
            "expired_blocks_total": gauge(
                "trunkline_expired_blocks", "Blocks expired in this engine's life."
            ),
            "copied_blocks_total": gauge(
                "trunkline_copied_blocks", "Blocks copied in this engine's life."
            ),
            "preemptions_total": gauge(
                "trunkline_preemptions", "Preemptions in this engine's life."
            ),
            "steps_per_s": gauge("trunkline_steps_per_second", "Engine steps per second."),
        }
        self.ready = gauge("trunkline_engine_ready", "1 if the engine takes requests.")
        self.restarts = gauge("trunkline_engine_restarts", "Engine restarts since the start.")
        self._running = gauge("num_requests_running", "Requests running (model servers' name).")
        self._waiting = gauge("num_requests_waiting", "Requests waiting (model servers' name).")
        self._usage = gauge("kv_cache_usage_perc", "Part of the blocks in use, 0 to 1.")

    def tenant_label(self, name: str) -> str:
        """The tenant's own name for the first few, `others` for the rest."""
        if name in self._tenants:
            return name
        if len(self._tenants) < self._tenants_max:
            self._tenants.add(name)
            return name
        return OTHERS

    def show_engine(self, stats: Stats, *, is_ready: bool, restarts: int) -> None:
        """Take over the engine's latest heartbeat."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        self.ready.set(1 if is_ready else 0)
        self.restarts.set(restarts)
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._usage.set(stats.pinned_blocks / stats.blocks if stats.blocks else 0.0)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return bytes(generate_latest(self.registry))
