"""`trunkline doctor`: checks what a server needs, and says what to do about each finding.

The checks change nothing. A failed one is an error (status 1); advice is for servers that work and
could be safer or faster.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from statistics import median

import apsw
from msgspec import structs

from engine.errors import ModelError
from engine.model_store import CATALOGUE, DEFAULT_ENCODER, resolve
from gateway.background.config_reload import with_digests
from gateway.background.webhooks import read_endpoints
from gateway.cli.addresses import AddressError, check_address
from gateway.cli.database import database_file
from gateway.cli.doctor.check import Check
from gateway.cli.doctor.fleet import check_engines, check_fleet
from gateway.cli.doctor.gpus import check_gpus
from gateway.cli.doctor.levels import check_levels
from gateway.cli.doctor.pools import check_pools
from gateway.cli.result import CommandCall, CommandResult, Entry, add_nothing
from gateway.config import Config, ConfigError, parse_address
from gateway.config.config_file import PLACES
from gateway.engines.device_memory import DevicePlan, lacking_device
from gateway.engines.memory import MemoryPlan, plan_device_memories, plan_memory
from gateway.engines.model_files import check_model
from gateway.http.authentication import allowed_hosts
from gateway.http.descriptors import (
    DESCRIPTORS_KEPT,
    connections_allowed,
    descriptor_limits,
    open_descriptors,
)
from gateway.levels.placement import existing_parent
from tenancy.errors import StoreError
from tenancy.storage import backends
from tenancy.storage.sqlite import check_sqlite
from tenancy.types import wall_ms

PACKAGES = ("torch", "tokenizers", "aiohttp", "msgspec")
DISK_GIB_MIN = 1.0
"""Least free disk space that `doctor` accepts."""
FSYNC_MS_MAX = 20.0
"""Longest time of a durable write, in the middle; an answer waits for one."""
FSYNCS = 15
CLOCK_MIN_MS = 1_760_000_000_000
"""A clock before October 2025 is wrong: the program is younger."""
CLOCK_SLACK_MS = 60_000


def _run(call: CommandCall) -> CommandResult:
    """Check everything. Status 1 if a requirement is missing."""
    config = call.config
    checks = [Check("python", True, platform.python_version())]
    for check in (
        *(_packages, _sqlite, _compiler, _data_dir, _disk_speed, _clock, _database),
        *(_addresses, _hosts, _encryption, _descriptors, _model, _embeddings, _device, _memory),
        *(check_gpus, check_pools, check_levels, check_fleet, check_engines, _keys, _webhooks),
    ):
        checks += check(config)
    checks += _config_file(call.source.file)
    rows: list[dict[str, object]] = [structs.asdict(one) for one in checks]
    status = 0 if all(one.ok for one in checks) else 1
    return CommandResult(checks_text(checks, has_colours=call.has_colours), rows, status)


_COLOURS = {"ok": 32, "note": 33, "FAIL": 31}
"""Green, yellow and red."""


def checks_text(checks: list[Check], *, has_colours: bool) -> str:
    """Return a line for each check, and the fix below it."""
    width = max(len(one.check) for one in checks)
    lines = []
    for one in checks:
        mark = "FAIL" if not one.ok else "note" if one.fix else "ok"
        shown = f"\x1b[{_COLOURS[mark]}m{mark:4}\x1b[0m" if has_colours else f"{mark:4}"
        lines.append(f"{shown}  {one.check:{width}}  {one.found}")
        if one.fix:
            lines.append(f"      {'':{width}}  -> {one.fix}")
    return "\n".join(lines)


def _packages(config: Config) -> list[Check]:
    found = []
    for package in PACKAGES:
        try:
            found.append(Check(package, True, metadata.version(package)))
        except metadata.PackageNotFoundError:
            found.append(Check(package, False, "not installed", f"pip install {package}"))
    return found


def _sqlite(config: Config) -> list[Check]:
    version = apsw.sqlite_lib_version()
    try:
        check_sqlite(version)
    except StoreError as error:
        return [Check("sqlite", False, error.message, "pip install --upgrade apsw")]
    return [Check("sqlite", True, version)]


def _compiler(config: Config) -> list[Check]:
    """Check for a C compiler. Without one, CPU kernels run in torch: correct, but slow."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    fix = "install gcc or clang, or name the compiler in the variable CC"
    if compiler is None:
        return [Check("C compiler", False, "not found: CPU kernels will be slow", fix)]
    return [Check("C compiler", True, compiler)]


def _data_dir(config: Config) -> list[Check]:
    folder, name = existing_parent(config.data), "data directory"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        fix = "chown or chmod it for this user, or choose another with --data-dir"
        return [Check(name, False, f"{config.data}: {folder} is not writable", fix)]
    try:
        tempfile.TemporaryDirectory(
            dir=folder
        ).cleanup()  # /proc and others say that they are writable
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            fix = "choose a folder of a disk with --data-dir"
            found = f"{config.data}: nothing can be made in {folder}: {error.strerror}"
            return [Check(name, False, found, fix)]
    free_gib = shutil.disk_usage(folder).free / 2**30
    state = "" if config.data.exists() else ", created at the first start"
    found = f"{config.data}, {free_gib:.1f} GiB free{state}"
    if free_gib < DISK_GIB_MIN:
        fix = f"free space: {DISK_GIB_MIN:.0f} GiB or more; a full disk stops the service"
        return [Check(name, False, found, fix)]
    return [Check(name, True, found)]


def _disk_speed(config: Config) -> list[Check]:
    """Measure a small durable write in the data directory; the file is removed."""
    folder = existing_parent(config.data)
    if database_file(config) is None:
        return []
    times_ms = []
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(FSYNCS):
                began_s = time.perf_counter()
                os.pwrite(file.fileno(), bytes(4_096), 0)
                os.fdatasync(file.fileno())
                times_ms.append((time.perf_counter() - began_s) * 1_000)
    except OSError as error:
        return [Check("disk speed", False, f"{folder}: {error.strerror}", "use another disk")]
    middle_ms = median(times_ms)
    found = f"{middle_ms:.2f} ms for a durable write (slowest {max(times_ms):.1f} ms)"
    fix = (
        f"use a faster disk for the data directory: above {FSYNC_MS_MAX:.0f} ms every answer waits"
        " for it"
    )
    return [Check("disk speed", True, found, fix if middle_ms > FSYNC_MS_MAX else None)]


def _clock(config: Config) -> list[Check]:
    """Compare the wall clock with the program's age and with the database's last change."""
    now_ms = wall_ms()
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_ms / 1_000))
    fix = "set the clock and keep it set (chrony, systemd-timesyncd): bills and budgets follow it"
    latest_ms = CLOCK_MIN_MS
    file = database_file(config)
    if file is not None and file.exists():
        latest_ms = max(latest_ms, int(file.stat().st_mtime * 1_000) - CLOCK_SLACK_MS)
    if now_ms < latest_ms:
        return [Check("clock", False, f"{found}, earlier than the database's last change", fix)]
    return [Check("clock", True, found)]


def _database(config: Config) -> list[Check]:
    try:
        found = backends.describe_place(config.tenancy.database, config.data, os.environ)
    except StoreError as error:
        fix = 'see "When something is wrong" in docs/operations.md'
        return [Check("database", False, error.message, fix)]
    return [Check("database", True, found)]


def _addresses(config: Config) -> list[Check]:
    found = []
    for name, setting, address in (
        ("listen", "server.listen", config.server.listen),
        ("admin", "admin.listen", config.admin.listen),
    ):
        try:
            check_address(address, setting)
        except AddressError as error:
            found.append(Check(f"{name} address", False, error.found, error.fix))
        else:
            found.append(Check(f"{name} address", True, f"{address} is free"))
    return found


def _is_loopback(address: str) -> bool:
    host = parse_address(address, "listen")[0]
    return host in ("localhost", "::1") or host.startswith("127.")


def _hosts(config: Config) -> list[Check]:
    """Advise a name for a listener that other machines reach: they may use only its address."""
    server, local = config.server, {"localhost", "127.0.0.1", "[::1]"}
    found = "any" if "*" in server.hosts else ", ".join(dict.fromkeys(allowed_hosts(server)))
    fix = (
        f'add the name that clients use, as in server.hosts = ["{platform.node()}"]: other names'
        " are refused"
    )
    is_local = set(server.hosts) <= local and not _is_loopback(server.listen)
    return [Check("host names", True, found, fix if is_local else None)]


def _encryption(config: Config) -> list[Check]:
    """Advise a proxy with TLS where keys and prompts would cross a network in plain text."""
    far = [
        setting
        for setting, address in (
            ("server.listen", config.server.listen),
            ("admin.listen", config.admin.listen),
        )
        if not _is_loopback(address)
    ]
    if not far:
        return [Check("encryption", True, "both listeners are on this machine only")]
    fix = (
        "listen on 127.0.0.1 and put a proxy with TLS before it (deploy/ has examples); keep the"
        " admin listener off public networks"
    )
    return [Check("encryption", True, f"plain HTTP on {' and '.join(far)}", fix)]


def _descriptors(config: Config) -> list[Check]:
    """Check that the hard limit of descriptors leaves room for the configured connections."""
    soft, hard = descriptor_limits()
    wanted = config.server.connections_max
    # The gateway raises its soft limit to the hard one at its start.
    allowed = connections_allowed(wanted) + max(0, hard - soft)
    if allowed < wanted:
        need = wanted + DESCRIPTORS_KEPT + open_descriptors()
        fix = (
            f"raise the hard limit to {need} (ulimit -Hn, LimitNOFILE=), or lower"
            " server.connections_max"
        )
        return [Check("descriptors", True, f"{hard}: fewer than {wanted} connections", fix)]
    return [Check("descriptors", True, f"room for {wanted} connections")]


def _model(config: Config) -> list[Check]:
    return [_one_model(config, one.name, one.source) for one in config.served_models()]


def _one_model(config: Config, name: str, source: str) -> Check:
    """Check that a model is here and one that runs, or can be fetched. `name`: of one of several
    models."""
    what = f"model {name}" if name else "model"
    try:
        return Check(what, True, str(check_model(source, config.models_dir)))
    except ModelError as error:
        if error.code != "not_found":
            return Check(what, False, error.message, "choose a model that docs/models.md lists")
        if source in CATALOGUE:
            return Check(what, True, f"{source}, fetched at the first start")
        setting = "the model's path" if name else "model.name"
        fix = f"trunkline pull NAME, or set {setting} to a file or folder that exists"
        return Check(what, False, error.message, fix)


def _embeddings(config: Config) -> list[Check]:
    """Check that the embedding model is one, and that it is here or can be fetched."""
    name, check = config.embeddings.model, "embedding model"
    if not name:
        return []
    is_builtin = name in CATALOGUE
    fix = f"set embeddings.model to {DEFAULT_ENCODER}, or to a folder of an encoder"
    if is_builtin and not CATALOGUE[name].is_encoder:
        return [Check(check, False, f"{name} generates text and embeds none", fix)]
    try:
        return [Check(check, True, str(resolve(name, config.models_dir)))]
    except ModelError as error:
        if is_builtin:
            return [Check(check, True, f"{name}, fetched at the first start")]
        return [Check(check, False, error.message, fix)]


def _device(config: Config) -> list[Check]:
    """Say where the models run; an NVIDIA device that they ask for has to be usable."""
    wanted = {config.engine_of(model).device for model in config.served_models()}
    lacks = lacking_device()
    if wanted == {"cpu"} or not lacks:
        return [Check("device", True, "CPU" if wanted == {"cpu"} else "NVIDIA")]
    if "cuda" in wanted:
        fix = 'install the driver and a torch with CUDA, or set engine.device to "auto" or "cpu"'
        return [Check("device", False, f"engine.device is cuda: {lacks}", fix)]
    return [Check("device", True, f"CPU: {lacks}")]


def _memory(config: Config) -> list[Check]:
    """Compare the free memory of the machine, and of an NVIDIA device, with the models, the KV
    blocks and the processes."""
    plans: dict[str, MemoryPlan | DevicePlan | None] = {"memory": plan_memory(config)}
    for plan in plan_device_memories(config):
        plans["device memory" + ("" if plan.gpu is None else f" of {plan.name}")] = plan
    fix = "lower engine.kv_memory_mib, choose a smaller model, or add memory"
    return [
        Check(name, one.fits, one.describe(), None if one.fits else fix)
        for name, one in plans.items()
        if one is not None
    ]


def _keys(config: Config) -> list[Check]:
    """Check the files of declared keys."""
    files = [key.file for one in config.tenants or () for key in one.keys if key.file]
    if not files:
        return []
    try:
        with_digests(config.tenants or ())
    except ConfigError as error:
        fix = "create the file with the key alone, readable by this user only (chmod 600)"
        return [Check("key files", False, str(error), fix)]
    return [Check("key files", True, f"{len(files)} valid")]


def _webhooks(config: Config) -> list[Check]:
    """Check the addresses and secrets of webhooks; sends nothing."""
    if not config.webhooks:
        return []
    try:
        read_endpoints(config.webhooks, os.environ)
    except ConfigError as error:
        fix = "create the file, or set the variable in the server's environment"
        return [Check("webhooks", False, str(error), fix)]
    return [Check("webhooks", True, f"{len(config.webhooks)} valid")]


def _config_file(path: Path | None) -> list[Check]:
    """Check that no other user can change the configuration file."""
    if path is None:
        found = f"no file ({PLACES}): defaults, variables and options"
        return [Check("configuration", True, found)]
    if path.is_file() and path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fix = f"chmod go-w {path}: it names keys, prices and addresses"
        return [Check("configuration", True, f"{path} can be changed by other users", fix)]
    return [Check("configuration", True, f"{path} is valid")]


COMMANDS: Mapping[str, Entry] = {"doctor": Entry(add_nothing, _run)}
