"""`trunkline check-config`, `doctor` and `version`: show settings, requirements and the version."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata

import apsw

from engine.errors import ModelError
from engine.model_store import CATALOGUE, resolve
from gateway.background.config_reload import with_digests
from gateway.cli.result import CommandError, CommandResult, Table, table_result
from gateway.cli.serve import check_address
from gateway.config import Config, ConfigError, Origin, effective
from tenancy.errors import StoreError
from tenancy.storage import backends
from tenancy.storage.sqlite import check_sqlite

PACKAGES = ("torch", "tokenizers", "aiohttp", "msgspec")
DISK_GIB_MIN = 1.0
"""Least free disk space that `doctor` accepts."""


def check_config(config: Config, origin: Origin) -> CommandResult:
    """Return every setting with its source and its value."""
    return table_result(
        [
            {"setting": path, "from": source, "value": value}  # the value is last: it may be long
            for path, value, source in effective(config, origin)
        ]
    )


def version() -> CommandResult:
    """Return the version of this program."""
    number = metadata.version("trunkline")
    return CommandResult(f"trunkline {number}", {"trunkline": number})


def doctor(config: Config) -> CommandResult:
    """Check a server's requirements, with a remedy for each that is missing.

    Changes nothing; status 1 if one is missing.
    """
    checks: Table = [{"check": "python", "ok": True, "found": platform.python_version()}]
    for check in (_packages, _sqlite, _compiler, _data_dir, _database, _addresses, _model, _keys):
        checks += [{"check": name, "ok": ok, "found": found} for name, ok, found in check(config)]
    return table_result(checks, 0 if all(row["ok"] for row in checks) else 1)


Found = list[tuple[str, bool, str]]
"""Rows of (requirement, whether it is met, details)."""


def _packages(config: Config) -> Found:
    found: Found = []
    for package in PACKAGES:
        try:
            found.append((package, True, metadata.version(package)))
        except metadata.PackageNotFoundError:
            found.append((package, False, "not installed: run `make setup`"))
    return found


def _sqlite(config: Config) -> Found:
    version = apsw.sqlite_lib_version()
    try:
        check_sqlite(version)
    except StoreError as error:
        return [("sqlite", False, error.message)]
    return [("sqlite", True, version)]


def _compiler(config: Config) -> Found:
    """Check for a C compiler. Without one, CPU kernels run in torch: correct, but slow."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    return [("C compiler", compiler is not None, compiler or "not found: CPU kernels will be slow")]


def _data_dir(config: Config) -> Found:
    """Check the data directory, or its nearest existing parent."""
    folder = config.data.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return [("data directory", False, f"{config.data}: {folder} is not writable")]
    free_gib = shutil.disk_usage(folder).free / 2**30
    state = "" if config.data.exists() else ", created at the first start"
    found = f"{config.data}, {free_gib:.1f} GiB free{state}"
    return [("data directory", free_gib >= DISK_GIB_MIN, found)]


def _database(config: Config) -> Found:
    try:
        found = backends.describe_place(config.tenancy.database, config.data, os.environ)
    except StoreError as error:
        return [("database", False, error.message)]
    return [("database", True, found)]


def _addresses(config: Config) -> Found:
    found: Found = []
    for name, address in (("listen", config.server.listen), ("admin", config.admin.listen)):
        try:
            check_address(address, name)
        except CommandError as error:
            found.append((f"{name} address", False, str(error)))
        else:
            found.append((f"{name} address", True, f"{address} is free"))
    return found


def _model(config: Config) -> Found:
    name = config.model.name
    try:
        return [("model", True, str(resolve(name, config.models_dir)))]
    except ModelError as error:
        if name in CATALOGUE:
            return [("model", True, f"{name}, fetched at the first start")]
        return [("model", False, error.message)]


def _keys(config: Config) -> Found:
    """Check the files of declared keys."""
    files = [key.file for one in config.tenants or () for key in one.keys if key.file]
    if not files:
        return []
    try:
        with_digests(config.tenants or ())
    except ConfigError as error:
        return [("key files", False, str(error))]
    return [("key files", True, f"{len(files)} valid")]
