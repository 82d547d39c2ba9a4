"""The namespaces and payers of an index, by name and by number.

Both are few and kept in memory. A namespace's row is its *scope*, with the key of its digests. The
caller opens transactions, but for the opening.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import apsw
from msgspec import Struct

from engine.api import Namespace, Payer
from engine.storage.sealing.seals import RecordSeal, Seals
from engine.storage.transaction import transaction


class Scope(Struct, frozen=True):
    """A namespace, the key of its digests, and its seal if the store is sealed."""

    scope_id: int
    namespace: Namespace
    key: bytes
    seal: RecordSeal | None = None


class NamespaceRows:
    """The scopes and payers of one index. Every method may raise apsw.Error."""

    def __init__(self, db: apsw.Connection, seals: Seals | None) -> None:
        """Read all; rows of a namespace whose key was destroyed are deleted. O(these)."""
        self._db, self._seals = db, seals
        self._scopes: dict[Namespace, Scope] = {}
        self._scopes_by_id: dict[int, Scope] = {}
        rows: list[Any] = db.execute("select scope_id, namespace, key from scopes").fetchall()
        for scope_id, namespace, key in rows:
            seal = None if seals is None else seals.seal_of(namespace)
            if seals is not None and seal is None:
                self._delete_shredded(scope_id)
            else:
                key = key if seal is None else seal.digest_key
                self._add_scope(Scope(scope_id, namespace, key, seal))
        self._payers: dict[Payer, int] = {}
        self._payer_names: dict[int, Payer] = {}
        found: list[Any] = db.execute("select payer_id, payer from payers").fetchall()
        for number, payer in found:
            self._payers[payer], self._payer_names[number] = number, payer

    def _delete_shredded(self, scope_id: int) -> None:
        """Delete what is left of a namespace whose key was destroyed."""
        with transaction(self._db):
            self._db.execute("delete from records where scope_id=?", (scope_id,))
            self._db.execute("delete from leases where scope_id=?", (scope_id,))
            self._db.execute("delete from scopes where scope_id=?", (scope_id,))

    @property
    def scopes(self) -> list[Scope]:
        """All scopes, also those that have lost their last record."""
        return list(self._scopes.values())

    def scope_of(self, scope_id: int) -> Scope:
        """Return the scope of a number, which a record's row has. Raises KeyError."""
        return self._scopes_by_id[scope_id]

    def seal_of(self, scope_id: int) -> RecordSeal | None:
        """Return the seal of a scope's rows; None where they are plain, or there is no scope."""
        scope = self._scopes_by_id.get(scope_id)
        return None if scope is None else scope.seal

    def scope(self, namespace: Namespace) -> Scope | None:
        """Return the namespace's scope, or None. O(1)."""
        return self._scopes.get(namespace)

    def scope_for(self, namespace: Namespace) -> Scope:
        """Return the namespace's scope; make it if needed."""
        scope = self._scopes.get(namespace)
        if scope is None:
            seal = None if self._seals is None else self._seals.seal_for(namespace)
            key = os.urandom(16) if seal is None else b""
            self._db.execute("insert into scopes(namespace, key) values(?,?)", (namespace, key))
            key = key if seal is None else seal.digest_key
            scope = Scope(self._db.last_insert_rowid(), namespace, key, seal)
            self._add_scope(scope)
        return scope

    def _add_scope(self, scope: Scope) -> None:
        self._scopes[scope.namespace] = self._scopes_by_id[scope.scope_id] = scope

    def remove_scope(self, namespace: Namespace) -> None:
        """Delete the scope of a namespace that has no records."""
        scope = self._scopes.pop(namespace)
        del self._scopes_by_id[scope.scope_id]
        self._db.execute("delete from scopes where scope_id=?", (scope.scope_id,))

    def payer_id(self, payer: Payer) -> int:
        """Return the payer's number; make it if needed."""
        found = self._payers.get(payer)
        if found is None:
            self._db.execute("insert into payers(payer) values(?)", (payer,))
            found = self._payers[payer] = self._db.last_insert_rowid()
            self._payer_names[found] = payer
        return found

    def payer_name(self, payer_id: int) -> Payer:
        """Return the payer of a number. Raises KeyError."""
        return self._payer_names[payer_id]


def digest_of(scope: Scope, run: bytes) -> bytes:
    """Return the keyed digest by which a run is found. 1 us."""
    return hashlib.blake2b(run, digest_size=16, key=scope.key).digest()
