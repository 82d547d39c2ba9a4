"""What the store and its index ask of sealing, without knowing a cipher.

A *seal* is all that one namespace's data key does: it hides what rows say of tokens, and seals
records. `key_ring` has the seals of a store; without a key there are none, and records are plain.
This module imports no cryptography, which is an optional package.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple, Protocol

from engine.api import Namespace
from engine.errors import EngineError
from engine.moves import RecordId

KEYS_NAME = "keys.db"
"""The data keys of a sealed store, in its folder."""
SEALED_MAGIC = b"TLKVSEA1"


class SealRefused(EngineError):
    """The store's seals cannot be used as they are; the message says the way out."""

    def __init__(self, message: str) -> None:
        super().__init__("storage", message)


class RecordSeal(Protocol):
    """The seal of one namespace. Records may be sealed and opened in any thread."""

    @property
    def digest_key(self) -> bytes:
        """The key of the digests by which runs are found: at most 64 bytes."""

    def hide(self, parent: RecordId, told: bytes) -> bytes:
        """Return what a row says instead of `told`: the same each time below one parent."""

    def show(self, parent: RecordId, hidden: bytes) -> bytes:
        """Return what `hide` was told; b"" for bytes that no `hide` below this parent returned."""

    def seal(self, header: bytes, payload: memoryview) -> tuple[bytes, memoryview]:
        """Return a sealed record of as many bytes: its header, and its payload, which is good until
        this thread's next call."""

    def open(self, sealed: memoryview, payload_bytes: int) -> tuple[bytes, memoryview]:
        """Return header and payload of a sealed record, which is good until this thread's next
        call. Raises DamagedRecord unless both are what this seal has sealed together."""


class SharedNamespace(NamedTuple):
    """A namespace in a shared store: what all replicas with its master key derive alike.

    `folder`: where its objects lie, which tells nothing of it; `seal`: of these objects.
    """

    folder: str
    name_key: bytes
    seal: RecordSeal

    def name(self, parent: bytes, run: bytes) -> bytes:
        """Return the name of a packed run below the run of name `parent`, b"" for none: 32 bytes.
        About 1 us."""
        return hmac.digest(self.name_key, parent + run, "sha256")


class Seals(Protocol):
    """The seals of a store, by namespace."""

    def shared(self, model_digest: str, namespace: Namespace) -> SharedNamespace:
        """Return a model's namespace in a shared store; each call draws another salt."""

    def seal_of(self, namespace: Namespace) -> RecordSeal | None:
        """Return the seal of a namespace; None if its key was destroyed, or never made."""

    def seal_for(self, namespace: Namespace) -> RecordSeal:
        """Return the seal of a namespace; make its key durably if there is none."""

    def destroy(self, namespace: Namespace) -> None:
        """Destroy the key of a namespace durably: no copy sealed with it opens again."""

    @property
    def store_name(self) -> str:
        """The random name of the store, under which its objects lie; a lost index keeps it."""

    @property
    def rewrapped(self) -> int:
        """Keys that were wrapped by a new master key at the opening."""

    def open_header(self, sealed: memoryview) -> bytes:
        """Return the plain header of a sealed one. Raises DamagedRecord, also where the key is
        unknown."""

    def keep_only(self, namespaces: set[Namespace]) -> None:
        """Destroy the keys of all other namespaces."""

    def close(self) -> None:
        """Close the file. Safe to repeat."""
