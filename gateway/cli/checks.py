"""`trunkline check-config`, `doctor` and `version`: what is, in words and numbers."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata

import apsw

from engine.errors import ModelError
from engine.model_store import CATALOGUE, resolve
from gateway.background.config_reload import with_digests
from gateway.cli.result import CommandError, CommandResult, Table, tabled
from gateway.cli.serve import check_address
from gateway.config import Config, ConfigError, Origin, effective
from tenancy.errors import StoreError
from tenancy.storage import backends
from tenancy.storage.sqlite import check_sqlite

PACKAGES = ("torch", "tokenizers", "aiohttp", "msgspec")
DISK_GIB_MIN = 1.0


def check_config(config: Config, origin: Origin) -> CommandResult:
    """Every setting, where it came from, and its value."""
    return tabled(
        [
            {"setting": path, "from": source, "value": value}  # the widest last: it may be a list
            for path, value, source in effective(config, origin)
        ]
    )


def version() -> CommandResult:
    """This program."""
    number = metadata.version("trunkline")
    return CommandResult(f"trunkline {number}", {"trunkline": number})


def doctor(config: Config) -> CommandResult:
    """What a server would need, whether it is there, and what to do if it is not.

    Changes nothing; status 1 if something is missing.
    """
    checks: Table = [{"check": "python", "ok": True, "found": platform.python_version()}]
    for check in (_packages, _sqlite, _compiler, _data_dir, _database, _addresses, _model, _keys):
        checks += [{"check": name, "ok": ok, "found": found} for name, ok, found in check(config)]
    return tabled(checks, 0 if all(row["ok"] for row in checks) else 1)


Found = list[tuple[str, bool, str]]


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
    """Without one the CPU kernels run as plain torch: slower, and right."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    return [("C compiler", compiler is not None, compiler or "none: CPU kernels will be slow")]


def _data_dir(config: Config) -> Found:
    """The directory, or the nearest one above it that is there."""
    place = config.data.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return [("data directory", False, f"{config.data}: {place} cannot be written to")]
    free_gib = shutil.disk_usage(place).free / 2**30
    state = "" if config.data.exists() else ", made at the first start"
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
    """Files that declared keys are in."""
    files = [key.file for one in config.tenants or () for key in one.keys if key.file]
    if not files:
        return []
    try:
        with_digests(config.tenants or ())
    except ConfigError as error:
        return [("key files", False, str(error))]
    return [("key files", True, f"{len(files)} with a key in each")]
