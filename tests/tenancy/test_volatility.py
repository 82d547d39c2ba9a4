"""Breaks are where prompts part, not where they grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenancy.volatility import Break, Mark, Volatility, place_of


def prompt(words: str) -> list[Mark]:
    """A letter is a segment of ten tokens."""
    return [
        Mark(f"messages[{n}]", 10 * (n + 1), words[: n + 1].encode()) for n in range(len(words))
    ]


def noted(*prompts: str) -> list[Break]:
    found = Volatility()
    for words in prompts:
        found.note(prompt(words), 10 * len(words))
    return found.breaks()


def test_a_conversation_that_grows_breaks_nowhere() -> None:
    """Every turn ends where the next goes on."""
    assert noted("a", "abc", "abcde", "abcde") == []


def test_a_volatile_beginning_costs_the_whole_prompt() -> None:
    """A clock in the system prompt shows as breaks at the first place."""
    assert noted("abcd", "xbcd", "ybcd") == [Break("messages[0]", 2, 80)]


def test_branches_are_counted_where_they_part() -> None:
    """Behind the shared prefix, with what stands behind it."""
    assert noted("abcd", "abxy", "abz") == [Break("messages[2+]", 2, 30)]


def test_later_indexes_are_one_place() -> None:
    """A report with a line per message number would say nothing."""
    assert place_of("messages[17].content[1]") == "messages[2+].content[1]"
    assert place_of("tools[0]") == "tools[0]"


@given(st.lists(st.text("ab", max_size=8), max_size=40))
def test_what_is_seen_stays_bounded_and_prompts_are_counted(prompts: list[str]) -> None:
    """However prompts branch."""
    found = Volatility(seen_max=16)

    for words in prompts:
        found.note(prompt(words), 10 * len(words))

    assert found.prompts == len(prompts)
    assert sum(one.count for one in found.breaks()) <= len(prompts)
