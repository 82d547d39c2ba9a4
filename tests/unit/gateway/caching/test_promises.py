"""Promises are counted from their beginning to their end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.api import LeaseGrant, Retention
from gateway.caching.prefix_index import PrefixIndex
from gateway.caching.promises import PromiseTally

FIVE = Retention("5m", 300, 300, "request_start")
HOUR = Retention("1h", 3_600, 3_600, "request_start")
EFFORT = Retention("in_memory", 0, 600, "last_use")
OWNERS = (1, 2)


class Desk:
    """An index and a tally, driven as contracts drive them."""

    def __init__(self, per_owner_max: int = 50, slack: int = 1_000) -> None:
        self.epoch, self.now_s = "e1", 0.0
        self.book = PrefixIndex(100, per_owner_max)
        self.tally = PromiseTally(self.book, lambda epoch: epoch == self.epoch, slack)
        self.book.on_drop = self.tally.record_given_up

    def write(
        self, digest: bytes, terms: Retention = FIVE, owner: int = 1, ok: bool = True
    ) -> None:
        key = (b"ns%d" % owner, digest)
        self.book.write(key, 8, owner, self.epoch, {}, terms, self.now_s, is_granted=ok)
        self.tally.record_write(owner, key, terms.name, self.now_s)

    def lose(self, digest: bytes, owner: int = 1) -> None:
        """A request finds the promise and not its blocks."""
        entry = self.book.find((b"ns%d" % owner, digest))
        if entry is not None:
            self.tally.record_broken(entry, self.now_s)

    def of(self, owner: int = 1, name: str = "5m") -> dict[str, int]:
        """Return counts that are not zero."""
        counts = self.tally.counts(self.now_s).get((owner, name), {})
        return {outcome: n for outcome, n in counts.items() if n}


def test_promise_is_kept_when_its_time_passes() -> None:
    """Not before; a write meanwhile renews it."""
    desk = Desk()
    desk.write(b"a")
    desk.now_s = 200
    desk.write(b"a")
    desk.now_s = 499
    before = desk.of()
    desk.now_s = 500

    assert before == {"given": 1, "renewed": 1, "running": 1}
    assert desk.of() == {"given": 1, "renewed": 1, "kept": 1}


def test_broken_promise_counts_once() -> None:
    """A later write begins another promise."""
    desk = Desk()
    desk.write(b"a")
    desk.lose(b"a")
    desk.lose(b"a")
    once = desk.of()
    desk.write(b"a")
    desk.now_s = 1_000

    assert once == {"given": 1, "broken": 1}
    assert desk.of() == {"given": 2, "broken": 1, "kept": 1}


def test_engine_death_breaks_running_promises() -> None:
    """Its memory is lost, whether or not a request came in time."""
    desk = Desk()
    desk.write(b"a")
    desk.epoch = "e2"
    desk.now_s = 301

    assert desk.of() == {"given": 1, "broken": 1}


def test_erased_or_dropped_promise_is_given_up() -> None:
    """Neither kept nor broken."""
    desk = Desk(per_owner_max=2)
    for digest in (b"a", b"b", b"c"):
        desk.write(digest)
    desk.book.erase_namespace(b"ns1")

    assert desk.of() == {"given": 3, "given_up": 3}


def test_unpromised_write_is_not_counted() -> None:
    """Best effort has nothing to break; a clipped or refused lease counts as such."""
    desk = Desk()
    desk.write(b"a", EFFORT)
    desk.write(b"b", ok=False)
    grants = [
        LeaseGrant(lease_id="", retention="5m", outcome=outcome, tokens=0)
        for outcome in ("granted", "clipped", "refused", "refused")
    ]
    desk.tally.count_grants(1, grants)

    assert desk.of() == {"clipped": 1, "refused": 2}
    assert desk.of(name="in_memory") == {}


acts = st.tuples(
    st.sampled_from(["write", "write", "lose", "drop", "wait", "die"]),
    st.sampled_from(OWNERS),
    st.sampled_from([b"a", b"b", b"c", b"d"]),
    st.sampled_from([FIVE, HOUR, EFFORT]),
    st.booleans(),
)


@given(st.lists(acts, max_size=60))
def test_every_promise_has_exactly_one_end(
    life: list[tuple[str, int, bytes, Retention, bool]],
) -> None:
    """given = kept + broken + given up + running, by owner and class, at any time."""
    desk = Desk(per_owner_max=3, slack=2)
    for what, owner, digest, terms, flag in life:
        match what:
            case "write":
                desk.write(digest, terms, owner, flag)
            case "lose":
                desk.lose(digest, owner)
            case "drop":
                desk.book.erase((b"ns%d" % owner, digest))
            case "wait":
                desk.now_s += 100 if flag else 2_000
            case _:
                desk.epoch += "x"
        for one in desk.tally.counts(desk.now_s).values():
            ended = one["kept"] + one["broken"] + one["given_up"]
            assert one["given"] == ended + one["running"]
            assert min(one.values()) >= 0
    desk.now_s += 10_000

    assert all(one["running"] == 0 for one in desk.tally.counts(desk.now_s).values())


def test_ending_one_class_keeps_the_others() -> None:
    desk, key = Desk(), (b"ns1", b"a")
    desk.write(b"a")
    desk.write(b"a", HOUR)
    first = desk.book.end_class(key, "5m", desk.now_s)
    entry = desk.book.find(key)
    kept = set(entry.leases) if entry is not None else set()
    last = desk.book.end_class(key, "1h", desk.now_s)

    assert (first, kept, last) == (False, {"1h"}, True)
    assert (desk.of(), desk.of(name="1h")) == ({"given": 1, "given_up": 1},) * 2
    assert desk.book.find(key) is None
    assert desk.book.end_class(key, "1h", desk.now_s)
    desk.book.check()
