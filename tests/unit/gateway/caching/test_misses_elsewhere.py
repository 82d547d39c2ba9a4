"""Misses of content that is cached in another namespace or under another template or model."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from msgspec.structs import replace

from engine.api import LeaseGrant
from gateway.caching import CacheScope, Contract, ContractManager, PrefixOrigin
from gateway.caching.miss_diagnosis import PromptDigests
from gateway.dialects.canonical import (
    Boundary,
    CacheDirectives,
    Call,
    GenerationParameters,
    Prompt,
    Rendered,
    Segment,
    Tool,
)
from gateway.retention_classes import CachingConfig
from tests.fakes import FakeClock
from tests.tables import each_row
from tests.unit.gateway.caching.test_contract import started

HERE = CacheScope(b"1/a/m/t/", 1, "1/a", origin=PrefixOrigin(1, "m", "t"))
SALTED = replace(HERE, namespace=b"1/a/m/t/salt")
OTHER_TEMPLATE = replace(HERE, namespace=b"1/a/m/t2/", origin=PrefixOrigin(1, "m", "t2"))
OTHER_MODEL = replace(HERE, namespace=b"1/a/m2/t2/", origin=PrefixOrigin(1, "m2", "t2"))
STRANGER = CacheScope(b"2/a/m/t/", 2, "2/a", origin=PrefixOrigin(2, "m", "t"))


class World:
    """A gateway's contract contracts. A prompt's tokens depend on its model and template."""

    def __init__(self, config: CachingConfig | None = None) -> None:
        self.clock = FakeClock()
        self.epoch = "first"
        self.losses: dict[bytes, dict[str, int]] = {}
        self.contracts = ContractManager(
            config or CachingConfig(),
            self.clock,
            lambda namespace: self.losses.get(namespace, {}),
            lambda _: self.epoch,
            lambda epoch: epoch == self.epoch,
        )

    def resolve(self, words: str, scope: CacheScope, retention: str = "5m") -> Contract:
        """Resolve a prompt with one message per word and a breakpoint at its end."""
        parts = words.split()
        segments = tuple(Segment("user", part, f"m[{n}]") for n, part in enumerate(parts))
        each = 5 if scope.origin.model == "m" else 7
        marks = [Boundary(each * (n + 1), f"m[{n}]") for n in range(len(parts))]
        marks[-1] = replace(marks[-1], retention=retention)
        first = crc32(f"{scope.origin.template} {words}".encode()) >> 1
        tokens = tuple(first + n for n in range(each * len(parts)))
        ask = CacheDirectives(profile="anthropic")
        call = Call("m", (Prompt(segments),), GenerationParameters(), cache=ask)
        return self.contracts.resolve(call, Rendered(tokens, tuple(marks)), scope)

    def run(
        self, words: str, scope: CacheScope, retention: str = "5m", *, kept: bool = True
    ) -> str:
        """Run a prompt to its end; return the miss cause."""
        contract = self.resolve(words, scope, retention)
        grants = [
            LeaseGrant(
                lease.lease_id,
                lease.retention.name,
                "granted" if kept else "refused",
                lease.tokens if kept else 0,
            )
            for lease in contract.leases
        ]
        contract.begin(started(0, grants))
        contract.written()
        contract.finish("id")
        return contract.why_missed()


@each_row(
    ("written", "cause"),
    [
        (SALTED, "other_namespace"),
        (OTHER_TEMPLATE, "template"),
        (OTHER_MODEL, "model"),
        (STRANGER, "never_written"),
    ],
)
def test_same_content_elsewhere_is_the_cause(written: CacheScope, cause: str) -> None:
    """Only of the same tenant; another tenant's content stays invisible."""
    world = World()
    world.run("a b", written)

    assert world.run("a b c", HERE) == cause


def test_quote_reports_the_cause() -> None:
    world = World()
    world.run("a b", SALTED)

    assert world.resolve("a b c", HERE).explain(0) == "other_namespace"


def test_other_content_is_no_cause() -> None:
    """A common beginning is not enough."""
    world = World()
    world.run("a b", SALTED)

    assert world.run("a c", HERE) == "never_written"


def test_reports_cause_of_highest_priority() -> None:
    """A prefix that can still be read elsewhere comes before one that cannot."""
    world = World()
    for scope in (OTHER_MODEL, OTHER_TEMPLATE, SALTED):
        world.run("a b", scope)

    assert world.run("a b", HERE) == "other_namespace"


def test_expired_entry_elsewhere_is_no_cause() -> None:
    world = World()
    world.run("a b", SALTED)
    world.clock.advance(301)

    assert world.run("a b", HERE) == "never_written"


def test_possibly_lost_entry_elsewhere_is_no_cause() -> None:
    """Without a promise, only a namespace without losses is certain."""
    world = World()
    world.run("a b", SALTED, "24h", kept=False)
    surely = world.resolve("a b", HERE).explain(0)
    world.losses[SALTED.namespace] = {"evicted_pressure": 1}
    perhaps = world.resolve("a b", HERE).explain(0)

    assert (surely, perhaps) == ("other_namespace", "never_written")


def test_restart_removes_cause_unless_promised() -> None:
    """A promise outlives the engine; best-effort content does not."""
    world = World()
    world.run("a b", SALTED, "24h", kept=False)
    world.run("c d", SALTED)
    world.epoch = "second"

    assert world.run("a b", HERE) == "never_written"
    assert world.run("c d", HERE) == "other_namespace"


def test_erased_entry_elsewhere_is_no_cause() -> None:
    """An erasure must leave no trace."""
    world = World()
    world.run("a b", SALTED)
    world.contracts.entries.erase_namespace(SALTED.namespace)
    world.contracts.entries.check()

    assert world.run("a b", HERE) == "never_written"


def test_dropped_entry_elsewhere_is_no_cause() -> None:
    world = World(CachingConfig(entries_per_tenant_max=2))
    for words in ("a b", "c d", "e f"):
        world.run(words, SALTED)
        world.contracts.entries.check()

    assert world.resolve("a b", HERE).explain(0) == "never_written"
    assert world.resolve("e f", HERE).explain(0) == "other_namespace"


def test_own_expired_entry_comes_first() -> None:
    world = World()
    world.run("a b", HERE)
    world.clock.advance(301)
    world.run("a b", SALTED)

    assert world.run("a b", HERE) == "expired"


def said(*segments: Segment, tools: tuple[Tool, ...] = ()) -> bytes:
    """Return the content digest of a whole prompt."""
    marks = [Boundary(n + 1, "p") for n in range(len(segments) + len(tools))]
    return PromptDigests(Prompt(segments, tools=tools), marks, ()).upto(len(marks))


def test_content_digest_covers_roles_turns_text_and_tools() -> None:
    """Not breakpoints, paths or strictness."""
    user = Segment("user", "hi", "messages[0]")
    tool = Tool("f", "d", "{}")
    same = [said(user), said(replace(user, path="input[0]", retention="5m"))]
    others: list[Any] = [
        said(replace(user, text="ho")),
        said(replace(user, role="system")),
        said(replace(user, message=1)),
        said(replace(user, name="ann")),
        said(user, user),
        said(user, tools=(tool,)),
        said(user, tools=(replace(tool, parameters='{"a":1}'),)),
    ]

    assert same[0] == same[1] != b""
    assert len({same[0], *others}) == 1 + len(others)
    assert said(user, tools=(tool,)) == said(user, tools=(replace(tool, strict=True),))


def test_segment_is_that_of_the_templates_order() -> None:
    """Tools that stand behind the system text do not part where it does."""
    tools = Boundary(30, "tools[0]", tier="tools")
    system = Boundary(30, "system[0]", tier="system", own_tokens=12)
    words = PromptDigests(Prompt(()), (tools, system, Boundary(40, "messages[0]")), ())

    found = [words.segment_behind(tokens) for tokens in (0, 12, 30, 40)]
    assert found == ["system[0]", "tools[0]", "messages[0]", ""]


def test_segment_behind_cached_tokens() -> None:
    """The first segment that is not cached in full."""
    words = PromptDigests(Prompt(), [Boundary(5, "a"), Boundary(9, "b"), Boundary(9, "c")], ())

    assert [words.segment_behind(tokens) for tokens in (0, 4, 5, 8, 9)] == ["a", "a", "b", "b", ""]


def test_raw_prompt_has_no_content_digest() -> None:
    """It has no parts to compare."""
    assert PromptDigests(Prompt(text="hi"), [Boundary(3, "prompt")], (3,)).upto(3) == b""
