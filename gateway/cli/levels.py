"""`trunkline levels`: the levels of the cache of a running server, and its disk while none runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import apsw

from engine.storage.folder import prepare_folder
from engine.storage.rebuild import (
    clear_folder,
    empty_remote,
    rebuild_index,
    rewrap_keys,
    verify_store,
)
from engine.storage.remote.address import remote_settings
from engine.storage.sealing.master_key import make_key_file
from engine.storage.sealing.unlocking import seal_settings
from gateway.cli.addresses import ask_admin
from gateway.cli.arguments import UsageError, add_actions
from gateway.cli.database import prepare_data_dir
from gateway.cli.result import CommandCall, CommandError, CommandResult, Entry, table_text
from gateway.config import Config, ConfigError
from gateway.config.config_file import describe
from gateway.levels.placement import ServerLock, levels_dir, model_folders
from gateway.levels.report import SWITCH_ON
from tenancy.types import wall_ms

NUMBERS = ("size", "used", "promised", "free", "found tokens", "reads at")


def _add_actions(command: argparse.ArgumentParser) -> None:
    texts = {
        "show": "Show the levels of the running server.",
        "init": "Make the disk level's folder, or empty it; no server may run.",
        "clear": "Delete everything on the disk level; no server may run.",
        "verify": "Read the whole disk level and drop what is damaged; no server may run.",
        "rebuild": "Make the disk level's index anew from its files; no server may run.",
        "new-key": "Make the file of the master key that seals the disk level.",
        "rewrap": "Give the disk level a new master key; no server may run.",
    }
    text = "the new file; default: engine.levels.key_file"
    add_actions(command, texts)["new-key"].add_argument(
        "file", nargs="?", metavar="FILE", type=Path, help=text
    )


def _run(call: CommandCall) -> CommandResult:
    """Run one action. Raises CommandError, and EngineError for a folder that cannot be used."""
    if call.options.action == "show":
        return levels_show(call.config)
    if call.options.action == "new-key":
        return _make_key(call)
    folder = levels_dir(call.config)
    try:
        if not folder.is_dir():
            return _change(call)
        with closing(ServerLock(folder)):  # a server's storage process may be between two lives
            return _change(call)
    except (apsw.Error, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CommandError(f"{folder}: {reason}; trunkline levels clear begins anew") from error


def _make_key(call: CommandCall) -> CommandResult:
    """Make a key file. Raises UsageError and CommandError."""
    configured = call.config.engine.levels.key_file
    file = call.options.file or (Path(configured) if configured else None)
    if file is None:
        raise UsageError(
            "FILE is required: trunkline levels new-key FILE, or set engine.levels.key_file"
        )
    try:
        key = make_key_file(file)
    except OSError as error:
        raise CommandError(f"{file} cannot be made: {error.strerror}") from error
    text = (
        f"{file} has the new key {key.fingerprint}: keep a copy elsewhere, apart from the disk\n"
        f'these lines seal with it:\n  [engine.levels]\n  seal = true\n  key_file = "{file}"'
    )
    return CommandResult(text, {"file": str(file), "fingerprint": key.fingerprint})


def _empty_remote(call: CommandCall, folder: Path) -> tuple[str, dict[str, object]]:
    """Delete a store's objects in the remote store; return the words and the data about it."""
    emptied = empty_remote(folder, remote_settings(call.config.engine.levels.remote))
    if emptied is None:
        return "", {}
    text = f"; {emptied.objects} objects deleted in the remote store"
    if emptied.problem:
        text += f", the rest not: {emptied.problem}"
    return text, {"objects": emptied.objects, "objects_problem": emptied.problem or None}


def _rewrap(call: CommandCall, folder: Path) -> CommandResult:
    """Wrap the keys of one store by the new master key. Raises ConfigError."""
    levels = call.config.engine.levels
    settings = seal_settings(levels)
    if settings is None or not levels.key_file_before:
        raise ConfigError(
            "engine.levels.key_file_before is not set; expected the former key's file there, and"
            " the new key's in engine.levels.key_file"
        )
    keys = rewrap_keys(folder, settings, os.environ)
    text = f"{folder}: {keys} keys wrapped anew; engine.levels.key_file_before can be removed"
    return CommandResult(text, {"folder": str(folder), "keys": keys})


def _change(call: CommandCall) -> CommandResult:
    """Change the store of each model. Several have a list of results, in the models' order."""
    found = [_change_one(call, folder) for folder in model_folders(call.config)]
    if len(found) == 1:
        return found[0]
    text = "\n".join(one.text for one in found)
    return CommandResult(text, [one.data for one in found], max(one.status for one in found))


def _change_one(call: CommandCall, folder: Path) -> CommandResult:
    progress = partial(call.show, "levels")
    seal = seal_settings(call.config.engine.levels)
    match call.options.action:
        case "init" | "clear" as action:
            if action == "init":
                prepare_data_dir(call.config)
                prepare_folder(folder)
            far, more = _empty_remote(call, folder)
            freed = clear_folder(folder)
            done = "ready, and empty" if action == "init" else f"empty: {size_text(freed)} freed"
            data = {"folder": str(folder), "freed_bytes": freed, **more}
            return CommandResult(f"{folder} is {done}{far}", data)
        case "verify":
            remote = remote_settings(call.config.engine.levels.remote)
            found = verify_store(folder, progress, seal, os.environ, remote)
            data = {"folder": str(folder), "records": found.records, "damaged": found.damaged}
            text = (
                f"{found.records} records read, {found.damaged} dropped (damaged, or under damaged)"
            )
            return CommandResult(text, data, 1 if found.damaged else 0)
        case "rewrap":
            return _rewrap(call, folder)
        case _:
            made = rebuild_index(folder, wall_ms(), progress, seal, os.environ)
            far, more = _empty_remote(call, folder)
            data = {"folder": str(folder), "records": made.records, "left_out": made.left_out}
            text = f"{made.records} records kept, {made.left_out} left out{far}"
            return CommandResult(text, {**data, **more})


def levels_show(config: Config) -> CommandResult:
    """Return the levels of the running server. Raises CommandError if none answers."""
    found = ask_admin(config, "/admin/v1/levels")
    rows: list[dict[str, object]] = [
        {
            "level": one["name"],
            "state": one["state"],
            "size": size_text(one["capacity_bytes"]),
            "used": size_text(one["used_bytes"]),
            "promised": size_text(one["promised_bytes"]),
            "free": size_text(one["free_bytes"]),
            "found tokens": one["loaded_tokens_total"],
            "reads at": f"{size_text(int(rate))}/s" if (rate := one.get("bytes_per_s")) else None,
        }
        for one in found["levels"]
    ]
    text = table_text(rows, right=NUMBERS) if rows else "the engine is starting"
    for one in found["levels"]:
        if one["reason"]:
            text += f"\nthe {one['name']} level is {one['state']}: {one['reason']}"
    if not found["is_on"]:
        lines = SWITCH_ON.replace("\n", "\n  ")
        text += (
            "\nnothing is kept below the device; these lines of the configuration file give the"
            f" cache a disk, from the next start on:\n  {lines}\n"
            f"configuration file of the server: {describe(found['config_file'])}"
        )
    return CommandResult(text, found, has_heading=bool(rows))


def size_text(size: int) -> str:
    """Return bytes as people read them, such as 1.5 GiB."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if size >= 2**power:
            return f"{size / 2**power:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"


COMMANDS: Mapping[str, Entry] = {"levels": Entry(_add_actions, _run)}
