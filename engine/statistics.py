"""The engine's statistics: heartbeat, load, and the blocks that namespaces have gained and lost.

The gateway reads them for metrics, admission and storage metering; they decide nothing in the
engine. Counts, never tokens. `engine.core.stats` and `engine.server.cache_event_collector` make
them, `engine.client` adds them up. Each value is frozen and travels as msgpack (`engine.protocol`).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from engine.api import Count, Fidelity, LevelName, Namespace, Payer


class NamespaceStats(Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks and live requests of one namespace; zeros if it has none left."""

    namespace: Namespace
    blocks: Count
    pinned_blocks: Count
    running: Count
    waiting: Count
    promised_by_class: dict[str, Count] = {}
    """Blocks under a live promise, on any level, each in the class that promises it longest."""
    host_bytes: Count = 0
    """Copies in host memory."""
    is_stored: bool = False
    """Whether the disk has records of it."""
    promised_below: Count = 0
    """Promised blocks whose promise a level below the device keeps."""
    promised_away: Count = 0
    """Promised blocks that the device has evicted, and that `blocks` does not count."""

    @property
    def promised_blocks(self) -> int:
        """Return the blocks under a live promise, on any level."""
        return sum(self.promised_by_class.values())

    @property
    def promised_on_device(self) -> int:
        """Return the blocks that a promise holds on the device."""
        return self.promised_blocks - self.promised_below

    @property
    def unpromised_blocks(self) -> int:
        """Return the blocks on the device that no promise covers, on any level."""
        return self.blocks - (self.promised_blocks - self.promised_away)


class PayerBytes(Struct, frozen=True):
    """Bytes that a payer's copies take on a level, and the part of them that is promised."""

    payer: Payer
    used: Count
    promised: Count


class FidelityBytes(Struct, frozen=True):
    """The copies of one fidelity on a level, and their bytes."""

    fidelity: Fidelity
    blocks: Count
    bytes: Count


NOT_ANSWERED = "it has not answered yet"
"""The reason of a level that is off only because it has just been asked for the first time."""


class LevelStats(Struct, frozen=True, forbid_unknown_fields=True):
    """One level below the device. Totals count blocks unless they say otherwise, and never fall.

    `chosen_total`, `declined_total`: prompts with a prefix here that were loaded, or computed since
    that was faster; `not_loaded`: those of which not all was loaded, by why.
    """

    name: LevelName
    state: Literal["open", "full", "off"]
    """`open`, `full` (it takes nothing new) or `off`."""
    reason: str = ""
    """Why it is not open, or what of it is not used."""
    capacity_bytes: Count = 0
    used_bytes: Count = 0
    promised_bytes: Count = 0
    blocks: Count = 0
    offloaded_total: Count = 0
    """Blocks copied from the device to host memory."""
    loaded_total: Count = 0
    """Blocks copied from here to the device."""
    stored_total: Count = 0
    """Blocks copied from host memory to disk, or to a peer."""
    fetched_total: Count = 0
    """Blocks copied from disk, or from a peer, to host memory."""
    failed_total: Count = 0
    """Moves that failed."""
    damaged_total: Count = 0
    """Copies with other bytes than were written."""
    dropped_total: Count = 0
    """Copies given up for room."""
    expired_total: Count = 0
    """Copies given up at their limit."""
    loaded_tokens_total: Count = 0
    """Cached tokens of requests that were loaded from here before they started."""
    regret_s_total: float = 0.0
    """Time lost by loads slower than computing."""
    bytes_per_s: float = 0.0
    """The measured rate of reading."""
    written_bytes_today: Count = 0
    written_bytes_total: Count = 0
    chosen_total: Count = 0
    declined_total: Count = 0
    not_loaded: dict[str, Count] = {}
    uncopied_total: Count = 0
    """Blocks evicted from the device without a copy."""
    pending_erasures: Count = 0
    """Erasures that are not confirmed yet."""
    recovered_total: Count = 0
    """Copies in host memory taken over from the engine before; of the others, `torn_total` were
    being written when it died, `orphaned_total` hung on one that is gone, `lapsed_total` were
    over."""
    torn_total: Count = 0
    orphaned_total: Count = 0
    lapsed_total: Count = 0
    unnoted_total: Count = 0
    """Copies that the next engine will not find."""
    payers: tuple[PayerBytes, ...] = ()
    copies: tuple[FidelityBytes, ...] = ()

    @property
    def free_bytes(self) -> int:
        """Return the bytes of its room that no copy takes."""
        return max(0, self.capacity_bytes - self.used_bytes)

    @property
    def moves(self) -> tuple[tuple[str, str, int], ...]:
        """Return (from, to, blocks) of the copies that were made to and from it."""
        if self.name == "host":
            return ("device", "host", self.offloaded_total), ("host", "device", self.loaded_total)
        above = "disk" if self.name == "remote" else "host"
        if self.name == "peer":
            near = ("peer", "device", self.loaded_total)
            return (above, "peer", self.stored_total), ("peer", "host", self.fetched_total), near
        return (above, self.name, self.stored_total), (self.name, "host", self.fetched_total)


class Stats(Struct, frozen=True, tag="stats", forbid_unknown_fields=True):
    """The heartbeat, and the answer to `GetStats`. Counters never fall within an epoch.

    blocks = free + cached (only the tree refers to them) + pinned (a block table does, or a move).
    A heartbeat with many changes reports a part, later ones the rest.
    """

    call_id: Count = 0
    step: Count = 0
    blocks: Count = 0
    free_blocks: Count = 0
    cached_blocks: Count = 0
    pinned_blocks: Count = 0
    waiting: Count = 0
    running: Count = 0
    compiling: Count = 0
    """Requests among the waiting ones without a compiled grammar; they are no work for a step."""
    waiting_tokens: Count = 0
    prompt_tokens_total: Count = 0
    cached_tokens_total: Count = 0
    device_tokens_total: Count = 0
    """Cached tokens that were on the device, not loaded from a level below."""
    computed_tokens_total: Count = 0
    output_tokens_total: Count = 0
    unneeded_tokens_total: Count = 0
    """Output tokens sampled beyond the end of their text, before the engine knew of it; they are
    charged to no client."""
    abandoned_prompt_tokens_total: Count = 0
    """Of the prompts counted above: those of requests whose connection left before they ended, so
    that no entry has them; likewise the next two."""
    abandoned_cached_tokens_total: Count = 0
    abandoned_output_tokens_total: Count = 0
    evicted_blocks_total: Count = 0
    expired_blocks_total: Count = 0
    copied_blocks_total: Count = 0
    window_blocks: Count = 0
    """The blocks of window groups that trees hold."""
    resume_gap_tokens_total: Count = 0
    """Prompt tokens computed again for want of such blocks, or of a state of recurrent layers."""
    preemptions_total: Count = 0
    steps_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    levels: tuple[LevelStats, ...] = ()
    """Host memory and disk, if they are configured."""
    loading: Count = 0
    """Requests among the waiting and running ones that wait for a level."""
    changed: tuple[NamespaceStats, ...] = ()
    """Namespaces with numbers that have changed since the last `Stats` on this connection; in the
    first, all of them."""

    @property
    def used_blocks(self) -> int:
        """Return the blocks of the device's pool that are not free."""
        return self.blocks - self.free_blocks


LossCause = Literal["evicted_own_quota", "evicted_pressure", "expired", "erased", "lost_below"]
"""Why blocks left the tree: evicted for their own namespace or another, expired, or erased.
`lost_below`: no longer promised; a level that kept them has lost them, or a preemption has."""


class Loss(Struct, frozen=True, forbid_unknown_fields=True):
    """`blocks` of `namespace` left the tree, or were `lost_below` it."""

    namespace: Namespace
    cause: LossCause
    taker: Namespace
    """The namespace they were evicted for."""
    blocks: Count
    lived_s: float = 0.0
    """Seconds they had been in the tree, summed."""


class Gain(Struct, frozen=True, forbid_unknown_fields=True):
    """`blocks` of `namespace` entered the tree: gains minus losses, but for those `lost_below`, are
    its blocks in the tree."""

    namespace: Namespace
    blocks: Count


class CacheNews(Struct, frozen=True, tag="cache_news", forbid_unknown_fields=True):
    """The losses and gains since the last `CacheNews`. Sent unasked with the heartbeat."""

    losses: tuple[Loss, ...]
    gains: tuple[Gain, ...] = ()


class LoadReport(Struct, frozen=True, tag="load_report", forbid_unknown_fields=True):
    """The engine's queue and its speed, for a connection that watches its prefixes. Sent unasked
    after a step that has changed it, 20 times a second at most.
    """

    accepted: Count = 0
    """The Submits of this connection that are counted here."""
    waiting_tokens: Count = 0
    """Prompt tokens before a request that comes now: those of waiting prompts that are not expected
    to be cached, and what is left to compute of prompts that have begun."""
    rows: Count = 0
    """Requests that run, each with at least one row of a step."""
    waiting: Count = 0
    free_blocks: Count = 0
    """Blocks of the device that hold nothing: what a prompt takes beyond them displaces others."""
    promisable_blocks: Count = 0
    """Blocks that could still be promised, on the level that keeps promises."""
    prefill_tokens_per_s: float = 0.0
    """0.0 before the first prompt."""
    step_s: float = 0.0
    row_s: float = 0.0
    """Seconds by which one more decoding row lengthens a step."""
    below_bytes_per_s: float = 0.0
    """The rate at which copies of the nearest level below are read; 0.0 without one."""
    peer_bytes_per_s: float = 0.0
    """The rate at which prefixes of other engines are fetched; 0.0 where none are, nor sent."""
    near_bytes_per_s: float = 0.0
    """The same for engines whose pools this one reads; 0.0 where there can be none."""
