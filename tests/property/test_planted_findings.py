"""Random traffic with one planted cause: findings name it, and nothing in clean traffic.

The tenant has a few applications with system texts, tools, documents and conversations of their
own, whose requests come in any order. A cache of whole blocks answers as the engine does.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from gateway.analytics.aggregates import Analytics
from gateway.analytics.completed_prompt import CompletedPrompt, PromptContext
from gateway.dialects.canonical import Boundary, Rendered, UsageRecord
from gateway.findings.causes import LEGITIMATE
from gateway.findings.report import is_finding
from tenancy.reuse.advice import ClassTerms
from tenancy.reuse.miss_causes import FIRST_USE
from tenancy.reuse.prompt_changes import ToolDigest
from tests.fakes import FakeClock

BLOCK = 16
VOCABULARY = 30_000
REQUESTS = 60
PLANTS = {
    "system_changes": "system_changes",
    "sessions": "system_changes",
    "tools_reordered": "tools_reordered",
    "keys_reordered": "tools_reordered",
    "tools_changed": "tools_changed",
    "history_edited": "history_edited",
    "prompt_changes": "prompt_changes",
    "unmarked": "unmarked",
    "evicted": "evicted",
    "never_read": "written_never_read",
}
"""The cause that findings must name, by what is planted. `sessions`: an agent's system text changes
with each session alone, of 3 to 100 requests."""
Part = tuple[str, str, list[int]]
"""Path, role ("tools" for a tool) and tokens."""
PUNCTUATION = 7


class Application:
    """One application of the tenant: what it sends, request by request."""

    def __init__(self, chance: random.Random, plant: str) -> None:
        self._chance = chance
        self._plant = plant
        self._system = self._words(chance.randrange(150, 1_200))
        tools = 4 if plant in ("tools_reordered", "keys_reordered", "tools_changed") else None
        tools = chance.randrange(5) if tools is None else tools
        self._tools = [self._words(chance.randrange(40, 150)) for _ in range(tools)]
        self.tool_digests: list[ToolDigest] = []
        """Of the tools of the latest request."""
        self._session = self._left = 0
        self._documents = [self._words(chance.randrange(50, 200)) for _ in range(8)]
        self._long_message = self._words(chance.randrange(300, 600))
        self._kind = chance.choice(("questions", "documents", "conversations", "agent"))
        if plant == "history_edited":
            self._kind = chance.choice(("conversations", "agent"))
        elif plant == "prompt_changes":
            self._kind = "volatile prompt"
        elif plant == "sessions":
            self._kind = "sessions"
        elif plant == "never_read":
            self._kind, self._system, self._tools = "one-shots", [], []
        self._open: list[list[Part]] = []
        self._place = chance.random()
        self._number = 0

    def request(self) -> list[Part]:
        """Return the parts of the next request."""
        self._number += 1
        history = self._history()
        head = self._head()
        return [*head, *history]

    def _head(self) -> list[Part]:
        system, tools = self._system, list(self._tools)
        if self._plant == "system_changes":
            at = int(self._place * (len(system) - 100))
            system = [*system[:at], *self._words(self._chance.randrange(1, 9)), *system[at:]]
        elif self._plant == "tools_reordered":
            while tools == self._tools:
                self._chance.shuffle(tools)
        elif self._plant == "keys_reordered":
            tools = [self._with_keys_moved(tool) for tool in tools]
        elif self._plant == "tools_changed":
            tools[0] = [*tools[0][:9], *self._words(2), *tools[0][9:]]
        elif self._plant == "sessions":
            system = [*self._session_words, *system]
        # A tool begins with its name; the order of its keys does not change what it says.
        self.tool_digests = [
            ToolDigest(tool[0], hash(frozenset(tool) - {PUNCTUATION}) % 2**64) for tool in tools
        ]
        parts: list[Part] = [(f"tools[{n}]", "tools", tool) for n, tool in enumerate(tools)]
        return [*parts, ("system", "system", system)]

    def _with_keys_moved(self, tool: list[int]) -> list[int]:
        """Return a tool whose keys stand in another order, with other punctuation between them."""
        at = self._chance.randrange(10, len(tool) - 10)
        name, before, behind = tool[:1], tool[1:at], tool[at:]
        return [*name, *behind, *[PUNCTUATION] * self._chance.randrange(3), *before]

    def _history(self) -> list[Part]:
        if self._kind == "sessions":
            if not self._left:
                self._left = self._chance.choice((3, 5, 8))
                self._open, self._session_words = [], self._words(6)
            self._left -= 1
        question: Part = ("messages[0]", "user", self._words(self._chance.randrange(5, 40)))
        match self._kind:
            case "volatile prompt":
                return [("messages[0]", "user", [*self._words(3), *self._long_message])]
            case "documents":
                chosen = self._chance.sample(self._documents, 2)
                return [("messages[0]", "user", [*chosen[0], *chosen[1], *question[2]])]
            case "questions":
                return [question]
            case "one-shots":
                return [("messages[0]", "user", self._words(self._chance.randrange(200, 600)))]
            case _:
                return self._next_turn()

    def _next_turn(self) -> list[Part]:
        """Return a conversation with one more turn: of one of up to three that are open."""
        if self._kind == "sessions":
            self._open = self._open[-1:] or [[]]
        elif len(self._open) < 3 or self._chance.random() < 0.05:
            self._open = [*self._open[-2:], []]
        history = self._chance.choice(self._open)
        if history:
            roles = ["assistant"]
            if self._kind in ("agent", "sessions"):
                roles += ["assistant", "tool"] * self._chance.randrange(1, 4)
            for role in roles:
                text = self._words(self._chance.randrange(20, 120))
                history.append((f"messages[{len(history)}]", role, text))
        text = self._words(self._chance.randrange(5, 60))
        history.append((f"messages[{len(history)}]", "user", text))
        if self._plant == "history_edited":
            return self._edited(history)
        return list(history)

    def _edited(self, history: list[Part]) -> list[Part]:
        if self._place < 0.5:  # the oldest messages are left out
            kept = history[-7 if self._kind == "conversations" else -19 :]
            return [(f"messages[{n}]", role, text) for n, (_, role, text) in enumerate(kept)]
        path, role, text = history[0]
        return [(path, role, [*text, *self._words(2)]), *history[1:]]

    def _words(self, count: int) -> list[int]:
        return [self._chance.randrange(VOCABULARY) for _ in range(count)]


class BlockCache:
    """A cache of whole blocks by their prefix, and of prefixes that a contract has written."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.written: set[int] = set()

    def use(self, tokens: list[int]) -> int:
        """Return the cached tokens of a prompt, and cache all of it."""
        cached, digest, is_hit = 0, 0, True
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            digest = hash((digest, *tokens[end - BLOCK : end]))
            is_hit = is_hit and digest in self.blocks
            cached = end if is_hit else cached
            self.blocks.add(digest)
        return min(cached, len(tokens) - 1)


class Traffic:
    """Sends a tenant's requests to `Analytics` and judges the sums of its causes as a report
    does."""

    def __init__(self, seed: int, plant: str) -> None:
        self._chance = chance = random.Random(seed)
        self._plant = plant
        self._is_marked = plant != "unmarked" and chance.random() < 0.5
        self._is_marked |= plant == "never_read"
        others = chance.randrange(4) if plant != "unmarked" else chance.randrange(2)
        others = 0 if plant in ("sessions", "never_read") else others
        self._applications = [Application(chance, plant)]
        self._applications += [Application(chance, "") for _ in range(others)]
        self._cache = BlockCache()
        self._clock = FakeClock()
        classes = {"5m": ClassTerms(300.0, "5m")}
        self._analytics = Analytics(
            self._clock, lambda: round(1_000 * self._clock.now_s), 4, classes, seed
        )
        self._losses: dict[str, int] = {}
        self._computed = 0

    def run(self) -> set[str]:
        """Send all requests; return the causes of the findings."""
        for number in range(REQUESTS):
            planted = self._chance.random() < 0.6
            chosen = self._applications[0] if planted else self._chance.choice(self._applications)
            self._send(number, chosen.request(), chosen.tool_digests)
        return {
            one.cause
            for one in self._analytics.take_misses().counts
            if one.cause not in (FIRST_USE, *LEGITIMATE)
            and is_finding(one.cause, one.requests, one.wasted_tokens, self._computed, one.facts)
        }

    def _send(self, number: int, parts: list[Part], tools: list[ToolDigest]) -> None:
        tokens: list[int] = []
        marks: list[Boundary] = []
        for path, role, text in parts:
            tokens += text
            tier: Any = role if role in ("tools", "system") else "messages"
            marks.append(Boundary(len(tokens), path, tier=tier, role=role))
        if self._plant == "evicted" and number % 3 == 2:
            self._cache = BlockCache()
            self._losses = {"evicted_pressure": self._losses.get("evicted_pressure", 0) + 40}
        tail = [1, 2, 3]
        total, cached = len(tokens) + len(tail), self._cache.use([*tokens, *tail])
        record = self._record(tokens, marks, total, cached)
        self._computed += total - min(cached, record.read_tokens())
        self._clock.now_s = 10.0 * number + 5
        self._analytics.note(
            CompletedPrompt(
                *(1, "m", record, Rendered((*tokens, *tail), tuple(marks)), 0.1, "", "done"),
                context=PromptContext(
                    request_id=f"r{number}",
                    namespace=b"n",
                    epoch="e",
                    started_s=10.0 * number,
                    is_unmarked=self._plant == "unmarked",
                    min_tokens=0,
                    losses=self._losses,
                    tools=tuple(tools),
                ),
            )
        )

    def _record(
        self, tokens: list[int], marks: list[Boundary], total: int, cached: int
    ) -> UsageRecord:
        """Return the usage: all that is cached is read, or what was written at breakpoints."""
        if self._plant == "unmarked":
            return UsageRecord(total, fresh=total, out=1, physical_cached=cached)
        if not self._is_marked:
            read = {"best_effort": cached} if cached else {}
            return UsageRecord(total, read, {}, total - cached, 1, cached)
        ends = [mark.tokens for mark in marks if mark.tier == "system"][-1:]
        ends += [mark.tokens for mark in marks][-20:]
        digests = {end: hash(tuple(tokens[:end])) for end in ends}
        written = self._cache.written
        read_tokens = max(
            [end for end in ends if digests[end] in written and end <= cached + 16], default=0
        )
        written.add(digests[ends[0]])
        written.add(digests[ends[-1]])
        return UsageRecord(
            total,
            {"5m": read_tokens} if read_tokens else {},
            {"5m": ends[-1] - read_tokens},
            total - ends[-1],
            1,
            cached,
        )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_cause_is_named_alone(plant: str, seed: int) -> None:
    assert Traffic(seed, plant).run() == {PLANTS[plant]}


@pytest.mark.parametrize("seed", range(8))
def test_clean_traffic_has_no_finding(seed: int) -> None:
    assert Traffic(seed, "").run() == set()


@pytest.mark.nightly
@pytest.mark.parametrize("plant", ["", *PLANTS])
def test_many_tenants_are_judged_rightly(plant: str) -> None:
    """A hundred tenants for each cause, and for none."""
    found = {seed: Traffic(seed, plant).run() for seed in range(100, 200)}

    wanted = {PLANTS[plant]} if plant else set()
    assert {seed: causes for seed, causes in found.items() if causes != wanted} == {}
