"""The words of findings: for each cause a title, what happens, and what to change.

Pure functions of sums; `gateway.findings.report` calls them, and docs/findings.md shows an example
of each. A sentence names fields and numbers, never a prompt's text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from gateway.analytics.prompt_findings import OTHER_TOOLS, READ_BACK
from tenancy.reuse.miss_causes import WRITE, WRITTEN_NEVER_READ

NEAR_TOKENS = 64
"""A change in the first so many tokens of a text is near its beginning."""
NEAR_SHARE = 0.1
SHORT_CHANGE_TOKENS = 24
SHORT_CHANGE_SHARE = 0.03
"""A change of at most so many tokens looks like a date, a time, an id or a counter; of a long text
the extent is known less exactly."""

NOT_SERVED = "not_served"
PROMISE_BROKEN = "promise_broken"
ONE_TIME = frozenset({"restarted", PROMISE_BROKEN, "model_changed", "template_changed"})
"""Causes that end by themselves: their cost does not return every month."""
LEGITIMATE = frozenset({"new_conversation"})
"""Causes that cost what they must."""
OF_REQUESTS = frozenset(
    {"system_changes", "prompt_changes", "tools_changed", "tools_reordered", "history_edited"}
)
"""Causes that the tenant's requests show, and that it can cure by itself."""
WITHOUT_TOKENS = frozenset({NOT_SERVED})
"""Causes of requests that were refused: nothing was computed, and nothing charged."""
NOT_CHARGED = frozenset({PROMISE_BROKEN})
"""Causes that the operator pays: the tokens were charged as if they had been read."""
OF_HARDWARE = frozenset({"damaged"})
"""Causes that a healthy machine does not have: they count from the second time on."""


class CauseFacts(Struct, frozen=True):
    """Sums of one cause at one place."""

    place: str
    requests: int
    of_requests: int
    sums: Mapping[str, int]
    """The facts of its counts."""
    takers: tuple[str, ...] = ()
    """Names of tenants by the blocks that they took, most first; empty in a tenant's own report."""
    paying_class: str = ""
    """The retention class that would have paid."""
    lost_blocks: int = 0
    """The blocks of different prefixes that were evicted from one model's cache in one hour, at
    most: the floor that would have kept them."""
    ceiling_blocks: int | None = None
    """The tenant's ceiling."""
    changes_itself: bool = False
    """Another finding is about what its requests change."""
    is_own: bool = False
    """The tenant reads it, who cannot set what the operator sets."""
    tenant: str = ""
    """Its name, for commands."""

    def mean(self, name: str) -> float:
        """Return a fact's mean over the requests."""
        return self.sums.get(name, 0) / self.requests if self.requests else 0.0

    @property
    def counts(self) -> str:
        """How many of the tenant's requests."""
        return f"{self.requests:,} of {self.of_requests:,}"

    @property
    def share(self) -> str:
        """In how many of them."""
        return f"in {self.counts} requests"


class CauseWords(Struct, frozen=True):
    """`what` happens, without the tenant's name and the price, and `advice`, which begins with a
    verb. `confidence` from 0 to 1, for many requests."""

    title: str
    what: str
    advice: str
    confidence: float = 0.99


def _where(facts: CauseFacts) -> str:
    """Say where in its text a change is: near the beginning or the end, or in the middle."""
    at, length = facts.mean("at"), max(1.0, facts.mean("part_tokens"))
    if at <= max(NEAR_SHARE * length, min(NEAR_TOKENS, length / 4)):
        return "near its beginning"
    if at >= (1 - NEAR_SHARE) * length:
        return "near its end"
    return "in the middle"


def _position(facts: CauseFacts) -> str:
    at, length = round(facts.mean("at")), round(facts.mean("part_tokens"))
    kind = ""
    if facts.mean("changed") <= max(SHORT_CHANGE_TOKENS, SHORT_CHANGE_SHARE * length):
        kind = "; a short value, such as a date, a time, an id or a counter"
    return f"about token {at + 1:,} of {length:,}{kind}"


def _system(facts: CauseFacts) -> CauseWords:
    advice = (
        f"Put the changing part of {facts.place} behind the stable text, best into the latest user"
        " message."
    )
    if 2 * facts.sums.get("behind", 0) < facts.requests:
        advice = (
            f"End the stable part of {facts.place} with a breakpoint, and put the changing part"
            " behind it."
        )
    what = f"the system message changes {_where(facts)} {facts.share} ({_position(facts)})"
    return CauseWords("The system message changes", what, advice)


def _history(facts: CauseFacts) -> CauseWords:
    if 2 * facts.sums.get("shortened", 0) >= facts.requests:
        return CauseWords(
            "Old messages are left out",
            f"messages before {facts.place} are left out while the conversation goes on"
            f" {facts.share}",
            "Leave out many old messages at once and seldom, instead of some with every request.",
        )
    return CauseWords(
        "An earlier message is changed",
        f"the message at {facts.place} is changed while the conversation goes on {facts.share}",
        "Send earlier messages back unchanged; add what is new at the end.",
    )


def _tools(facts: CauseFacts) -> CauseWords:
    if 2 * facts.sums.get(OTHER_TOOLS, 0) >= facts.requests:
        what = f"the list of tools changes {facts.share}: some are added, left out or replaced"
        advice = "Send the same tools with every request, and restrict them with tool_choice."
        return CauseWords("The tools change", what, advice, 0.97)
    return CauseWords(
        "The text of a tool changes",
        f"the text of the tools changes {facts.share} ({_position(facts)})",
        "Keep dates, ids and what else changes out of the descriptions and schemas of tools.",
        0.97,
    )


def _expired(facts: CauseFacts) -> CauseWords:
    idle_s = facts.mean("idle_s")
    after = f", {_duration(idle_s)} after its last use" if idle_s else ""
    used = f" of the class {facts.place}" if facts.place else ""
    advice = "Keep the class: no longer one would have paid at these prices and intervals."
    if facts.paying_class:
        advice = f"Use the retention class {facts.paying_class}: it would have paid."
    return CauseWords(
        "Prefixes expire before they return",
        f"the prefix{used} had expired {facts.share}{after}",
        advice,
        0.97,
    )


def _evicted(facts: CauseFacts) -> CauseWords:
    own, pressure = (facts.sums.get(name, 0) for name in ("evicted_own_quota", "evicted_pressure"))
    by = ""
    if pressure >= own and pressure:
        by = f" for {', '.join(facts.takers)}" if facts.takers else " for other tenants"
    elif own and facts.ceiling_blocks is None:
        by = " for later prompts of the tenant itself"
    elif own:
        by = " at the tenant's own ceiling"
    blocks = facts.lost_blocks
    if own > pressure and facts.ceiling_blocks is None:
        advice = (
            "Ask the operator for more memory for the cache, or send fewer different prefixes."
            if facts.is_own
            else "Give the engine more memory (engine.kv_memory_mib), or send fewer different"
            " prefixes."
        )
    elif own > pressure:
        advice = _higher_ceiling(facts)
    else:
        advice = "Give the tenant a floor, or the engine more memory (engine.kv_memory_mib)."
        if facts.is_own:
            size = f" of {blocks:,} blocks" if blocks else ""
            advice = f"Ask the operator for a floor{size}, which keeps prefixes."
        elif blocks:
            command = f"trunkline tenant set {facts.tenant} --floor {blocks}"
            advice = f"Set a floor of {blocks:,} blocks ({command}): it would have kept them."
    if facts.changes_itself:
        advice = (
            "First stop changing the prompts (its other findings), which takes nothing from others."
            f" If that is not enough: {advice[0].lower()}{advice[1:]}"
        )
    return CauseWords(
        "Prefixes are evicted before they return",
        f"the prefix had been evicted{by} {facts.share}",
        advice,
        0.95 if own or pressure else 0.8,
    )


def _higher_ceiling(facts: CauseFacts) -> str:
    """Return the cure of evictions at the tenant's own ceiling."""
    if not facts.ceiling_blocks or not facts.lost_blocks:
        return "Raise the ceiling, or send fewer different prefixes."
    blocks = facts.ceiling_blocks + facts.lost_blocks
    if facts.is_own:
        return f"Ask the operator for a ceiling of {blocks:,} blocks, or send fewer prefixes."
    return (
        f"Raise the ceiling from {facts.ceiling_blocks:,} to {blocks:,} blocks (trunkline tenant"
        f" set {facts.tenant} --ceiling {blocks}), or send fewer different prefixes."
    )


def _damaged(facts: CauseFacts) -> CauseWords:
    advice = (
        "Check the disk (its SMART values, the kernel's log, trunkline levels verify) and, where no"
        " disk is configured, the host's memory."
    )
    return CauseWords(
        "Copies below the device are damaged",
        f"the bytes of a copy were not those that were written {facts.share}, so it was computed"
        " again",
        "Tell the operator: the host's disk or memory is at fault." if facts.is_own else advice,
    )


def _level_failed(facts: CauseFacts) -> CauseWords:
    advice = (
        "See the level's state and rate on the dashboard's Memory page: a disk that is off, or"
        " slower than its loads were predicted, needs attention."
    )
    return CauseWords(
        "A level did not bring what it had",
        f"a copy in host memory or on disk could not be fetched, or came too late, {facts.share}",
        "Tell the operator: a level of the cache is off, or slow." if facts.is_own else advice,
        0.9,
    )


def _never_read(facts: CauseFacts) -> CauseWords:
    written = sum(number for name, number in facts.sums.items() if name.startswith(WRITE))
    read = facts.sums.get(READ_BACK, 0)
    return CauseWords(
        "What is written is not read",
        f"{written:,} tokens were written at breakpoints {facts.share}, and {read:,} were read",
        "Leave out the breakpoints (cache_control) of prompts that do not come back, or set them"
        " before the part that changes.",
        0.95,
    )


def _not_served(facts: CauseFacts) -> CauseWords:
    cure = (
        "Ask for a served model, or have the operator add an alias."
        if facts.is_own
        else f'Add an alias (model.aliases = ["{facts.place}"]), or have the client ask for a'
        " served model."
    )
    return CauseWords(
        "A model is not served",
        f"asks for {facts.place}, which is not served, {facts.share}",
        cure,
    )


def _below(facts: CauseFacts) -> CauseWords:
    least = round(facts.mean("min_tokens"))
    limit = f" of {least:,} tokens" if least else ""
    advice = "Put more of the stable text before the breakpoint."
    if not facts.is_own:
        advice = (
            "Put more of the stable text before the breakpoint, or lower min_tokens of the"
            " dialect's profile ([caching.profiles])."
        )
    return CauseWords(
        "Prefixes are shorter than the minimum",
        f"the shared prefix is shorter than the minimum{limit} {facts.share}",
        advice,
    )


PLAIN: Mapping[str, CauseWords] = {
    "prompt_changes": CauseWords(
        "The prompt changes before text that stays",
        "{place} changes {where} {share} ({position}), and the same text follows",
        "Put the stable text of {place} first and the changing part behind it.",
        0.9,
    ),
    "tools_reordered": CauseWords(
        "The tools come in another order",
        "the same tools, or their fields, come in another order {share}",
        "Send the tools sorted by name, and serialize their schemas with sorted keys.",
    ),
    "model_changed": CauseWords(
        "The model changed",
        "another model computes {counts} requests, whose prefixes the model before had cached",
        "Expect it once for each change of the model; change models when traffic is low.",
        0.95,
    ),
    "template_changed": CauseWords(
        "The chat template changed",
        "another chat template renders {counts} requests, whose prefixes were cached under the"
        " template before",
        "Expect it once for each change of the template; pin the template's file.",
        0.95,
    ),
    "cache_key_changes": CauseWords(
        "The cache key changes",
        "cache_salt (or prompt_cache_key, where it is a namespace) is another one than before"
        " {share}, though the prompt begins as one sent before",
        "If the client sends prompt_cache_key of itself (Codex and opencode send their session's"
        ' id), leave caching.cache_key at "hint" on the server or for this API key; if it sends'
        " cache_salt, send one with all requests that begin alike, or none. Keep values that"
        " separate users on purpose.",
        0.95,
    ),
    "restarted": CauseWords(
        "The engine restarted",
        "the prefix of {counts} requests was lost in a restart of the engine",
        "Expect it once for each restart; restart when traffic is low.",
    ),
    "state_gap": CauseWords(
        "Prompts part where no state was kept",
        "the prefix was cached, but the last state of the recurrent layers lay further to the front"
        " {share}",
        "Set a breakpoint where prompts part: a state is kept there, in blocks of the pool. Parting"
        " points that repeat keep one by themselves, from the second prompt on.",
    ),
    "unmarked": CauseWords(
        "Repeated prompts have no breakpoint",
        "no breakpoint asks for caching, though the beginning was sent before, {share}",
        "Add cache_control to the last block that stays the same, or at the top level.",
    ),
    "new_conversation": CauseWords(
        "New conversations",
        "a new conversation begins {share}",
        "Nothing to change: new text must be computed once.",
    ),
}
"""The words of causes that need no decision, with names of `_fill` in braces."""


def _promise_broken(facts: CauseFacts) -> CauseWords:
    kept = (
        "Let what is promised outlast its engine: a disk below it, or host memory"
        " (engine.levels.host_keeps_promises); a second replica, to which trunkline engine drain"
        " moves promises while it has room; or a store that replicas share"
        " (engine.levels.remote.shared)."
    )
    return CauseWords(
        "A promise ended with its engine",
        f"prefixes promised in the class {facts.place or '5m'} were lost with an engine"
        f" {facts.share}",
        "Expect nothing to change in the requests: they were charged as reads."
        if facts.is_own
        else kept,
    )


DECIDED: Mapping[str, Callable[[CauseFacts], CauseWords]] = {
    "system_changes": _system,
    "tools_changed": _tools,
    "history_edited": _history,
    "expired": _expired,
    "evicted": _evicted,
    "damaged": _damaged,
    "level_failed": _level_failed,
    "below_minimum": _below,
    PROMISE_BROKEN: _promise_broken,
    WRITTEN_NEVER_READ: _never_read,
    NOT_SERVED: _not_served,
}
"""The other causes: their words depend on the facts."""

CAUSES = (*PLAIN, *DECIDED)


def describe(cause: str, facts: CauseFacts) -> CauseWords:
    """Return the words of a cause."""
    if cause in DECIDED:
        return DECIDED[cause](facts)
    words = PLAIN[cause]
    return replace(words, what=_fill(words.what, facts), advice=_fill(words.advice, facts))


def _fill(text: str, facts: CauseFacts) -> str:
    return text.format(
        place=facts.place,
        share=facts.share,
        counts=facts.counts,
        where=_where(facts),
        position=_position(facts),
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{round(seconds)} s"
    if seconds < 7_200:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 3_600)} h"
