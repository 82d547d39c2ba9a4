"""Slots of host memory: floors, ceilings, weights, probation, and who gives the next slot."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.tree.places import HostPlace, RecordPlace
from engine.cache.tree.prefix_tree import Node, PrefixTree
from engine.errors import InvariantViolation
from engine.levels.host.accounts import HostAccounts
from engine.levels.host.slot_pool import SlotPool
from engine.moves import SlotFormat, SlotLayout


class Shelf:
    """Accounts of a few slots of a byte, with copies that hang on nothing.

    `packed`: slabs of two slots of 128 bytes, or four of 64.
    """

    def __init__(self, slots: int, *, packed: bool = False) -> None:
        self.dropped: list[str] = []
        layout, formats = SlotLayout.uniform(slots, 1), [SlotFormat("", 1)]
        if packed:
            layout = SlotLayout(slots * 128, 256, 64)
            formats = [SlotFormat("", 128), SlotFormat("half", 64, "near")]
        self.accounts = HostAccounts(
            SlotPool(layout, formats), lambda copy, size: self.dropped.append(self.names[copy])
        )
        self.tree = PrefixTree(b"n", 1)
        self.names: dict[Node, str] = {}
        self.copies: dict[str, Node] = {}

    def put(
        self, name: str, at_s: float, *, hits: int = 0, fresh: bool = False, form: int = 0
    ) -> bool:
        """Make a copy for the payer that its name begins with; return whether it got a slot."""
        payer = name[:1].encode()
        slot = self.accounts.take(payer, form, at_s if fresh else None)
        if slot is None:
            return False
        copy = self.tree.add(self.tree.root, (len(self.names),))
        copy.last_use_s, copy.hits = at_s, hits
        self.names[copy], self.copies[name] = name, copy
        self.accounts.give(copy, HostPlace(slot, form, has_windows=False))
        return True

    def fill(self, first: str, numbers: range, *, form: int = 0) -> None:
        """Make copies that are used at these instants."""
        for number in numbers:
            self.put(f"{first}{number}", number, form=form)


def test_the_payer_furthest_above_its_floor_gives() -> None:
    """By weight: the one with three times the weight may have three times as much."""
    shelf = Shelf(6)
    shelf.accounts.set_share(b"a", 0, None, 3.0)
    shelf.fill("a", range(4))
    shelf.put("b0", 10)
    shelf.put("b1", 11)
    shelf.put("c0", 12)

    assert shelf.dropped == ["b0"]


def test_nothing_inside_a_floor_is_taken_by_another() -> None:
    """Then the taker replaces its own, or gets nothing."""
    shelf = Shelf(3)
    shelf.accounts.set_share(b"a", 3, None, 1.0)
    shelf.fill("a", range(3))

    assert not shelf.put("b0", 10)
    assert shelf.dropped == []


def test_a_ceiling_is_never_exceeded() -> None:
    """Its payer replaces its own while slots are free."""
    shelf = Shelf(8)
    shelf.accounts.set_share(b"a", 0, 2, 1.0)
    shelf.fill("a", range(4))

    assert shelf.dropped == ["a0", "a1"]


def test_a_scan_does_not_flush_what_is_used() -> None:
    """Copies that were never matched go first while they are more than a quarter."""
    shelf = Shelf(4)
    shelf.put("a used", 0, hits=1)
    shelf.put("a also", 1, hits=1)
    for number in range(10):
        shelf.put(f"a{number}", 10 + number)

    assert not {"a used", "a also"} & set(shelf.dropped)


def test_two_copies_do_not_take_each_others_place_for_ever() -> None:
    """Only an older copy gives way to a block that is copied ahead of need."""
    shelf = Shelf(1)
    shelf.put("a new", 5)

    assert not shelf.put("a old", 4, fresh=True)
    assert shelf.put("a newer", 6, fresh=True)


def test_two_payers_do_not_take_each_others_slab_for_ever() -> None:
    """What is copied ahead of need takes no slab of a payer that would have less than the taker."""
    shelf = Shelf(2, packed=True)
    shelf.fill("a", range(4), form=1)

    assert not shelf.put("b0", 10, fresh=True)
    assert shelf.dropped == []


def test_a_slot_that_a_move_reads_is_not_dropped() -> None:
    """It may be dropped again when the move has ended."""
    shelf = Shelf(1)
    shelf.put("a0", 0)
    slot = shelf.copies["a0"].slot
    shelf.accounts.hold(slot)

    assert not shelf.put("a1", 1)
    shelf.accounts.release(slot)
    assert shelf.put("a2", 2)


def test_a_slot_is_freed_once() -> None:
    """A second release would give one slot to two."""
    shelf = Shelf(2)
    slot = shelf.accounts.take(b"a")
    assert slot is not None
    shelf.accounts.release(slot)

    with pytest.raises(InvariantViolation, match="freed twice"):
        shelf.accounts.release(slot)


def test_the_recount_finds_a_lost_reference() -> None:
    """The books are compared with the copies and the moves."""
    shelf = Shelf(2)
    shelf.put("a0", 0)
    shelf.accounts.check(shelf.names, {})
    shelf.accounts.hold(shelf.copies["a0"].slot)

    with pytest.raises(InvariantViolation, match="slot"):
        shelf.accounts.check(shelf.names, {})


# -- several formats ----------------------------------------------------------------------------


def names(first: str, numbers: range) -> list[str]:
    """Return the names of copies."""
    return [f"{first}{number}" for number in numbers]


def test_floors_and_ceilings_count_bytes() -> None:
    """A payer with packed copies has twice as many within the same bytes."""
    shelf = Shelf(8, packed=True)
    shelf.accounts.set_share(b"a", 0, 256, 1.0)
    shelf.fill("a", range(6), form=1)
    assert shelf.dropped == ["a0", "a1"]
    shelf.put("a plain", 10)

    assert shelf.dropped == names("a", range(4))
    assert {share.used for share in shelf.accounts.shares()} == {256}


def test_a_copy_of_the_wanted_format_goes_first() -> None:
    """Where the other formats were used later: one copy goes, not a slab of them."""
    shelf = Shelf(4, packed=True)
    shelf.fill("a", range(4), form=1)
    shelf.fill("a", range(4, 6))
    shelf.put("a6", 6, form=1)

    assert shelf.dropped == ["a0"]
    shelf.accounts.check(shelf.names, {})


def test_a_slab_of_colder_copies_changes_its_format() -> None:
    """Otherwise what was used long ago would keep its room from what is used now, for ever."""
    shelf = Shelf(4, packed=True)
    shelf.fill("a", range(2))
    shelf.fill("a", range(2, 6), form=1)
    shelf.put("a6", 6, form=1)

    assert sorted(shelf.dropped) == ["a0", "a1"]
    assert shelf.accounts.pool.used_slots == [0, 5]
    shelf.accounts.check(shelf.names, {})


def test_a_format_without_any_slot_gets_a_slab() -> None:
    """The first request of a new fidelity finds memory full of others' copies."""
    shelf = Shelf(4, packed=True)
    shelf.fill("a", range(4))
    assert shelf.put("b0", 10, form=1)

    assert sorted(shelf.dropped) == ["a0", "a1"]


def test_a_slab_with_bytes_inside_a_floor_stays() -> None:
    """Of another payer: all of what a slab holds counts, not one copy."""
    shelf = Shelf(4, packed=True)
    shelf.fill("a", range(4))
    shelf.accounts.set_share(b"a", 3 * 128, None, 1.0)
    assert not shelf.put("b0", 10, form=1)
    shelf.accounts.set_share(b"a", 2 * 128, None, 1.0)

    assert shelf.put("b1", 10, form=1)


def test_a_slab_that_a_move_reads_stays() -> None:
    """The next one goes."""
    shelf = Shelf(4, packed=True)
    for number in range(4):
        shelf.put("ab"[number // 2] + str(number), number)
    shelf.accounts.hold(shelf.copies["a1"].slot)
    assert shelf.put("c0", 10, form=1)

    assert sorted(shelf.dropped) == ["b2", "b3"]


def test_what_hangs_on_a_slab_goes_with_it() -> None:
    """A copy is no use without those before it; with a record it waits on disk for them."""
    shelf = Shelf(6, packed=True)
    shelf.fill("a", range(6))
    for child, parent in (("a4", "a1"), ("a5", "a4")):
        copy, above = shelf.copies[child], shelf.copies[parent]
        copy.parent, above.children[copy.run] = above, copy
        above.copied_children += 1
        shelf.accounts.update(above)
    for name in ("a2", "a3"):
        shelf.accounts.hold(shelf.copies[name].slot)
    shelf.copies["a5"].record = RecordPlace(7, 0, has_windows=False)
    assert not shelf.put("b0", 10, form=1), "what is known of a record stays"
    shelf.copies["a5"].record = None
    assert shelf.put("b0", 10, form=1)

    assert shelf.dropped == ["a5", "a4", "a1", "a0"]


ACTIONS = st.tuples(
    st.sampled_from(["put", "put", "put", "hold", "release", "touch", "store", "set"]),
    st.sampled_from("abc"),
    st.integers(0, 1),
    st.integers(0, 30),
)


def run(actions: list[tuple[str, str, int, int]]) -> None:
    """Do anything in any order; after each, the sums are right and no payer has lost what is inside
    its floor to another, or has more than its ceiling."""
    shelf, held = Shelf(8, packed=True), Counter[int]()
    accounts = shelf.accounts

    def used() -> dict[bytes, tuple[int, int]]:
        return {share.payer: (share.used, share.floor) for share in accounts.shares()}

    for at_s, (what, payer, form, number) in enumerate(actions):
        before = used()
        own = [copy for copy in shelf.copies.values() if copy.slot >= 0]
        copy = own[number % len(own)] if own else None
        if what == "put":
            shelf.put(f"{payer}{at_s}", at_s, form=form, fresh=number % 3 == 0)
        elif what == "set":
            ceiling = None if number > 20 else 64 * (4 + number % 9)
            accounts.set_share(payer.encode(), 64 * (number % 5), ceiling, 1.0 + number % 2)
            continue
        elif what == "release" and held:
            slot = sorted(held)[number % len(held)]
            held -= Counter([slot])
            accounts.release(slot)
        elif copy is not None and what == "hold":
            held[copy.slot] += 1
            accounts.hold(copy.slot)
        elif copy is not None and what == "touch":
            accounts.touch(copy, at_s)
        elif copy is not None and what == "store":
            copy.record = RecordPlace(1, 0, has_windows=False)
            accounts.update(copy)
        accounts.check(shelf.names, dict(held))
        after = used()
        for name, (had, floor) in before.items():
            has = after.get(name, (0, 0))[0]
            if name != payer.encode():
                assert has >= min(had, floor), (what, payer, name)
        share = next((s for s in accounts.shares() if s.payer == payer.encode()), None)
        if what == "put" and share is not None and share.used > before.get(share.payer, (0, 0))[0]:
            assert share.ceiling is None or share.used <= share.ceiling


@given(st.lists(ACTIONS, max_size=80))
def test_sums_floors_and_ceilings_hold_after_any_operations(
    actions: list[tuple[str, str, int, int]],
) -> None:
    """Copies of two sizes, three payers, slabs that change their format."""
    run(actions)


def test_a_slab_that_ignores_floors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: any cold slab may go."""
    monkeypatch.setattr(HostAccounts, "_may_go", lambda self, *rest: True)
    chance = random.Random(2)
    kinds = ("put", "put", "put", "touch", "set")
    lists = [
        [
            (chance.choice(kinds), chance.choice("abc"), chance.randrange(2), chance.randrange(31))
            for _ in range(60)
        ]
        for _ in range(300)
    ]

    with pytest.raises(AssertionError):
        deque(map(run, lists), maxlen=0)
