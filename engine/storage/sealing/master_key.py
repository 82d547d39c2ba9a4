"""The master key of sealed copies: 32 bytes from a file or from the environment.

It wraps the data keys of a store (`key_ring`) and seals nothing itself. The file has 64 hexadecimal
digits, belongs to the server's user and may be read only by that user. The key is shown nowhere:
its *fingerprint*, from which it cannot be computed, names it in messages.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from engine.errors import EngineError
from engine.storage.slabs.slabs import sync_folder

KEY_BYTES = 32
_TEXT_BYTES_MAX = 4_096


class MasterKeyRefused(EngineError):
    """A master key that cannot be used. The message names file or variable, never the key."""

    def __init__(self, message: str) -> None:
        super().__init__("storage", message)


class MasterKey:
    """A master key. `secret`: 32 bytes."""

    __slots__ = ("secret",)

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError for another number of bytes."""
        if len(secret) != KEY_BYTES:
            raise ValueError(f"key of {len(secret)} bytes; expected {KEY_BYTES}")
        self.secret = secret

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that tell keys apart."""
        digest = hashlib.blake2b(self.secret, digest_size=4, person=b"trunkline key id")
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"MasterKey({self.fingerprint})"


def make_key_file(path: Path) -> MasterKey:
    """Write a new random key to a file that does not exist yet, with mode 0400.

    It is durable when this returns. Raises MasterKeyRefused if the file exists, and OSError.
    """
    key = MasterKey(os.urandom(KEY_BYTES))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o400)
    except FileExistsError as error:
        raise MasterKeyRefused(
            f"{path} exists; expected a new file: no key is ever replaced."
        ) from error
    try:
        os.write(fd, key.secret.hex().encode() + b"\n")
        os.fsync(fd)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)
    sync_folder(path.absolute().parent)
    return key


def read_key_file(path: Path) -> MasterKey:
    """Read a key from its file. Raises MasterKeyRefused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise MasterKeyRefused(
            f"the key file {path} cannot be read: {error.strerror}; `trunkline levels new-key`"
            " makes one."
        ) from error
    try:
        found = os.fstat(fd)
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode):
            raise MasterKeyRefused(
                f"the key file {path} is not a regular file; expected one with a key."
            )
        if found.st_uid not in (os.geteuid(), 0):
            raise MasterKeyRefused(
                f"the key file {path} belongs to user {found.st_uid}; expected user {os.geteuid()}."
            )
        if mode & 0o077:
            raise MasterKeyRefused(
                f"the key file {path} has mode {mode:04o}, so others may read the key; expected"
                f" 0400: `chmod 400 {path}`."
            )
        text = os.read(fd, _TEXT_BYTES_MAX)
    except OSError as error:
        raise MasterKeyRefused(f"the key file {path} cannot be read: {error.strerror}.") from error
    finally:
        os.close(fd)
    return _parse(text.decode("ascii", "replace"), f"the key file {path}")


def read_key(key_file: str, key_env: str, environment: Mapping[str, str]) -> MasterKey:
    """Read the key from the file, or from the environment's variable of this name.

    Raises MasterKeyRefused.
    """
    if key_file:
        return read_key_file(Path(key_file))
    if not key_env:
        raise MasterKeyRefused(
            "no master key: expected engine.levels.key_file or engine.levels.key_env;"
            " `trunkline levels new-key` makes a key file."
        )
    if key_env not in environment:
        raise MasterKeyRefused(
            f"the environment has no variable {key_env}; expected a key of {2 * KEY_BYTES}"
            " hexadecimal digits there."
        )
    return _parse(environment[key_env], f"the environment's variable {key_env}")


def _parse(text: str, what: str) -> MasterKey:
    digits = text.strip()
    try:
        secret = bytes.fromhex(digits) if digits.isalnum() else b""
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise MasterKeyRefused(
            f"{what} has {len(digits)} characters and is not a key; expected {2 * KEY_BYTES}"
            " hexadecimal digits."
        )
    return MasterKey(secret)
