"""`trunkline check-config`, `doctor`, `usage` and `version`: what is, in words and numbers."""

from __future__ import annotations

import platform
import shutil
from importlib import metadata

import apsw
from msgspec import structs

from engine.errors import ModelError
from engine.model_store import resolve
from gateway.app import open_store
from gateway.config import Config, Origin, effective
from gateway.metering import wall_ms
from tenancy.ledger import Ledger
from tenancy.registry import find_tenant

Table = list[dict[str, object]]


def check_config(config: Config, origin: Origin) -> Table:
    """Every setting, its value, and where it came from."""
    return [
        {"setting": path, "value": value, "from": source}
        for path, value, source in effective(config, origin)
    ]


def usage(config: Config, tenant: str | None, days: int | None) -> Table:
    """Sums of ledger entries, by tenant."""
    store, _ = open_store(config)
    if tenant is not None:
        find_tenant(store, tenant)
    since_ms = 0 if days is None else wall_ms() - days * 86_400_000
    return [structs.asdict(total) for total in Ledger.totals(store, tenant, since_ms)]


def version() -> str:
    """This program and what it stands on."""
    return f"trunkline {metadata.version('trunkline')}"


def doctor(config: Config) -> tuple[Table, bool]:
    """What a server would need, whether it is there, and what to do if it is not."""
    checks: Table = []

    def add(name: str, good: bool, found: str) -> None:
        checks.append({"check": name, "ok": good, "found": found})

    add("python", True, platform.python_version())
    add("sqlite", True, apsw.sqlite_lib_version())
    for package in ("torch", "tokenizers", "aiohttp", "msgspec"):
        try:
            add(package, True, metadata.version(package))
        except metadata.PackageNotFoundError:
            add(package, False, "not installed")
    compiler = shutil.which("cc")
    add("C compiler", compiler is not None, compiler or "none: kernels run in torch alone")
    try:
        config.data.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(config.data).free / 2**30
        add("data directory", free > 1, f"{config.data}, {free:.1f} GiB free")
    except OSError as error:
        add("data directory", False, f"{config.data}: {error.strerror}")
    try:
        add("model", True, str(resolve(config.model.name, config.models_dir)))
    except ModelError as error:
        add("model", False, error.message)
    return checks, all(bool(check["ok"]) for check in checks)
