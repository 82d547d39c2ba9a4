"""`PromptChanges`: where prompts part, what repeats behind the change, and what was lost."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenancy.reuse.prompt_changes import (
    CHECK_TOKENS,
    WINDOWED_TOKENS_MAX,
    Divergence,
    ObservedPrompt,
    PrefixBreak,
    PromptChanges,
    PromptPart,
    PromptReuse,
    Tier,
    ToolDigest,
    fold_indexes,
    parts_of,
)
from tests.tables import each_row

NAMESPACE = b"namespace"
Piece = tuple[Tier, Sequence[int]] | tuple[Tier, Sequence[int], bool]


def words(seed: int, count: int) -> list[int]:
    """Return random tokens."""
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(count)]


class Tenant:
    """Prompts of one tenant, one after the other."""

    def __init__(self) -> None:
        self.changes = PromptChanges(7)
        self.now_s = 0.0

    def ask(
        self,
        *pieces: Piece,
        cached: int = 0,
        epoch: str = "e",
        losses: dict[str, int] | None = None,
        namespace: bytes = NAMESPACE,
        overlaps_s: float = 0.0,
        tools: Sequence[ToolDigest] = (),
    ) -> PromptReuse:
        """Note a prompt of these pieces: (tier, tokens, whether it is an answer)."""
        tokens: list[int] = []
        marks: list[tuple[int, str, Tier, bool]] = []
        for number, (tier, more, *rest) in enumerate(pieces):
            tokens += more
            marks.append((len(tokens), f"{tier}[{number}]", tier, bool(rest and rest[0])))
        self.now_s += 10
        return self.changes.note(
            namespace,
            ObservedPrompt(
                data=struct.pack(f"{len(tokens)}I", *tokens),
                parts=parts_of(marks, len(tokens)),
                total=len(tokens),
                cached=cached,
                started_s=self.now_s - overlaps_s,
                ended_s=self.now_s + 1,
                epoch=epoch,
                losses=losses,
                tools=tuple(tools),
            ),
        )


def parted(reuse: PromptReuse) -> Divergence:
    """Return the divergence of a prompt that has one that costs."""
    assert reuse.divergence is not None
    assert reuse.divergence.is_repetition
    return reuse.divergence


STABLE = words(1, 400)


@each_row("at", [0, 5, 40, 200, 390])
def test_place_and_extent_of_a_change_are_found(at: int) -> None:
    """A value of three tokens at any place of a system text; near the end little repeats."""
    tenant, found = Tenant(), PromptReuse()
    for number in range(3):
        text = [*STABLE[:at], *words(100 + number, 3), *STABLE[at:]]
        found = tenant.ask(("system", text), ("messages", words(900 + number, 20)))

    assert found.divergence is not None
    assert found.divergence.cause == "system_changes"
    assert at - CHECK_TOKENS < found.divergence.at <= at
    if 400 - at > 64:
        assert found.divergence.is_repetition
        assert found.divergence.repeated == pytest.approx(400 - at, abs=24)
        assert found.divergence.changed <= 24
    else:
        assert not found.divergence.is_repetition


def test_another_text_is_no_change() -> None:
    """Two applications of one tenant share nothing but their tenant."""
    tenant = Tenant()
    for number in range(6):
        found = tenant.ask(("system", words(number % 2, 300)), ("messages", words(50 + number, 20)))

        assert found.divergence is None or not found.divergence.is_repetition
        assert found.is_new_head == (number < 2)


def test_text_with_one_word_again_and_again_is_no_repetition() -> None:
    """A longer prompt of one word repeats nothing behind the end of a shorter one."""
    tenant = Tenant()
    for length in (300, 500, 400):
        found = tenant.ask(("messages", [9] * length))

        assert found.divergence is None or not found.divergence.is_repetition


def test_order_of_tools_is_told_from_their_content() -> None:
    """By what the tools say: moved keys are other tokens too."""
    tools = [words(number, 60) for number in range(4)]
    digests = [ToolDigest(number, number) for number in range(4)]
    tenant = Tenant()

    def ask(texts: Sequence[Sequence[int]], said: Sequence[ToolDigest], seed: int) -> Divergence:
        pieces: list[Piece] = [("tools", text) for text in texts]
        return parted(tenant.ask(*pieces, ("messages", words(seed, 30)), tools=said))

    tenant.ask(*[("tools", tool) for tool in tools], ("messages", words(70, 30)), tools=digests)
    moved = ask(tools[::-1], digests[::-1], 71)
    keys = ask([[*tools[0][:9], 5, *tools[0][9:]], *tools[1:]], digests, 72)
    edited = ask([words(99, 60), *tools[1:]], [ToolDigest(0, 99), *digests[1:]], 73)
    fewer = ask(tools[1:], digests[1:], 74)

    assert [one.cause for one in (moved, keys)] == ["tools_reordered"] * 2
    assert moved.repeated == 240
    assert [one.cause for one in (edited, fewer)] == ["tools_changed"] * 2
    assert [one.has_other_tools for one in (edited, fewer)] == [False, True]
    assert edited.at == 0


def test_edited_and_shortened_histories_are_told_apart() -> None:
    def turn(number: int) -> list[Piece]:
        return [("messages", words(number, 40)), ("messages", words(500 + number, 40), True)]

    tenant, edited = Tenant(), Tenant()
    found = other = PromptReuse()
    history = [piece for number in range(5) for piece in turn(number)]
    for number in range(2, 5):
        sent = history[2 * number - 4 : 2 * number + 1]
        found = tenant.ask(("system", STABLE), *sent)
        changed: Piece = ("messages", words(800 + number, 40))
        other = edited.ask(("system", STABLE), changed, *history[1 : 2 * number + 1])

    assert (parted(found).cause, parted(found).is_shortened) == ("history_edited", True)
    assert (parted(other).cause, parted(other).is_shortened) == ("history_edited", False)


def test_conversation_that_goes_on_is_no_change() -> None:
    """Nor is the same question with another answer before it, as in a scripted load."""
    tenant = Tenant()
    for run in range(3):
        pieces: list[Piece] = [("system", STABLE)]
        for turn in range(4):
            pieces.append(("messages", words(turn, 80)))
            found = tenant.ask(*pieces)
            assert found.divergence is None or not found.divergence.is_repetition
            pieces.append(("messages", words(1_000 + 10 * run + turn, 80), True))


def test_lost_prefix_has_its_causes_and_its_age() -> None:
    tenant = Tenant()
    prompt: tuple[Piece, ...] = (("system", STABLE), ("messages", words(3, 20)))
    tenant.ask(*prompt, losses={"evicted_pressure": 4})
    kept = tenant.ask(*prompt, cached=416)
    evicted = tenant.ask(*prompt, cached=16, losses={"evicted_pressure": 9})
    restarted = tenant.ask(*prompt, epoch="f")

    assert (kept.known, kept.lost) == (420, 0)
    assert (evicted.lost, evicted.lost_by) == (403, {"evicted_pressure": 5})
    assert evicted.idle_s == 9
    assert restarted.lost_by == {"restarted": 1}


def test_prompts_at_the_same_time_lose_nothing() -> None:
    """The second one began before the first had computed the prefix."""
    tenant = Tenant()
    prompt: tuple[Piece, ...] = (("system", STABLE), ("messages", words(3, 20)))
    tenant.ask(*prompt)

    assert tenant.ask(*prompt, overlaps_s=30.0) == PromptReuse()


def test_namespaces_are_apart() -> None:
    tenant = Tenant()
    tenant.ask(("system", STABLE), namespace=b"one")
    found = tenant.ask(("system", [1, *STABLE]), namespace=b"two")

    assert found.divergence is None
    assert found.is_new_head


def note_words(*prompts: str) -> PromptChanges:
    """Return the changes of these prompts; each letter is a message of a token."""
    tenant = Tenant()
    for letters in prompts:
        tenant.ask(*[("messages", [ord(letter)]) for letter in letters])
    return tenant.changes


def test_growing_chat_has_no_breaks() -> None:
    """Every turn extends the last one."""
    assert note_words("a", "abc", "abcde", "abcde", "abcdefghijklmnop").breaks() == []


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        (("abcd", "xbcd", "ybcd"), PrefixBreak("messages[0]", 2, 8)),
        (("abcd", "abxy", "abz"), PrefixBreak("messages[2+]", 2, 3)),
    ],
)
def test_breaks_count_where_prompts_part(prompts: tuple[str, ...], found: PrefixBreak) -> None:
    """With the tokens behind the place, such as a clock in the system prompt."""
    assert note_words(*prompts).breaks() == [found]


def test_later_indexes_fold_into_one_place() -> None:
    """A report with a line per message number would be useless."""
    assert fold_indexes("messages[17].content[1]") == "messages[2+].content[1]"
    assert fold_indexes("tools[0]") == "tools[0]"


def test_same_text_in_other_parts_is_no_break() -> None:
    """Two parts instead of one change no token."""
    tenant = Tenant()
    text = [*map(ord, "abcdef")]
    tenant.ask(("messages", text[:4]), ("messages", text[4:]))
    found = tenant.ask(("messages", text[:2]), ("messages", text[2:4]), ("messages", text[4:]))

    assert (found.divergence, found.known, tenant.changes.breaks()) == (None, 6, [])


@given(st.lists(st.tuples(st.text("ab", max_size=9), st.integers(0, 9)), max_size=40))
def test_uses_and_hits_match_a_list_of_all_prompts(prompts: list[tuple[str, int]]) -> None:
    """Of every prefix of every prompt."""
    tenant, uses, hits = Tenant(), Counter[str](), Counter[str]()
    for letters, cached in prompts:
        tenant.ask(*[("messages", [ord(letter)]) for letter in letters], cached=cached)
        for n in range(1, len(letters) + 1):
            uses[letters[:n]] += 1
            hits[letters[:n]] += n <= cached

    found = Counter((one.tokens, one.uses, one.hits) for one in tenant.changes.top(10**6))
    assert found == Counter((len(one), uses[one], hits[one]) for one in uses)


def test_parts_follow_the_rendering() -> None:
    """A template that writes the tools behind the system text, and text behind the last part."""
    marks: list[tuple[int, str, Tier, bool]] = [
        (30, "tools[0]", "tools", False),
        (40, "tools[1]", "tools", False),
        (20, "system", "system", False),
        (40, "empty", "messages", False),
        (55, "messages[0]", "messages", False),
        (90, "beyond", "messages", False),
    ]

    assert parts_of(marks, 60) == (
        PromptPart("system", "system", 0, 20),
        PromptPart("tools", "tools", 20, 40),
        PromptPart("messages[0]", "messages", 40, 55),
    )
    assert parts_of([], 5) == (PromptPart("prompt", "messages", 0, 5),)
    assert parts_of([], 0) == ()


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    """Long texts and conversations that are never the same, in more namespaces than are kept."""
    text = words(5, WINDOWED_TOKENS_MAX)
    tracemalloc.start()
    tenant = Tenant()
    for number in range(200):
        pieces: list[Piece] = [("system", [number, *text[:3_000]])]
        pieces += [("messages", [number, place]) for place in range(100)]
        tenant.ask(*pieces, namespace=b"%d" % (number % 16))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert used < 5 * 2**20


def test_many_namespaces_at_a_time_are_compared() -> None:
    """A partition for each of a hundred users, whose requests alternate."""
    tenant = Tenant()
    for turn in range(3):
        for user in range(100):
            system = [turn, *STABLE]
            found = tenant.ask(("system", system), ("messages", [user]), namespace=b"%d" % user)

            assert turn == 0 or parted(found).cause == "system_changes"


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=12), st.integers(0, 2**32))
def test_any_prompts_give_counts_in_range(texts: list[list[int]], seed: int) -> None:
    """Two tokens and short texts: parts that are empty, equal, and prefixes of each other."""
    chance, tenant = random.Random(seed), Tenant()
    tiers: tuple[Tier, ...] = ("tools", "system", "messages")
    for _ in range(30):
        pieces = [
            (tier, chance.choice(texts), chance.random() < 0.5)
            for tier in tiers
            for _ in range(chance.randrange(3))
            if texts
        ]
        total = sum(len(piece[1]) for piece in pieces)
        found = tenant.ask(*pieces, cached=chance.randrange(total + 1))

        assert 0 <= found.lost <= found.known <= total
        if found.divergence is not None:
            assert 0 <= found.divergence.at <= found.divergence.part_tokens
            assert 0 <= found.divergence.shared <= total
