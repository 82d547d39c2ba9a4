"""What a later prompt is told about an earlier one, from digests alone."""

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

TIERS: dict[str, Tier] = {"t": "tools", "s": "system", "m": "messages"}


def prompt(words: str, **more: Any) -> Fingerprint:
    """Marks of ten tokens each: `t1 s1 m1` is a tool, a system text and a message."""
    parts = words.split()
    marks = tuple(
        RememberedBoundary(part, TIERS[part[0]], 10 * (n + 1), " ".join(parts[: n + 1]).encode())
        for n, part in enumerate(parts)
    )
    return replace(Fingerprint("1/default", "m", "t", "", 10 * len(parts), marks), **more)


def test_a_conversation_that_went_on_is_a_hit() -> None:
    """What comes after all of the earlier prompt changes nothing of it."""
    said = compare_fingerprints(prompt("t1 s1 m1 m2 m3"), prompt("t1 s1 m1"))

    assert (said.outcome, said.reusable_tokens) == ("hit", 30)


def test_the_first_tier_that_differs_is_the_cause() -> None:
    """Tools stand before system, system before messages: the first difference costs the rest."""
    causes = [
        compare_fingerprints(prompt(now), prompt("t1 s1 m1")).cause
        for now in ("t2 s1 m1", "t1 s2 m1", "t1 s1 m2")
    ]

    assert causes == ["tools", "system", "messages"]


def test_a_tool_that_came_is_a_change_of_tools() -> None:
    """It pushes the system text away from where it stood."""
    said = compare_fingerprints(prompt("t1 t2 s1 m1"), prompt("t1 s1 m1"))

    assert (said.cause, said.reusable_tokens, said.missed_tokens) == ("tools", 10, 30)


def test_a_tool_that_went_is_a_change_of_tools() -> None:
    """Where the earlier prompt had one more, too."""
    said = compare_fingerprints(prompt("t1 s1 m1"), prompt("t1 t2 s1 m1"))

    assert said.cause == "tools"


def test_another_model_template_or_partition_is_the_cause_of_everything() -> None:
    """Nothing is shared across them."""
    then = prompt("s1 m1")

    model = compare_fingerprints(prompt("s1 m1", model="other", template="other"), then)
    template = compare_fingerprints(prompt("s1 m1", template="other"), then)
    partition = compare_fingerprints(prompt("s1 m1", partition="k"), then)

    assert (model.cause, model.missed_tokens) == ("model", 20)
    assert template.cause == "template"
    assert partition.cause == "partition"


def test_settings_alone_leave_it_open() -> None:
    """The prompt is the same; whether a setting matters only its dialect can say."""
    said = compare_fingerprints(prompt("m1", settings=(("effort", "low"),)), prompt("m1"))

    assert (said.outcome, said.setting) == ("unavailable", "effort")


def test_nobody_reads_anothers_fingerprints() -> None:
    """A response id is no secret; what was in its prompt is."""
    book = FingerprintIndex(10, 60.0)
    book.remember("id", prompt("m1"), 0.0)

    assert book.find("1/default", "id", 1.0) is not None
    assert book.find("2/default", "id", 1.0) is None


def test_fingerprints_are_few_and_short_lived() -> None:
    """They are kept for a limited time, and the oldest go first."""
    book = FingerprintIndex(2, 60.0)
    for n in range(3):
        book.remember(f"id{n}", prompt("m1"), float(n))

    assert len(book) == 2
    assert book.find("1/default", "id0", 2.0) is None
    assert book.find("1/default", "id2", 61.9) is not None
    assert book.find("1/default", "id2", 62.0) is None
