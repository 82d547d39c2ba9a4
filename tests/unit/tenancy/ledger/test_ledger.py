"""`Ledger`: one hold, one entry, with repeated, failing and abandoned requests."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    invariant,
    precondition,
    rule,
)
from msgspec import structs

from tenancy.accounting.usage import usage
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import LedgerUnavailable, StoreBusy, StoreError
from tenancy.ledger.holds import ProgressNote
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.storage.interface import Store, Transaction
from tenancy.types import TokenCounts, UsageEntry
from tests.unit.tenancy.book_machine import BookMachine, run_on_server
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.ledger.written import PATIENCE_S, done, entries, holds
from tests.unit.tenancy.storage.new_sqlite import new_sqlite
from tests.unit.tenancy.storage.postgres_server import Server

BROKEN = StoreError("not_written", "the disk")
OPEN_HOLD = (
    "insert into holds (request_id, tenant_id, key_id, model, started_ms, booked_ms)"
    " values ('a', 1, 1, 'm', 10, 10)"
)


def hold(request_id: str) -> Hold:
    return Hold(request_id, 1, 1, "m", 10)


def entry(request_id: str, prompt: int = 10, output: int = 3, ended_ms: int = 20) -> UsageEntry:
    return UsageEntry(
        request_id=request_id,
        tenant_id=1,
        key_id=1,
        model="m",
        ending="done",
        started_ms=10,
        ended_ms=ended_ms,
        prompt_tokens=prompt,
        cache_read_tokens=prompt // 2,
        cache_write_tokens=0,
        fresh_tokens=prompt - prompt // 2,
        output_tokens=output,
        physical_cached_tokens=0,
    )


def refusal(future: Future[None]) -> str:
    with pytest.raises(LedgerUnavailable) as caught:
        done(future)
    return caught.value.code


@contextmanager
def failing(
    store: Store, error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Make every commit fail as a disk error would."""

    class Broken:
        def __enter__(self) -> Transaction:
            raise error()

        def __exit__(self, *_: object) -> None:
            raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(store, "change", Broken)
        yield


def test_refuses_a_second_writer_of_a_file(tmp_path: Path, wall: Wall) -> None:
    """It would close the first one's open holds."""
    store, beside = new_sqlite(tmp_path / "test.db"), new_sqlite(tmp_path / "test.db")
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    done(ledger.hold(hold("a")))
    with pytest.raises(StoreError, match="another server"):
        Ledger(beside, wall)
    held = holds(store)
    ledger.close()
    for one in (beside, store):
        one.close()

    assert held == 1


def test_next_writer_opens_after_close(store: Store, ledger: Ledger, wall: Wall) -> None:
    """Without waiting."""
    ledger.close()
    ledger.close()
    Ledger(store, wall).close()

    assert refusal(ledger.hold(hold("a"))) == "closed"


def test_close_writes_what_was_handed_in(store: Store, wall: Wall) -> None:
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    futures = [ledger.settle(entry(str(number))) for number in range(500)]
    ledger.close()

    assert all(future.done() and future.exception() is None for future in futures)
    assert len(entries(store)) == 500


def test_impossible_entry_fails_alone(store: Store, ledger: Ledger) -> None:
    """Other requests of its batch must not fail."""
    wrong = structs.replace(entry("wrong"), fresh_tokens=1)
    stranger = structs.replace(entry("stranger"), tenant_id=99)
    sent = [ledger.settle(entry(str(number))) for number in range(20)]
    refused = [ledger.settle(wrong), ledger.settle(stranger)]
    sent += [ledger.settle(entry(str(number))) for number in range(20, 40)]
    for future in sent:
        done(future)

    assert [refusal(future) for future in refused] == ["impossible_entry"] * 2
    assert set(entries(store)) == {str(number) for number in range(40)}


@pytest.mark.parametrize(
    "error", [StoreBusy("not_written", "others"), BROKEN], ids=["busy", "broken"]
)
def test_disk_failure_confirms_nothing(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    """L10: fail closed, and continue when the disk does."""
    with failing(store, lambda: error, monkeypatch):
        codes = [refusal(ledger.hold(hold("a"))), refusal(ledger.settle(entry("b")))]
    done(ledger.settle(entry("c")))

    assert codes == ["not_durable"] * 2
    assert set(entries(store)) == {"c"}


def test_checks_the_file_after_a_failed_fsync(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that did not reach the disk may look clean in memory. A busy one took none."""
    opened: list[int] = []
    reopen = store.reopen

    def count() -> None:
        opened.append(1)
        reopen()

    monkeypatch.setattr(store, "reopen", count)
    with failing(store, lambda: StoreBusy("not_written", "others"), monkeypatch):
        refusal(ledger.hold(hold("a")))
    with failing(store, lambda: BROKEN, monkeypatch):
        refusal(ledger.hold(hold("a")))
    for number in range(3):
        done(ledger.settle(entry(str(number))))

    assert opened == [1]


def test_damaged_file_accepts_no_entry(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are refused until it is whole again; the writer keeps running."""

    def damaged() -> None:
        raise StoreError("damaged", "test")

    with monkeypatch.context() as patch:
        patch.setattr(store, "reopen", damaged)
        with failing(store, lambda: BROKEN, monkeypatch):
            refusal(ledger.hold(hold("a")))
        codes = [refusal(ledger.settle(entry(str(number)))) for number in range(2)]
    done(ledger.settle(entry("c")))

    assert codes == ["not_durable"] * 2


def test_failed_start_releases_the_lock(
    store: Store, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a full disk, the same process can start again."""
    create_tenant(store, wall, "ada")
    with store.change() as db:
        db.execute(OPEN_HOLD)
    with failing(store, lambda: BROKEN, monkeypatch), pytest.raises(StoreError):
        Ledger(store, wall)
    ledger = Ledger(store, wall)
    ledger.close()

    assert ledger.interrupted == 1


def test_writer_death_fails_queued_items(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = threading.Event(), threading.Event()

    def die() -> Exception:
        entered.set()
        assert go.wait(PATIENCE_S)
        return ZeroDivisionError()

    monkeypatch.setattr("threading.excepthook", lambda args: None)
    with failing(store, die, monkeypatch):
        first = ledger.hold(hold("a"))
        assert entered.wait(PATIENCE_S)
        behind = [ledger.hold(hold(request_id)) for request_id in "bc"]
        go.set()
        codes = [refusal(future) for future in (first, *behind)]

    assert codes == ["failed", "closed", "closed"]


def test_dead_writer_fails_later_items(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug ends the writer; current and later callers get an error."""
    has_died = threading.Event()
    monkeypatch.setattr("threading.excepthook", lambda args: has_died.set())
    with failing(store, ZeroDivisionError, monkeypatch):
        first = refusal(ledger.hold(hold("a")))
        assert has_died.wait(PATIENCE_S)

    assert (first, refusal(ledger.hold(hold("b")))) == ("failed", "closed")


def test_full_disk_loses_no_confirmed_entry(tmp_path: Path) -> None:
    """With the operating system's file size limit, not a fake."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.crash.ledger_child", str(tmp_path / "test.db"), "400"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[4],
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000)),
    )
    confirmed = child.stdout.split()
    store = new_sqlite(tmp_path / "test.db")
    ledger = Ledger(store, Wall())
    ledger.close()
    found = set(entries(store))
    store.close()

    assert child.returncode == 3, child.stderr
    assert confirmed
    assert set(confirmed) <= found


class Life(BookMachine):
    """A state machine of a ledger against a dictionary, with repeats and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()
        self.noted: dict[str, int] = {}
        self.settled: dict[str, UsageEntry] = {}

    @rule(request_id=st.sampled_from("abcdef"))
    def hold(self, request_id: str) -> None:
        future = self.ledger.hold(hold(request_id))
        if request_id in self.held or request_id in self.settled:
            assert refusal(future) == "duplicate_request"
        else:
            done(future)
            self.held.add(request_id)

    @rule(request_id=st.sampled_from("abcdef"), prompt=st.integers(0, 9), output=st.integers(0, 9))
    def settle(self, request_id: str, prompt: int, output: int) -> None:
        sent = entry(request_id, prompt, output)
        done(self.ledger.settle(sent))
        self.settled.setdefault(request_id, sent)
        self.held.discard(request_id)

    @rule(request_ids=st.lists(st.sampled_from("abcdef"), min_size=2, max_size=8))
    def settle_at_once(self, request_ids: list[str]) -> None:
        sent = [entry(request_id, 4, number) for number, request_id in enumerate(request_ids)]
        for future in list(map(self.ledger.settle, sent)):
            done(future)
        for one in sent:
            self.settled.setdefault(one.request_id, one)
            self.held.discard(one.request_id)

    @rule(request_ids=st.lists(st.sampled_from("abcdef"), min_size=1), output=st.integers(1, 9))
    def note(self, request_ids: list[str], output: int) -> None:
        note = ProgressNote(dict.fromkeys(request_ids, TokenCounts(output_tokens=output)))
        done(self.ledger.write(note))  # or it could share a batch with a later hold
        for request_id in self.held & set(request_ids):
            self.noted[request_id] = output

    @precondition(lambda self: self.held or self.settled)
    @rule()
    def restart(self) -> None:
        self.restart_ledger()
        assert self.ledger.interrupted == len(self.held)
        for request_id in self.held:
            closed = entry(request_id, 0, self.noted.get(request_id, 0), self.wall())
            self.settled[request_id] = structs.replace(closed, ending="interrupted")
        self.held.clear()

    @invariant()
    def file_matches_the_model(self) -> None:
        assert entries(self.store) == self.settled
        assert holds(self.store) == len(self.held)
        total = sum(one.output_tokens for one in self.settled.values())
        assert sum(row.output_tokens for row in usage(self.store)) == total


TestLife = Life.TestCase


@pytest.mark.slow
def test_ledger_on_a_server_matches_the_model(postgres_server: Server) -> None:
    """With round trips between."""
    run_on_server(Life, postgres_server)
