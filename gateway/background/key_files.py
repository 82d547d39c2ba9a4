"""Keys that the configuration file declares by the file that each is in: found, and digested.

A whole key is read here and goes no further. It knows no database; `reload` calls it before what is
declared is made so, and `trunkline doctor` to see whether it could be.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from msgspec import structs

from gateway.config import ConfigError
from tenancy.accounts.declared_keys import DeclaredKey
from tenancy.accounts.declared_tenants import DeclaredTenant
from tenancy.accounts.keys import digest_of, is_key

FILE_BYTES_MAX = 1_024


def with_digests(tenants: Sequence[DeclaredTenant]) -> list[DeclaredTenant]:
    """The same with each key's digest in the place of its file. Reads the files.

    Raises ConfigError for one that cannot be read, that others may read, or with no key in it.
    """
    return [
        structs.replace(one, keys=tuple(_with_digest(one.name, key) for key in one.keys))
        for one in tenants
    ]


def _with_digest(tenant: str, key: DeclaredKey) -> DeclaredKey:
    if not key.file:
        return key
    try:
        text = _read(key.file)
    except OSError as error:
        raise ConfigError(_at(tenant, key, f"cannot be read: {error.strerror}")) from error
    except ValueError as error:
        raise ConfigError(_at(tenant, key, str(error))) from error
    return structs.replace(key, sha256=digest_of(text).hex(), file="")


def _read(name: str) -> str:
    """Raises OSError; ValueError for what is not a key kept as one."""
    # What is no file might be waited for, for ever.
    number = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError("is no file")
        if mode & 0o077:
            raise ValueError("can be read by others than its owner; chmod 600 it")
        text = os.read(number, FILE_BYTES_MAX).decode("ascii", errors="replace").strip()
    finally:
        os.close(number)
    if not is_key(text):
        raise ValueError("has no key in it: tl- and 43 letters and digits")
    return text


def _at(tenant: str, key: DeclaredKey, what: str) -> str:
    return f"tenants: {tenant}: key {key.label[:80]!r}: {key.file} {what}"
