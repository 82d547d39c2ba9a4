"""A database that one tenant has filled: its own way out, an erasure, needed room as well."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from gateway.background import erasure
from tenancy.accounts.cached_contents import (
    CachedContentQuota,
    CachedContentRecord,
    create_cached_content,
    end_cached_contents,
)
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import StoreBusy
from tenancy.ledger.idempotency import Claim, ReplayedResponse, ReplayRecord, forget_answers
from tenancy.ledger.ledger import Hold
from tenancy.ledger.transactions import Item, LedgerTransactions, NamedEntry
from tenancy.responses.conversations import (
    ConversationRecord,
    ItemRecord,
    create_conversation,
    delete_conversation,
    erase_conversations,
)
from tenancy.responses.stored_responses import StoredResponse, erase_stored, store_responses
from tenancy.responses.stored_sums import NO_QUOTA
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import UsageEntry, wall_ms
from tests.attacks.attacked_server import AttackedServer
from tests.integration.test_idempotent_cached_contents import cached_content
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

LARGE = 2**19
COUNT = 40
LOG_BYTES_MAX = 8 * 2**20
"""What the log may grow to: less than half of what is deleted."""
OWNER = (1, "default")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    """A database with twenty megabytes of one tenant's texts, half in each table, and a short log;
    a second tenant has one text."""
    store = new_sqlite(tmp_path / "test.db")
    for name in ("ada", "bob"):
        create_tenant(store, wall_ms, name)
    for number in range(COUNT):
        texts = [ItemRecord(f"i{number}", b"x" * LARGE)] if number % 2 else []
        if texts:
            one = ConversationRecord(f"c{number}", *OWNER, 1_000, 2**50, b"{}")
            assert create_conversation(store, one, texts, NO_QUOTA, 2**30) == ""
        else:
            kept = StoredResponse(f"r{number}", *OWNER, 1_000, 2**50, b"[]", b"x" * LARGE)
            assert store_responses(store, [kept], NO_QUOTA, 2**30) == [""]
    other = StoredResponse("bob", 2, "default", 1_000, 2**50, b"[]", b"{}")
    store_responses(store, [other], NO_QUOTA, 2**30)
    store.close()  # the log goes with the last connection
    store = SqliteStore(tmp_path / "test.db")
    yield store
    store.close()


def log_bytes(store: SqliteStore) -> int:
    """Return the size of the log, which never shrinks while the database is open."""
    return Path(f"{store.path}-wal").stat().st_size


def test_an_erasure_needs_room_for_a_few_rows_and_not_for_all(store: SqliteStore) -> None:
    """A deleted row is overwritten, and the log has each page of it until it is copied."""
    erase_stored(store, *OWNER)
    erase_conversations(store, *OWNER)

    assert log_bytes(store) < LOG_BYTES_MAX
    assert store.query("select count(*) from conversation_items") == [(0,)]
    sums = store.query("select tenant_id, responses, bytes from stored_sums order by 1")
    assert sums == [(1, 0, 0), (2, 1, 4)]


@pytest.mark.parametrize("kind", ["answers", "contents"])
def test_kept_answers_and_cached_contents_go_in_small_transactions(
    store: SqliteStore, kind: str
) -> None:
    """As all that an erasure takes; another tenant's stay."""
    for number in range(COUNT):
        if kind == "answers":
            keep_answer(store, 1, f"a{number}")
        else:
            keep_content(store, 1, f"c{number}")
    keep_answer(store, 2, "theirs")
    keep_content(store, 2, "theirs")
    store.close()
    store = SqliteStore(Path(store.path))

    forget_answers(store, 1)
    end_cached_contents(store, 1, None, 2_000)

    assert log_bytes(store) < LOG_BYTES_MAX
    assert store.query("select tenant_id, count(body) from named_requests group by 1") == [(2, 1)]
    left = "select tenant_id from cached_contents where content is not null"
    assert store.query(left) == [(2,)]
    store.close()


def keep_answer(store: SqliteStore, tenant_id: int, name: str) -> None:
    """Store the answer of a request with an `Idempotency-Key`."""
    claim = Claim(name, bytes(32), 1_000)
    record = ReplayRecord(2**50, 2**30, ReplayedResponse("head", b"x" * LARGE))
    entry = UsageEntry(name, tenant_id, 1, "m", "done", 1, 2, 4, 0, 0, 4, 3, 0)
    with store.change() as db:
        items: list[Item] = [
            Hold(name, tenant_id, 1, "m", 1, claim=claim),
            NamedEntry(entry, record),
        ]
        assert LedgerTransactions().apply(db, items) == [None, None]


def keep_content(store: SqliteStore, tenant_id: int, name: str) -> None:
    """Store a cached content."""
    record = CachedContentRecord(name, tenant_id, "default", "m", "", 10, 1_000, 1_000, 2**50)
    create_cached_content(store, record, b"x" * LARGE, CachedContentQuota())


async def test_answers_and_contents_of_one_tenant_take_no_room_of_another(
    unopened_gateway: GatewayFixture,
) -> None:
    """Each bound is the tenant's own; what it erases, it may store again."""
    gateway = unopened_gateway
    idempotency = structs.replace(gateway.config.idempotency, keys_per_tenant_max=3)
    caching = structs.replace(gateway.config.caching, resources_per_tenant_max=3)
    gateway.config = structs.replace(gateway.config, idempotency=idempotency, caching=caching)
    await gateway.open()

    async def fill(who: str, names: str) -> list[int]:
        found = []
        for name in names:
            keyed = {"Idempotency-Key": name}
            status, _, _ = await gateway.ask(body=gateway.chat(), who=who, headers=keyed)
            content = cached_content(gateway)
            made, _, _ = await gateway.ask("/v1beta/cachedContents", content, who=who)
            found += [status, made]
        return found

    try:
        ada = await fill("ada", "abcd")
        bob = await fill("bob", "abc")
        status, _, _ = await gateway.ask("/v1/cache", method="DELETE")
        again = await fill("ada", "xyz")
        kept, _, answer = await gateway.ask(
            body=gateway.chat(), who="bob", headers={"Idempotency-Key": "a"}
        )
    finally:
        await gateway.close()

    assert ada == [200] * 6 + [429, 429]
    assert bob == again == [200] * 6
    assert (status, kept, answer.headers["Idempotency-Replayed"]) == (200, 200, "true")


def test_a_large_conversation_is_deleted_in_small_transactions(store: SqliteStore) -> None:
    """It is not found from the first of them on."""
    more = [ItemRecord(f"more{number}", b"x" * LARGE) for number in range(COUNT)]
    one = ConversationRecord("large", *OWNER, 1_000, 2**50, b"{}")
    assert create_conversation(store, one, more, NO_QUOTA, 2**30) == ""
    before = log_bytes(store)

    assert delete_conversation(store, OWNER, "large", 2_000)
    assert not delete_conversation(store, OWNER, "large", 2_000)
    assert log_bytes(store) == before


def test_room_is_held_for_deletions_and_given_where_there_is_no_other(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the owner's alone, as the database is."""
    room = Path(f"{store.path}.room")
    store.keep_room()
    size, mode = room.stat().st_size, room.stat().st_mode & 0o777
    store.make_room()
    assert (size > 2 * LARGE, mode, room.exists()) == (True, 0o600, True)

    real = os.statvfs(store.path.parent)
    full = os.statvfs_result((*real[:4], 0, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    store.make_room()

    assert not room.exists()


async def test_what_is_in_memory_goes_though_the_database_has_no_room(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The erasure is refused, since its receipt would say more than is true; its blocks are gone.
    The other tenant keeps its own."""
    text = "The trunk is shared, the branches are one's own, and every leaf knows it. " * 4

    async def cached(who: str) -> int:
        status, found, _ = await gateway.ask(body=gateway.chat(text), who=who)
        assert status == 200, found
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    def refuse(*_: object) -> None:
        raise StoreBusy("not_written", "the disk is full")

    for who in ("ada", "bob"):
        await cached(who)
    monkeypatch.setattr(erasure, "erase_stored", refuse)

    status, found, _ = await gateway.ask("/v1/cache", method="DELETE")

    assert (status, found["error"]["code"]) == (503, "database_unavailable"), found
    assert await cached("ada") == 0
    assert await cached("bob") > 0


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a file system of 160 MiB; skips the test where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160m,mode=700", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_tenant_that_filled_the_disk_can_erase_and_do_it_again(
    full_disk: Path, tiny_model: str
) -> None:
    """Nothing of the file system is left but what the server holds; the quiet tenant is served."""
    server = AttackedServer(
        full_disk / "server", tiny_model, "responses.tenant_bytes_max = 1073741824\n"
    )
    server.start()
    try:
        quiet, key = server.tenant("quiet"), server.tenant("attacker")
        item = {"type": "message", "role": "user", "content": "x" * 450_000}
        for _ in range(2):
            refused = 0
            while refused < 5:
                made = server.ask(key, "/v1/conversations", {"items": [item] * 20})
                refused += made.status == 503
                assert made.status in (200, 503), made
            assert server.ask(quiet, "/v1/chat/completions", server.chat()).status == 200

            erased = server.ask(key, "/v1/cache", method="DELETE")

            assert erased.status == 200, erased
            assert json.loads(erased.body)["what"] == "workspace default"
        assert server.ask(quiet, "/v1/chat/completions", server.chat()).status == 200
    finally:
        server.stop()
