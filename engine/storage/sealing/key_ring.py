"""The data keys of a sealed store, each wrapped by the master key: `keys.db` in its folder.

A namespace has a key of its own. Destroying the key erases all copies of the namespace, wherever
they are, backups of the slabs included. A key is durable before anything is sealed with it, and its
destruction before it is reported. To replace the master key is to wrap all data keys again, in one
transaction; no record is written anew. The file apart from the index lets a lost index be rebuilt.

    keys: key id │ namespace │ nonce, AES-256-GCM(master key, data key; id and namespace)
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.api import Namespace
from engine.storage.sealing.data_seal import (
    DATA_KEY_BYTES,
    KEY_ID_BYTES,
    DataSeal,
    ScratchBuffers,
    derive,
    read_envelope,
)
from engine.storage.sealing.master_key import MasterKey
from engine.storage.sealing.seals import KEYS_NAME, SealRefused, SharedNamespace
from engine.storage.slabs.record import DamagedRecord
from engine.storage.slabs.slabs import sync_folder
from engine.storage.transaction import transaction

APPLICATION_ID = 0x74726B79
SCHEMA_VERSION = 1
NONCE_BYTES = 12
_SCHEMA = """
create table meta(name text primary key, value any) without rowid, strict;
create table keys(
    key_id blob primary key, namespace blob not null unique, wrapped blob not null
) without rowid, strict;
"""
_PROOF = b"trunkline master key"
"""What is wrapped beside the data keys, so that a wrong master key shows where there are none."""


class KeyRing:
    """The open keys of one store: implements `Seals`. One thread uses it; its seals, any."""

    def __init__(
        self,
        folder: Path,
        master: MasterKey,
        before: MasterKey | None = None,
        *,
        may_make: bool = False,
    ) -> None:
        """Open the keys; `may_make`: make the file where there is none.

        `before`: the former master key. If the keys are still wrapped by it, they are wrapped by
        `master` now. Nothing is changed where neither opens them. Raises SealRefused, apsw.Error,
        OSError.
        """
        self.path = folder / KEYS_NAME
        self.rewrapped = 0
        """Keys that were wrapped anew at the opening."""
        self._master = master
        self._seals: dict[Namespace, DataSeal] = {}
        self._scratch = ScratchBuffers()
        self._shared_scratch = ScratchBuffers()  # a record is opened in the others meanwhile
        self._by_id: dict[bytes, Namespace] = {}
        if not self.path.exists():
            if not may_make:
                raise SealRefused(
                    f"{self.path} is missing, without which sealed copies do not open. `trunkline"
                    " levels clear` begins anew."
                )
            os.close(os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600))
        self._db = apsw.Connection(str(self.path), apsw.SQLITE_OPEN_READWRITE)
        try:
            self._open(may_make)
            self._unwrap_all(before)
        except BaseException:
            self.close()
            raise

    def _open(self, may_make: bool) -> None:
        for pragma in (
            "locking_mode=exclusive",
            "journal_mode=truncate",
            "synchronous=extra",
            "secure_delete=on",
            "cell_size_check=on",
            "trusted_schema=off",
        ):
            self._db.execute(f"pragma {pragma}").fetchall()
        version = int(self._one("pragma user_version")[0])
        application = int(self._one("pragma application_id")[0])
        if may_make and version == application == 0:
            with transaction(self._db):
                self._db.execute(_SCHEMA)
                self._db.execute(f"pragma user_version={SCHEMA_VERSION}")
                self._db.execute(f"pragma application_id={APPLICATION_ID}")
                self._set_proof()
                name = os.urandom(16).hex()
                self._db.execute("insert into meta values('store_name', ?)", (name,))
            sync_folder(self.path.parent)
        elif (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
            raise SealRefused(
                f"{self.path} has version {version} of program {application:08x}; expected"
                f" {SCHEMA_VERSION} of {APPLICATION_ID:08x}. It was not changed."
            )

    def _unwrap_all(self, before: MasterKey | None) -> None:
        sql = "select key_id, namespace, wrapped from keys"
        rows: list[Any] = self._db.execute(sql).fetchall()
        for master in (self._master, *([] if before is None else [before])):
            if self._proves(master):
                break
        else:
            raise SealRefused(
                f"the master key {self._master.fingerprint} does not open {self.path}; expected"
                f" {self._meta('fingerprint')}. Nothing was changed."
            )
        keys: list[tuple[bytes, Namespace, bytes]] = []
        for key_id, namespace, wrapped in rows:
            data_key = _unwrap(master, wrapped, key_id + namespace)
            if data_key is None:
                raise SealRefused(
                    f"{self.path} is damaged: the key {key_id.hex()} does not open. It was not"
                    " changed; `trunkline levels clear` begins anew."
                )
            self._add(key_id, namespace, data_key)
            keys.append((key_id, namespace, data_key))
        if master is not self._master:
            self._rewrap(keys)

    def _rewrap(self, keys: list[tuple[bytes, Namespace, bytes]]) -> None:
        with transaction(self._db):
            self._db.executemany(
                "update keys set wrapped=? where key_id=?",
                [(_wrap(self._master, key, key_id + of), key_id) for key_id, of, key in keys],
            )
            self._set_proof()
        self.rewrapped = len(keys)

    def _set_proof(self) -> None:
        for name, value in (
            ("proof", _wrap(self._master, _PROOF, b"")),
            ("fingerprint", self._master.fingerprint),
        ):
            self._db.execute("insert or replace into meta values(?,?)", (name, value))

    def _proves(self, master: MasterKey) -> bool:
        proof = self._meta("proof")
        return isinstance(proof, bytes) and _unwrap(master, proof, b"") == _PROOF

    def _meta(self, name: str) -> object:
        row = self._one("select value from meta where name=?", name)
        return None if row is None else row[0]

    def _one(self, sql: str, *values: object) -> Any:
        return self._db.execute(sql, values).fetchone()

    def _add(self, key_id: bytes, namespace: Namespace, data_key: bytes) -> DataSeal:
        seal = self._seals[namespace] = DataSeal(key_id, data_key, self._scratch)
        self._by_id[key_id] = namespace
        return seal

    # -- Seals ----------------------------------------------------------------------------------

    @property
    def store_name(self) -> str:
        """See `Seals`."""
        return str(self._meta("store_name"))

    def seal_of(self, namespace: Namespace) -> DataSeal | None:
        """See `Seals`. O(1)."""
        return self._seals.get(namespace)

    def seal_for(self, namespace: Namespace) -> DataSeal:
        """See `Seals`. A sync of the disk for the first one of a namespace."""
        seal = self._seals.get(namespace)
        if seal is not None:
            return seal
        key_id, data_key = os.urandom(KEY_ID_BYTES), os.urandom(DATA_KEY_BYTES)
        wrapped = _wrap(self._master, data_key, key_id + namespace)
        with transaction(self._db):
            self._db.execute("insert into keys values(?,?,?)", (key_id, namespace, wrapped))
        return self._add(key_id, namespace, data_key)

    def shared(self, model_digest: str, namespace: Namespace) -> SharedNamespace:
        """See `Seals`. About 50 us."""
        model = model_digest.encode()
        whose = b"%d %b %b" % (len(model), model, namespace)

        def key(purpose: bytes, length: int) -> bytes:
            return derive(self._master.secret, b"", b"trunkline shared " + purpose + whose, length)

        seal = DataSeal(
            key(b"key id ", KEY_ID_BYTES), key(b"records ", DATA_KEY_BYTES), self._shared_scratch
        )
        return SharedNamespace(key(b"folder ", 32).hex(), key(b"names ", 32), seal)

    def open_header(self, sealed: memoryview) -> bytes:
        """See `Seals`."""
        namespace = self._by_id.get(read_envelope(sealed).key_id)
        if namespace is None:
            raise DamagedRecord("the record's key is unknown")
        return self._seals[namespace].open_header(sealed)

    def destroy(self, namespace: Namespace) -> None:
        """See `Seals`. A sync of the disk."""
        if namespace in self._seals:
            self._destroy([namespace])

    def keep_only(self, namespaces: set[Namespace]) -> None:
        """See `Seals`."""
        self._destroy([one for one in self._seals if one not in namespaces])

    def _destroy(self, namespaces: list[Namespace]) -> None:
        if not namespaces:
            return
        ids = [self._seals[one].key_id for one in namespaces]
        with transaction(self._db):
            self._db.executemany("delete from keys where key_id=?", [(one,) for one in ids])
        for namespace, key_id in zip(namespaces, ids, strict=True):
            del self._seals[namespace], self._by_id[key_id]

    def close(self) -> None:
        """See `Seals`."""
        with suppress(apsw.Error):
            self._db.close()


def _wrap(master: MasterKey, data_key: bytes, bound: bytes) -> bytes:
    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(master.secret).encrypt(nonce, data_key, bound)


def _unwrap(master: MasterKey, wrapped: bytes, bound: bytes) -> bytes | None:
    """Return the data key, or None if it was not wrapped by this key for this namespace."""
    if len(wrapped) <= NONCE_BYTES:
        return None
    try:
        return AESGCM(master.secret).decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], bound)
    except InvalidTag:
        return None
