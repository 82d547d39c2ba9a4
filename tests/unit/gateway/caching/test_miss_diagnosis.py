"""Differences between a prompt and an earlier one, from digests alone."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gateway.caching.miss_diagnosis import (
    Fingerprint,
    FingerprintIndex,
    RememberedBoundary,
    compare_fingerprints,
)
from gateway.dialects.canonical import Tier
from tests.tables import each_row

TIERS: dict[str, Tier] = {"t": "tools", "s": "system", "m": "messages"}


def prompt(words: str, **more: Any) -> Fingerprint:
    """Return boundaries of ten tokens each: `t1 s1 m1` is a tool, a system text and a message."""
    parts = words.split()
    marks = tuple(
        RememberedBoundary(part, TIERS[part[0]], 10 * (n + 1), " ".join(parts[: n + 1]).encode())
        for n, part in enumerate(parts)
    )
    return replace(Fingerprint("1/default", "m", "t", "", 10 * len(parts), marks), **more)


def test_continued_conversation_is_a_hit() -> None:
    said = compare_fingerprints(prompt("t1 s1 m1 m2 m3"), prompt("t1 s1 m1"))

    assert (said.outcome, said.reusable_tokens) == ("hit", 30)


@each_row(
    ("now", "then", "cause", "reusable", "missed"),
    [
        ("t2 s1 m1", "t1 s1 m1", "tools", 0, 30),
        ("t1 s2 m1", "t1 s1 m1", "system", 10, 20),
        ("t1 s1 m2", "t1 s1 m1", "messages", 20, 10),
        ("t1 t2 s1 m1", "t1 s1 m1", "tools", 10, 30),
        ("t1 s1 m1", "t1 t2 s1 m1", "tools", 10, 20),
    ],
)
def test_first_differing_tier_is_the_cause(
    now: str, then: str, cause: str, reusable: int, missed: int
) -> None:
    """Tools precede system, system precedes messages: the first difference loses the rest. A tool
    that comes or goes moves the system text."""
    said = compare_fingerprints(prompt(now), prompt(then))

    assert (said.cause, said.reusable_tokens, said.missed_tokens) == (cause, reusable, missed)


def test_model_template_or_partition_comes_first() -> None:
    """Nothing is shared across them."""
    then = prompt("s1 m1")

    model = compare_fingerprints(prompt("s1 m1", model="other", template="other"), then)
    template = compare_fingerprints(prompt("s1 m1", template="other"), then)
    partition = compare_fingerprints(prompt("s1 m1", partition="k"), then)

    assert (model.cause, model.missed_tokens) == ("model", 20)
    assert template.cause == "template"
    assert partition.cause == "partition"


def test_settings_change_is_unavailable() -> None:
    """The prompt is equal; whether a setting matters depends on the dialect."""
    said = compare_fingerprints(prompt("m1", settings=(("effort", "low"),)), prompt("m1"))

    assert (said.outcome, said.setting) == ("unavailable", "effort")


def test_fingerprints_are_separate_by_scope() -> None:
    """A response id is no secret, but its prompt is."""
    book = FingerprintIndex(10, 60.0)
    book.remember("id", prompt("m1"), 0.0)

    assert book.find("1/default", "id", 1.0) is not None
    assert book.find("2/default", "id", 1.0) is None


def test_fingerprints_are_bounded_and_expire() -> None:
    """The oldest are dropped first."""
    book = FingerprintIndex(8, 60.0)
    for n in range(9):
        book.remember(f"id{n}", prompt("m1"), float(n))

    assert len(book) == 8
    assert book.find("1/default", "id0", 8.0) is None
    assert book.find("1/default", "id8", 67.9) is not None
    assert book.find("1/default", "id8", 68.0) is None


def test_a_tenants_fingerprints_push_out_its_own_alone() -> None:
    """However many workspaces it spreads them over; the other compares with its only prompt."""
    book = FingerprintIndex(10, 60.0)
    book.remember("quiet", prompt("m1", scope="2/default"), 0.0)
    for n in range(100):
        book.remember(f"id{n}", prompt("m1", scope=f"1/w{n}"), 1.0)

    assert len(book) == 10
    assert book.find("2/default", "quiet", 2.0) is not None
    assert book.find("1/w0", "id0", 2.0) is None
    assert book.find("1/w99", "id99", 2.0) is not None
