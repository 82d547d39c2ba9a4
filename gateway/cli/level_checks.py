"""What `trunkline doctor` says of the levels below the device: their folder, speed and worth."""

from __future__ import annotations

import time
from pathlib import Path

from msgspec import Struct

from engine.errors import ModelError
from engine.model_store import resolve
from engine.storage.folder import doubt_about, type_of_file_system
from gateway.config import Config
from gateway.levels.disk_speed import DiskSpeed, measure_disk
from gateway.levels.model_cost import (
    find_architecture,
    flops_per_token,
    has_windows,
    kv_bytes_per_token,
    measure_flops_per_s,
)
from gateway.levels.placement import (
    existing_parent,
    find_problems,
    levels_dir,
    total_memory_mib,
)
from gateway.levels.worth import level_worth

FIXES = {
    "engine.levels.dir": "mkdir, chown or chmod 700 it, or set engine.levels.dir to another folder",
    "engine.levels.disk_gib": "set engine.levels.disk_gib to what the file system has room for",
    "engine.levels.host_mib": "lower engine.levels.host_mib",
    "engine.levels.stage_mib": "lower engine.levels.stage_mib",
}


class LevelCheck(Struct, frozen=True):
    """A finding: its name, whether it is right, what was found and what to do."""

    check: str
    ok: bool
    found: str
    fix: str | None = None


def check_levels(config: Config) -> list[LevelCheck]:
    """Return the findings; none where no level is configured. Writes and removes 64 MiB at most."""
    if not config.engine.levels.is_on:
        return []
    memory_mib = total_memory_mib(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))
    problems = find_problems(config, memory_mib)
    if problems:
        return [LevelCheck("levels", False, str(one), FIXES.get(one.key)) for one in problems]
    levels, found = config.engine.levels, []
    if levels.host_mib:
        found.append(LevelCheck("host level", True, f"{levels.host_mib} MiB of host memory"))
    if levels.disk_gib:
        found += _check_disk(config)
    return found


def _check_disk(config: Config) -> list[LevelCheck]:
    folder = levels_dir(config)
    kind = type_of_file_system(existing_parent(folder))
    doubt = doubt_about(existing_parent(folder))
    where = LevelCheck(
        "disk level",
        True,
        f"{folder}, {config.engine.levels.disk_gib:g} GiB on {kind or 'an unknown file system'}",
        f"choose a disk: {doubt.removesuffix('.')}" if doubt else None,
    )
    try:
        speed = measure_disk(existing_parent(folder), time.perf_counter)
    except OSError as error:
        fix = "free space, or choose another folder with engine.levels.dir"
        return [where, LevelCheck("disk level speed", False, f"{folder}: {error.strerror}", fix)]
    cached = ", perhaps from memory" if speed.is_cached else ""
    text = (
        f"{speed.write_bytes_per_s / 1e6:,.0f} MB/s written, {speed.read_bytes_per_s / 1e6:,.0f}"
        f" MB/s read{cached}"
    )
    return [where, LevelCheck("disk level speed", True, text), _check_worth(config, speed)]


def _check_worth(config: Config, speed: DiskSpeed) -> LevelCheck:
    """Say what loading a token takes on this model, and computing one on this machine."""
    name = "disk level worth"
    try:
        shape = find_architecture(resolve(config.model.name, config.models_dir), config.models_dir)
    except ModelError:
        shape = None
    if shape is None:
        return LevelCheck(name, True, "told once a server has prepared the model")
    if has_windows(shape):
        fix = "remove [engine.levels], or serve a model without windows"
        return LevelCheck(name, True, "none: models with windows are served without levels", fix)
    bytes_per_token = kv_bytes_per_token(shape, config.engine.kv_dtype)
    room = int(config.engine.levels.disk_gib * 2**30 / bytes_per_token)
    load_us = bytes_per_token / speed.read_bytes_per_s * 1e6
    text = f"room for {room:,} tokens of {bytes_per_token:,} B; a token is read in {load_us:.0f} us"
    flops = flops_per_token(shape)
    if flops is None or config.engine.device == "cuda":
        rate = speed.read_bytes_per_s / bytes_per_token
        return LevelCheck(
            name, True, f"{text}: worth it where prompts are computed at less than {rate:,.0f} a s"
        )
    rate = measure_flops_per_s(time.perf_counter) / flops
    worth = level_worth("disk", bytes_per_token, speed.read_bytes_per_s, rate)
    text += f", computed in {worth.compute_s_per_token * 1e6:.0f} us or more"
    if worth.tokens_min is None:
        fix = "use a faster disk; as it is, it keeps prefixes over restarts and saves no time"
        return LevelCheck(name, True, f"{text}: computing is faster", fix)
    tokens = max(worth.tokens_min, config.engine.levels.disk_tokens_min)
    return LevelCheck(
        name, True, f"{text}: {worth.ratio:.1f} times faster, from {tokens} tokens on"
    )
