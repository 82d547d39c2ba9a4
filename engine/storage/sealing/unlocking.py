"""Opens the keys of a sealed store: reads the master key, and unwraps the data keys.

The storage process calls it at each opening, the command line while no server runs. It is the only
module that imports `key_ring`, and with it the optional package `cryptography`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import apsw
from msgspec import Struct

from engine.config import LevelsConfig
from engine.storage.sealing.master_key import MasterKey, read_key, read_key_file
from engine.storage.sealing.seals import KEYS_NAME, SealRefused, Seals

EXTRA = "sealed copies need the extra `sealed`: pip install 'trunkline[sealed]'"


class SealSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the master key is: in a file, or in a variable of the environment."""

    key_file: str = ""
    key_env: str = ""
    key_file_before: str = ""
    """The file of the former key; what it still wraps is wrapped anew."""


def seal_settings(config: LevelsConfig) -> SealSettings | None:
    """Return where the master key of sealed copies is; None if they are plain."""
    if not config.seal:
        return None
    return SealSettings(config.key_file, config.key_env, config.key_file_before)


def store_name_of(folder: Path) -> str:
    """Return the name under which a sealed store's objects lie elsewhere; "" for a plain one. Needs
    no key. Raises apsw.Error."""
    path = folder / KEYS_NAME
    if not path.exists():
        return ""
    with closing(apsw.Connection(str(path), apsw.SQLITE_OPEN_READONLY)) as db:
        row = db.execute("select value from meta where name='store_name'").fetchone()
    return "" if row is None else str(row[0])


def can_seal() -> bool:
    """Return whether the package that seals is installed."""
    return find_spec("cryptography") is not None


def shared_proof(master: MasterKey) -> bytes:
    """Return what a shared store says of its master key: equal only for equal keys. The key is not
    known from it. Needs the package that seals."""
    from engine.storage.sealing.data_seal import derive

    mac = derive(master.secret, b"", b"trunkline shared proof", 32).hex()
    return f"trunkline shared store 1\n{master.fingerprint}\n{mac}\n".encode()


def unlock(folder: Path, settings: SealSettings, environment: Mapping[str, str]) -> Seals:
    """Open the keys of a store; make their file where the folder has no copies yet.

    Raises MasterKeyRefused, SealRefused, apsw.Error, OSError: nothing was changed then.
    """
    master = read_key(settings.key_file, settings.key_env, environment)
    before = None
    if settings.key_file_before:
        before = read_key_file(Path(settings.key_file_before))
    try:
        from engine.storage.sealing.key_ring import KeyRing
    except ImportError as error:
        raise SealRefused(f"{EXTRA}.") from error
    has_copies = any(folder.glob("*.slab")) or any(folder.glob("index.db*"))
    if has_copies and not (folder / KEYS_NAME).exists():
        raise SealRefused(
            f"{folder} has copies and no {KEYS_NAME}: they are plain, or their keys are lost. They"
            " were not changed: `trunkline levels clear` begins anew."
        )
    return KeyRing(folder, master, before, may_make=not has_copies)
