"""Prefixes by use and hits, and breaks where prompts part, not where they grow."""

from __future__ import annotations

import struct
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from tenancy.reuse.prefix_statistics import MARKS_MAX, PrefixBreak, PrefixStatistics, fold_indexes


class End(Struct):
    """The end of a segment."""

    tokens: int
    path: str


def packed(words: str) -> bytes:
    """A letter is a token."""
    return struct.pack(f"{len(words)}I", *map(ord, words))


def note(tree: PrefixStatistics, words: str, found: int = 0, ends: list[int] | None = None) -> None:
    """A letter is a segment, too, unless their ends are told."""
    places = range(1, len(words) + 1) if ends is None else ends
    marks = [End(end, f"messages[{n}]") for n, end in enumerate(places)]
    tree.note(packed(words), marks, len(words), found)
    tree.check()


def noted(*prompts: str) -> PrefixStatistics:
    tree = PrefixStatistics()
    for words in prompts:
        note(tree, words)
    return tree


def test_a_conversation_that_grows_breaks_nowhere() -> None:
    """Every turn ends where the next goes on."""
    assert noted("a", "abc", "abcde", "abcde", "abcdefghijklmnop").breaks() == []


def test_a_volatile_beginning_costs_the_whole_prompt() -> None:
    """A clock in the system prompt shows as breaks at the first place."""
    assert noted("abcd", "xbcd", "ybcd").breaks() == [PrefixBreak("messages[0]", 2, 8)]


def test_branches_are_counted_where_they_part() -> None:
    """Behind the shared prefix, with what stands behind it."""
    assert noted("abcd", "abxy", "abz").breaks() == [PrefixBreak("messages[2+]", 2, 3)]


def test_later_indexes_are_one_place() -> None:
    """A report with a line per message number would say nothing."""
    assert fold_indexes("messages[17].content[1]") == "messages[2+].content[1]"
    assert fold_indexes("tools[0]") == "tools[0]"


def test_the_same_words_in_other_segments_are_no_break() -> None:
    """A client that sends its text in two parts where it sent one has changed no token."""
    tree = PrefixStatistics()
    note(tree, "abcdef", ends=[4, 6])
    note(tree, "abcdef", ends=[2, 4, 6])
    note(tree, "abcdxy", ends=[3, 4, 6])

    uses = {one.tokens: one.uses for one in tree.top()}

    assert tree.breaks() == [PrefixBreak("messages[2+]", 1, 2)]
    assert uses[4] == 3


def test_an_empty_segment_is_the_prefix_before_it() -> None:
    """Its end is where the last one was: nothing is counted twice, and nothing parts there."""
    tree = PrefixStatistics()
    note(tree, "ab", ends=[0, 1, 1, 2, 2])
    note(tree, "abc", ends=[0, 1, 1, 2, 2, 3, 3])

    assert tree.breaks() == []
    assert sorted((one.tokens, one.uses) for one in tree.top()) == [(1, 2), (2, 2), (3, 1)]


def test_no_more_of_a_prompt_is_looked_at_than_was_given() -> None:
    """Boundaries behind the tokens, and more boundaries than anybody needs."""
    tree = PrefixStatistics()
    words = "a" * (2 * MARKS_MAX)
    marks = [End(n + 1, f"messages[{n}]") for n in range(len(words))]

    tree.note(packed(words[:10]), marks, len(words), 0)
    few = len(tree)
    tree.note(packed(words), marks, len(words), 0)

    tree.check()
    assert (few, len(tree)) == (10, MARKS_MAX)


PROMPTS = st.lists(st.tuples(st.text("ab", max_size=9), st.integers(0, 9)), max_size=40)


@given(PROMPTS)
def test_uses_hits_and_breaks_are_those_of_a_list_of_all_prompts(
    prompts: list[tuple[str, int]],
) -> None:
    """Counted in the tree at one node each, against counting every prefix of every prompt."""
    tree = PrefixStatistics()
    uses: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    lost, parted = 0, 0
    for words, found in prompts:
        known = max(n for n in range(len(words) + 1) if not n or uses[words[:n]])
        if known < len(words) and any(
            len(other) > known and other.startswith(words[:known]) for other in uses
        ):
            lost, parted = lost + len(words) - known, parted + 1
        note(tree, words, found)
        for n in range(1, len(words) + 1):
            uses[words[:n]] += 1
            hits[words[:n]] += n <= found

    told = Counter((one.tokens, one.uses, one.hits) for one in tree.top(10**6))

    assert told == Counter((len(one), uses[one], hits[one]) for one in uses)
    assert tree.prompts() == len(prompts)
    assert sum(one.tokens for one in tree.breaks()) == lost
    assert sum(one.count for one in tree.breaks()) == parted


@given(st.lists(st.text("ab", max_size=12), max_size=60))
def test_what_goes_is_counted_on_where_it_hung(prompts: list[str]) -> None:
    """However prompts branch, their number stays, and so do those of what is left."""
    tree = PrefixStatistics(prefixes_max=16)
    uses: Counter[str] = Counter()
    for words in prompts:
        note(tree, words)
        uses.update(words[: n + 1] for n in range(len(words)))

    assert len(tree) <= 16
    assert tree.prompts() == len(prompts)
    assert all(one.uses <= max(uses.values()) for one in tree.top(16))


def test_the_prefix_that_all_prompts_share_outlives_their_own_ends() -> None:
    """Leaves go first, even if what they hang on is older."""
    tree = PrefixStatistics(prefixes_max=8)
    for number in range(100):
        note(tree, "system" + chr(1_000 + number), ends=[6, 7])

    [most, *_] = tree.top(1)

    assert tree.top(8)[0].hits == 0
    assert max((one.uses, one.tokens) for one in tree.top(8)) == (100, 6)
    assert most.path.startswith("messages[")
