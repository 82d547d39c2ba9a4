"""Prefixes by uses and hits, and breaks where prompts diverge."""

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
    """Encode a prompt; a letter is a token."""
    return struct.pack(f"{len(words)}I", *map(ord, words))


def note(tree: PrefixStatistics, words: str, found: int = 0, ends: list[int] | None = None) -> None:
    """Count a prompt; each letter is also a segment unless `ends` are given."""
    places = range(1, len(words) + 1) if ends is None else ends
    marks = [End(end, f"messages[{n}]") for n, end in enumerate(places)]
    tree.note(packed(words), marks, len(words), found)
    tree.check()


def noted(*prompts: str) -> PrefixStatistics:
    tree = PrefixStatistics()
    for words in prompts:
        note(tree, words)
    return tree


def test_growing_chat_has_no_breaks() -> None:
    """Every turn extends the last one."""
    assert noted("a", "abc", "abcde", "abcde", "abcdefghijklmnop").breaks() == []


def test_volatile_beginning_breaks_at_the_first_place() -> None:
    """Such as a clock in the system prompt."""
    assert noted("abcd", "xbcd", "ybcd").breaks() == [PrefixBreak("messages[0]", 2, 8)]


def test_breaks_count_at_the_divergence() -> None:
    """With the tokens behind it."""
    assert noted("abcd", "abxy", "abz").breaks() == [PrefixBreak("messages[2+]", 2, 3)]


def test_later_indexes_fold_into_one_place() -> None:
    """A report with a line per message number would be useless."""
    assert fold_indexes("messages[17].content[1]") == "messages[2+].content[1]"
    assert fold_indexes("tools[0]") == "tools[0]"


def test_same_text_in_other_segments_is_no_break() -> None:
    """Two parts instead of one change no token."""
    tree = PrefixStatistics()
    note(tree, "abcdef", ends=[4, 6])
    note(tree, "abcdef", ends=[2, 4, 6])
    note(tree, "abcdxy", ends=[3, 4, 6])

    uses = {one.tokens: one.uses for one in tree.top()}

    assert tree.breaks() == [PrefixBreak("messages[2+]", 1, 2)]
    assert uses[4] == 3


def test_empty_segment_adds_no_prefix() -> None:
    """It ends where the last one did."""
    tree = PrefixStatistics()
    note(tree, "ab", ends=[0, 1, 1, 2, 2])
    note(tree, "abc", ends=[0, 1, 1, 2, 2, 3, 3])

    assert tree.breaks() == []
    assert sorted((one.tokens, one.uses) for one in tree.top()) == [(1, 2), (2, 2), (3, 1)]


def test_ignores_boundaries_beyond_the_data() -> None:
    """Also more boundaries than `MARKS_MAX`."""
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
def test_counts_match_a_list_of_all_prompts(
    prompts: list[tuple[str, int]],
) -> None:
    """One node per prompt against every prefix of every prompt."""
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
def test_evicted_counts_move_to_the_parent(prompts: list[str]) -> None:
    """However prompts branch, their number stays, and so do the counts of remaining prefixes."""
    tree = PrefixStatistics(prefixes_max=16)
    uses: Counter[str] = Counter()
    for words in prompts:
        note(tree, words)
        uses.update(words[: n + 1] for n in range(len(words)))

    assert len(tree) <= 16
    assert tree.prompts() == len(prompts)
    assert all(one.uses <= max(uses.values()) for one in tree.top(16))


def test_shared_prefix_outlives_its_leaves() -> None:
    """Leaves are evicted first, even if their parent is older."""
    tree = PrefixStatistics(prefixes_max=8)
    for number in range(100):
        note(tree, "system" + chr(1_000 + number), ends=[6, 7])

    [most, *_] = tree.top(1)

    assert tree.top(8)[0].hits == 0
    assert max((one.uses, one.tokens) for one in tree.top(8)) == (100, 6)
    assert most.path.startswith("messages[")
