"""Conversations in the database: lists of items that clients and responses append to.

A conversation belongs to a tenant's workspace and is kept until it was not changed for its
lifetime. The items of one response are appended together, in the response's own transaction. The
module knows no dialect; items and metadata are opaque bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tenancy.responses.stored_sums import Obstacle, StorageQuota, Sums, obstacle_of_owner, subtract
from tenancy.storage.interface import Row, Store, Transaction, pad_to_power_of_two, placeholders
from tenancy.storage.pieces import SWEPT_AT_ONCE, delete_all, first_piece

ITEM_OVERHEAD_BYTES = 100
"""What a stored item counts beside its own bytes, so that the quota also bounds small ones."""

Owner = tuple[int, str]
"""Tenant and workspace."""


class ConversationRecord(Struct, frozen=True):
    """A conversation without its items."""

    conversation_id: str
    tenant_id: int
    workspace: str
    created_ms: int
    expires_ms: int
    metadata: bytes
    """JSON."""

    @property
    def owner(self) -> Owner:
        """Tenant and workspace."""
        return self.tenant_id, self.workspace


class ItemRecord(Struct, frozen=True):
    """An item of a conversation."""

    item_id: str
    item: bytes
    """Its JSON, with its id."""

    @property
    def size(self) -> int:
        """Bytes that the quota counts."""
        return len(self.item) + ITEM_OVERHEAD_BYTES


class ItemsChange(Struct, frozen=True):
    """Items to append to a conversation of this owner."""

    owner: Owner
    conversation_id: str
    items: tuple[ItemRecord, ...]
    since_ms: int
    """When the request began."""
    now_ms: int
    """The conversation must not have expired until then."""
    expires_ms: int
    """The conversation is kept until then at least."""

    @property
    def size(self) -> int:
        """Bytes that the quota counts."""
        return sum(item.size for item in self.items)


def create_conversation(
    store: Store,
    record: ConversationRecord,
    items: Sequence[ItemRecord],
    quota: StorageQuota,
    bytes_max: int,
) -> Obstacle:
    """Store a conversation with its first items; return why it is not stored, or an empty text.

    Raises StoreError.
    """
    size = len(record.metadata) + sum(item.size for item in items)
    with store.change() as db:
        sums = Sums(db, quota)
        obstacle = obstacle_of_owner(db, record.tenant_id, record.workspace, record.created_ms)
        if obstacle:
            return obstacle
        if size > bytes_max or not sums.has_room(record.tenant_id, 1, size):
            return "quota"
        db.execute(
            "insert into conversations (conversation_id, tenant_id, workspace, created_ms,"
            " expires_ms, positions, bytes, metadata) values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(record.conversation_id, record.tenant_id, record.workspace, record.created_ms),
                *(record.expires_ms, len(items), size, record.metadata),
            ),
        )
        _insert_items(db, record.owner, record.conversation_id, items, 0)
        sums.add(record.tenant_id, 1, size)
        sums.finish()
    return ""


def find_conversation(
    store: Store, owner: Owner, conversation_id: str, now_ms: int
) -> ConversationRecord | None:
    """Return a live conversation of the owner, or None."""
    rows = store.query(
        "select conversation_id, tenant_id, workspace, created_ms, expires_ms, metadata"
        f" from conversations where {_LIVE}",
        (conversation_id, *owner, now_ms),
    )
    if not rows:
        return None
    found_id, tenant_id, workspace, created_ms, expires_ms, metadata = rows[0]
    return ConversationRecord(
        found_id, tenant_id, workspace, created_ms, expires_ms, bytes(metadata)
    )


def set_metadata(store: Store, record: ConversationRecord, now_ms: int) -> bool:
    """Set the metadata of a conversation and keep it as long as `record` says. Returns False if
    there is none. Raises StoreError."""
    with store.change() as db:
        rows = db.rows(
            f"select length(metadata) from conversations where {_LIVE}",
            (record.conversation_id, *record.owner, now_ms),
        )
        if not rows:
            return False
        more = len(record.metadata) - rows[0][0]
        db.execute(
            "update conversations set metadata = ?, expires_ms = ?, bytes = bytes + ?"
            " where conversation_id = ?",
            (record.metadata, record.expires_ms, more, record.conversation_id),
        )
        sums = Sums(db)
        sums.add(record.tenant_id, 0, more)
        sums.finish()
    return True


def append_items(
    store: Store, change: ItemsChange, quota: StorageQuota, bytes_max: int
) -> Obstacle:
    """Call `append_items_in` in its own transaction. Raises StoreError."""
    with store.change() as db:
        sums = Sums(db, quota)
        obstacle: Obstacle = obstacle_of_owner(db, *change.owner, change.since_ms)
        obstacle = obstacle or append_items_in(db, sums, change, bytes_max)
        sums.finish()
    return obstacle


def append_items_in(db: Transaction, sums: Sums, change: ItemsChange, bytes_max: int) -> Obstacle:
    """Append items within the caller's transaction; return why not, with nothing changed.

    `bytes_max`: of the whole conversation. The caller has checked that the owner may store.
    """
    rows = db.rows(
        f"select bytes, positions from conversations where {_LIVE}",
        (change.conversation_id, *change.owner, change.now_ms),
    )
    if not rows:
        return "conversation_missing"
    held, positions = rows[0]
    tenant_id, size = change.owner[0], change.size
    if held + size > bytes_max or not sums.has_room(tenant_id, 0, size):
        return "quota"
    db.execute(
        "update conversations set bytes = bytes + ?1, positions = positions + ?2, expires_ms ="
        " case when expires_ms < ?3 then ?3 else expires_ms end where conversation_id = ?4",
        (size, len(change.items), change.expires_ms, change.conversation_id),
    )
    _insert_items(db, change.owner, change.conversation_id, change.items, positions)
    sums.add(tenant_id, 0, size)
    return ""


def measure_conversation(
    store: Store, owner: Owner, conversation_id: str, now_ms: int
) -> int | None:
    """Return the bytes of a live conversation of the owner, or None. O(1)."""
    rows = store.query(
        f"select bytes from conversations where {_LIVE}", (conversation_id, *owner, now_ms)
    )
    return rows[0][0] if rows else None


def load_items(
    store: Store, owner: Owner, conversation_id: str, now_ms: int, items_max: int
) -> list[bytes] | None:
    """Return the first `items_max` items of a conversation in order, or None if there is none."""
    if find_conversation(store, owner, conversation_id, now_ms) is None:
        return None
    rows = store.query(
        "select item from conversation_items where conversation_id = ? order by position limit ?",
        (conversation_id, items_max),
    )
    return [bytes(row[0]) for row in rows]


def page_items(
    store: Store, conversation_id: str, after: str, limit: int, *, is_descending: bool
) -> list[bytes] | None:
    """Return at most `limit` items behind the item `after`, or from the start without it.

    None if the conversation has no item `after`. The caller has found the conversation.
    """
    position = -1
    if after:
        rows = store.query(
            "select position from conversation_items where conversation_id = ? and item_id = ?",
            (conversation_id, after),
        )
        if not rows:
            return None
        position = rows[0][0]
    order, sign = ("desc", "<") if is_descending else ("asc", ">")
    bound = f" and position {sign} ?" if after else ""
    values = (conversation_id, position) if after else (conversation_id,)
    rows = store.query(
        f"select item from conversation_items where conversation_id = ?{bound}"
        f" order by position {order} limit {limit:d}",
        values,
    )
    return [bytes(row[0]) for row in rows]


def find_item(store: Store, conversation_id: str, item_id: str) -> bytes | None:
    """Return an item of a conversation, or None. The caller has found the conversation."""
    rows = store.query(
        "select item from conversation_items where conversation_id = ? and item_id = ?",
        (conversation_id, item_id),
    )
    return bytes(rows[0][0]) if rows else None


def measure_items(
    store: Store, owner: Owner, item_ids: Sequence[str], now_ms: int
) -> dict[str, int]:
    """Return the bytes of the items of these ids, in any conversation of the owner. O(ids): at
    least one."""
    return dict(_owned_items(store, "bytes", owner, item_ids, now_ms))


def find_items(
    store: Store, owner: Owner, item_ids: Sequence[str], now_ms: int
) -> dict[str, bytes]:
    """Return the items of these ids, in any conversation of the owner. O(ids): at least one."""
    rows = _owned_items(store, "item", owner, item_ids, now_ms)
    return {item_id: bytes(item) for item_id, item in rows}


def delete_items(
    store: Store, owner: Owner, conversation_id: str, item_ids: Sequence[str], now_ms: int
) -> int:
    """Delete items of a conversation; return how many there were. Raises StoreError."""
    ids = pad_to_power_of_two(item_ids)
    with store.change() as db:
        if not db.rows(
            f"select 1 from conversations where {_LIVE}", (conversation_id, *owner, now_ms)
        ):
            return 0
        deleted = db.rows(
            "delete from conversation_items where conversation_id = ?"
            f" and item_id in {placeholders(len(ids))} returning bytes",
            [conversation_id, *ids],
        )
        size = sum(row[0] for row in deleted)
        db.execute(
            "update conversations set bytes = bytes - ? where conversation_id = ?",
            (size, conversation_id),
        )
        sums = Sums(db)
        sums.add(owner[0], 0, -size)
        sums.finish()
    return len(deleted)


def delete_conversation(store: Store, owner: Owner, conversation_id: str, now_ms: int) -> bool:
    """Delete a conversation with its items, in small transactions. Returns False if there is none.

    From the first one on it is not found. Raises StoreError; sweeping deletes what is left then.
    """
    with store.change() as db:
        found = db.execute(
            f"update conversations set expires_ms = 0 where {_LIVE}",
            (conversation_id, *owner, now_ms),
        )
    if found:
        delete_all(store, lambda db: _delete_some(db, "conversation_id = ?1", (conversation_id,)))
    return bool(found)


def forget_conversations(
    db: Transaction, tenant_id: int, workspace: str | None = None, until_ms: int | None = None
) -> None:
    """Delete the conversations of a tenant, or of one workspace. O(rows).

    `until_ms`: only those that were created until then.
    """
    values = tenant_id, workspace, until_ms
    db.execute(
        "delete from conversation_items where conversation_id in"
        f" (select conversation_id from conversations where {_OF_OWNER})",
        values,
    )
    subtract(
        db,
        db.rows(f"delete from conversations where {_OF_OWNER} returning tenant_id, bytes", values),
    )


def erase_conversations(
    store: Store, tenant_id: int, workspace: str | None, until_ms: int | None = None
) -> None:
    """Delete what `forget_conversations` does, in small transactions; from the first one on none is
    found. Raises StoreError; sweeping deletes what is left then."""
    values = tenant_id, workspace, until_ms
    with store.change() as db:
        db.execute(f"update conversations set expires_ms = 0 where {_OF_OWNER}", values)
    delete_all(store, lambda db: _delete_some(db, f"{_OF_OWNER} and expires_ms = 0", values))


def sweep_conversations(store: Store, now_ms: int) -> bool:
    """Delete some rows of expired conversations in one small transaction, items first.

    Returns whether there may be more. Raises StoreError.
    """
    with store.change() as db:
        return _delete_some(db, "expires_ms <= ?1", (now_ms,))


def _delete_some(db: Transaction, where: str, values: Row) -> bool:
    """Delete as many items, or conversations without items, as one transaction may, of those that
    `where` finds; return whether there may be more."""
    items = db.rows(
        "select item_id, conversation_items.bytes from conversation_items"
        f" join conversations using (conversation_id) where {where} limit {SWEPT_AT_ONCE:d}",
        values,
    )
    if items:
        ids = first_piece(items)
        db.execute(f"delete from conversation_items where item_id in {placeholders(len(ids))}", ids)
        return True
    found = db.rows(
        f"select conversation_id from conversations where {where} limit {SWEPT_AT_ONCE:d}", values
    )
    if found:
        deleted = db.rows(
            f"delete from conversations where conversation_id in {placeholders(len(found))}"
            " returning tenant_id, bytes",
            [row[0] for row in found],
        )
        subtract(db, deleted)
    return len(found) == SWEPT_AT_ONCE


def _owned_items(
    store: Store, column: Literal["bytes", "item"], owner: Owner, ids: Sequence[str], now_ms: int
) -> list[Row]:
    """Return ids and a column of the owner's items among these ids. What is another owner's is not
    looked up, so that its time does not tell it from what is missing."""
    ids = pad_to_power_of_two([_owned_id(owner, one) for one in ids])
    return store.query(
        f"select item_id, conversation_items.{column} from conversation_items"
        " join conversations using (conversation_id)"
        f" where owned_id in {placeholders(len(ids))} and expires_ms > ?",
        [*ids, now_ms],
    )


def _owned_id(owner: Owner, item_id: str) -> str:
    return f"{owner[0]}/{owner[1]}/{item_id}"


_OF_OWNER = (
    "tenant_id = ?1 and (cast(?2 as text) is null or workspace = ?2)"
    " and (cast(?3 as bigint) is null or created_ms <= ?3)"
)
_LIVE = "conversation_id = ? and tenant_id = ? and workspace = ? and expires_ms > ?"


def _insert_items(
    db: Transaction, owner: Owner, conversation_id: str, items: Sequence[ItemRecord], first: int
) -> None:
    db.execute_many(
        "insert into conversation_items (conversation_id, position, item_id, owned_id, bytes,"
        " item) values (?, ?, ?, ?, ?, ?)",
        [
            (
                *(conversation_id, first + number, item.item_id, _owned_id(owner, item.item_id)),
                *(item.size, item.item),
            )
            for number, item in enumerate(items)
        ],
    )
