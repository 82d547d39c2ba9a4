"""What `trunkline doctor` says of the levels below the device: their folder, speed and worth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from engine.config import LevelsConfig
from engine.errors import EngineError
from engine.storage.folder import doubt_about, type_of_file_system
from engine.storage.remote.address import open_remote
from engine.storage.remote.objects import RemoteFailed, RemoteStore, check_proof
from engine.storage.sealing.master_key import read_key
from engine.storage.sealing.unlocking import shared_proof
from gateway.cli.doctor.check import Check
from gateway.config import Config, ServedModelSettings
from gateway.engines.device_memory import runs_on_device
from gateway.engines.memory import size_host_levels
from gateway.levels.compute_speed import measure_flops_per_s
from gateway.levels.disk_speed import DiskSpeed, measure_disk
from gateway.levels.level_worth import level_worth
from gateway.levels.model_cost import (
    find_card,
    flops_per_token,
    kv_bytes_per_token,
)
from gateway.levels.placement import existing_parent, find_all_problems, levels_dir, levels_here
from tenancy.accounts.tenants import list_tenant_records
from tenancy.errors import StoreError
from tenancy.storage import backends

FIXES = {
    "engine.levels.dir": "mkdir, chown or chmod 700 it, or set engine.levels.dir to another folder",
    "engine.levels.disk_gib": "set engine.levels.disk_gib to what the file system has room for",
    "engine.levels.host_mib": "lower engine.levels.host_mib",
    "engine.levels.stage_mib": "lower engine.levels.stage_mib",
    "engine.levels.seal": "install it, or leave copies plain with engine.levels.seal = false",
    "engine.levels.remote.url": "install it, or remove engine.levels.remote.url",
    "engine.levels.key_file": "make a key with `trunkline levels new-key`, or chmod 400 it",
    "engine.levels.key_env": "set the variable to 64 hexadecimal digits",
    "engine.levels.key_file_before": "remove engine.levels.key_file_before once keys are rewrapped",
}


def check_levels(config: Config) -> list[Check]:
    """Return the findings; none if no level is configured. Writes and removes 64 MiB at most."""
    here = [one for one in levels_here(config) if one.is_on]
    if not here:
        return []
    if problems := [problem for one in here for problem in find_all_problems(config, one)]:
        return [Check("levels", False, str(one), FIXES.get(one.key)) for one in problems]
    found, levels = _check_host(config), config.engine.levels
    if levels.disk_gib:
        found += [*_check_seal(config), *_check_disk(config), *_check_remote(levels)]
        found += _check_remote_tenants(config)
    return found


def _check_host(config: Config) -> list[Check]:
    """Say how much host memory each model's level takes; of "auto", what it would get now."""
    name, found = "host level", []
    plan, sizes = size_host_levels(config)
    free = "this system does not tell its free memory" if plan is None else plan.describe()
    for model in config.served_models():
        levels, check = config.engine_of(model).levels, f"{name} {model.name}".strip()
        if not levels.host_mib:
            continue
        if model.name not in sizes:
            found.append(Check(check, True, f"{levels.host_mib} MiB of host memory"))
        elif sizes[model.name]:
            text = f"auto: {sizes[model.name]} MiB of host memory at a start now"
            found.append(Check(check, True, text))
        else:
            fix = "add memory, lower engine.kv_memory_mib, or set a number for host_mib"
            found.append(Check(check, True, f"auto: none, {free}", fix))
    return found


def _check_seal(config: Config) -> list[Check]:
    levels = config.engine.levels
    if not levels.seal:
        return []
    key = read_key(levels.key_file, levels.key_env, os.environ)
    where = levels.key_file or f"${levels.key_env}"
    fix = None
    if levels.key_file and Path(levels.key_file).absolute().is_relative_to(levels_dir(config)):
        fix = "keep the key outside the folder of the copies: with both, every copy can be read"
    return [Check("disk level seal", True, f"key {key.fingerprint} of {where}", fix)]


def _check_remote(levels: LevelsConfig) -> list[Check]:
    """Ask the remote store for its names, and time the answer; one that replicas share is written
    and read, and its master key compared."""
    remote, name = levels.remote, "remote level"
    if not remote.url:
        return []
    began_s = time.perf_counter()
    try:
        store = open_remote(remote.url, remote.timeout_ms / 1_000)
        store.names("probe/", 1)
        shared = _try_shared(levels, store) if remote.shared else ""
    except (RemoteFailed, EngineError) as error:
        fix = "check engine.levels.remote.url, the network, and the credentials in the environment"
        return [Check(name, False, f"{remote.url}: {error}", fix)]
    took_ms = 1_000 * (time.perf_counter() - began_s)
    return [Check(name, True, f"{remote.url} answers in {took_ms:.0f} ms{shared}")]


def _try_shared(levels: LevelsConfig, store: RemoteStore) -> str:
    """Write, read and delete an object in a shared store; return what its master key is. Raises
    RemoteFailed, EngineError."""
    probe, sent = f"probe/{os.urandom(8).hex()}", b"trunkline doctor"
    if not store.put_new(probe, memoryview(sent)):
        raise RemoteFailed("it did not take a new object")
    found = bytes(store.get(probe, len(sent)))
    store.delete([probe])
    if found != sent:
        raise RemoteFailed("it returned other bytes than were written")
    key = read_key(levels.key_file, levels.key_env, os.environ)
    is_known = check_proof(store, shared_proof(key), may_make=False)
    return f", shared under key {key.fingerprint}{'' if is_known else ', empty until now'}"


def _check_remote_tenants(config: Config) -> list[Check]:
    """Advise where a remote store is configured and no tenant's KV may go there."""
    if not config.engine.levels.remote.url:
        return []
    rests = {one.name: one.at_rest for one in config.tenants or ()}
    try:
        place = config.tenancy.database
        with backends.closing_existing(place, config.data, os.environ) as (store, has_tables):
            for one in list_tenant_records(store) if store is not None and has_tables else ():
                if one.tenant.status == "active":
                    rests.setdefault(one.tenant.name, one.policy.at_rest)
    except StoreError:  # told by the check of the database
        return []
    name, allowed = "remote level use", sum(one == "remote" for one in rests.values())
    if allowed:
        return [Check(name, True, f"{allowed} of {len(rests)} tenants allow it")]
    fix = (
        'trunkline tenant set NAME --at-rest remote, or at_rest = "remote" in its table of'
        " [[tenants]]: the default is this server's disk alone"
    )
    text = f"none of {len(rests)} tenants allows it: nothing will be stored there"
    return [Check(name, True, text, fix)]


def _check_disk(config: Config) -> list[Check]:
    folder = levels_dir(config)
    kind = type_of_file_system(existing_parent(folder))
    doubt = doubt_about(existing_parent(folder))
    where = Check(
        "disk level",
        True,
        f"{folder}, {config.engine.levels.disk_gib:g} GiB on {kind or 'an unknown file system'}",
        f"choose a disk: {doubt.removesuffix('.')}" if doubt else None,
    )
    try:
        speed = measure_disk(existing_parent(folder), time.perf_counter)
    except OSError as error:
        fix = "free space, or choose another folder with engine.levels.dir"
        return [where, Check("disk level speed", False, f"{folder}: {error.strerror}", fix)]
    cached = ", perhaps from memory" if speed.is_cached else ""
    text = (
        f"{speed.write_bytes_per_s / 1e6:,.0f} MB/s written, {speed.read_bytes_per_s / 1e6:,.0f}"
        f" MB/s read{cached}"
    )
    flops_per_s = cache(lambda: measure_flops_per_s(time.perf_counter))
    worths = [
        _check_worth(config, model, speed, flops_per_s)
        for model in config.served_models()
        if not model.is_elsewhere and config.engine_of(model).levels.disk_gib
    ]
    return [where, Check("disk level speed", True, text), *worths]


def _check_worth(
    config: Config, model: ServedModelSettings, speed: DiskSpeed, flops_per_s: Callable[[], float]
) -> Check:
    """Say what loading a token takes on a model, and computing one on this machine."""
    name, engine = f"disk level worth {model.name}".strip(), config.engine_of(model)
    card = find_card(model.source, config.models_dir)
    if card is None:
        return Check(name, True, "known once a server has prepared the model")
    bytes_per_token = kv_bytes_per_token(card.config, engine.kv_dtype)
    room = int(engine.levels.disk_gib * 2**30 / bytes_per_token)
    load_us = bytes_per_token / speed.read_bytes_per_s * 1e6
    text = f"room for {room:,} tokens of {bytes_per_token:,} B; a token is read in {load_us:.0f} us"
    flops = flops_per_token(card.config)
    if flops is None or runs_on_device(engine):
        rate = speed.read_bytes_per_s / bytes_per_token
        return Check(
            name, True, f"{text}: loading wins where fewer than {rate:,.0f} tokens a s are computed"
        )
    rate = flops_per_s() / flops
    worth = level_worth("disk", bytes_per_token, speed.read_bytes_per_s, rate)
    text += f", computed in {worth.compute_s_per_token * 1e6:.0f} us or more"
    if worth.tokens_min is None:
        fix = "use a faster disk; as it is, it keeps prefixes over restarts and saves no time"
        return Check(name, True, f"{text}: computing is faster", fix)
    tokens = max(worth.tokens_min, engine.levels.disk_tokens_min)
    return Check(name, True, f"{text}: {worth.ratio:.1f} times faster, from {tokens} tokens on")
