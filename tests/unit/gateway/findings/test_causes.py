"""The words of causes: each has a title, a sentence and a cure, and is in the document."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.findings.causes import CAUSES, CauseFacts, describe
from tests.tables import each_row

DOCUMENT = Path(__file__).parents[4] / "docs/findings.md"


@each_row("cause", CAUSES)
def test_every_cause_has_words(cause: str) -> None:
    words = describe(cause, CauseFacts("messages[0].content", 44, 45, {}))

    assert words.title[0].isupper()
    assert "44 of 45 requests" in words.what
    assert words.advice.endswith(".")
    assert f"`{cause}`" in DOCUMENT.read_text()


@each_row(
    ("at", "length", "where"),
    [
        (0, 300, "near its beginning"),
        (40, 300, "near its beginning"),
        (150, 300, "in the middle"),
        (295, 300, "near its end"),
        (60, 5_000, "near its beginning"),
    ],
)
def test_place_in_a_text_is_said(at: int, length: int, where: str) -> None:
    sums = {"at": 3 * at, "part_tokens": 3 * length, "changed": 3_000, "behind": 3}
    words = describe("system_changes", CauseFacts("system", 3, 4, sums))

    assert f"changes {where} in 3 of 4 requests" in words.what
    assert f"token {at + 1:,} of {length:,})" in words.what


@each_row(("others", "title"), [(3, "The tools change"), (0, "The text of a tool changes")])
def test_a_tool_that_is_left_out_is_no_short_value(others: int, title: str) -> None:
    """A date in a description is cured at the description, a list that changes at the list."""
    sums = {"at": 3, "part_tokens": 600, "changed": 9, "other_tools": others}
    words = describe("tools_changed", CauseFacts("tools", 3, 4, sums))

    assert words.title == title
    assert ("short value" in words.what) == ("Keep dates" in words.advice) == (not others)


def test_breakpoint_behind_a_change_at_the_end_gets_its_own_cure() -> None:
    """Nothing repeats behind the change; the prefix before it is written again and again."""
    sums = {"at": 290, "part_tokens": 300, "changed": 10, "behind": 0}
    words = describe("system_changes", CauseFacts("system", 1, 4, sums))

    assert words.advice.startswith("End the stable part of system with a breakpoint")


@each_row(
    ("sums", "takers", "ceiling", "said"),
    [
        ({"evicted_pressure": 2}, ("bob", "eve"), None, "evicted for bob, eve in"),
        ({"evicted_pressure": 2}, (), None, "evicted for other tenants in"),
        ({"evicted_own_quota": 2}, (), 60, "evicted at the tenant's own ceiling in"),
        ({"evicted_own_quota": 2}, (), None, "evicted for later prompts of the tenant itself in"),
        ({}, (), None, "evicted in"),
    ],
)
def test_evictor_is_named_if_it_may_be(
    sums: dict[str, int], takers: tuple[str, ...], ceiling: int | None, said: str
) -> None:
    facts = CauseFacts("", 2, 3, sums, takers, ceiling_blocks=ceiling)

    assert said in describe("evicted", facts).what


@pytest.mark.parametrize("is_own", [False, True])
def test_a_tenant_without_a_ceiling_is_told_to_raise_none(*, is_own: bool) -> None:
    facts = CauseFacts("", 2, 3, {"evicted_own_quota": 2}, lost_blocks=9, is_own=is_own)
    advice = describe("evicted", facts).advice

    assert "ceiling" not in advice
    assert "more memory" in advice
