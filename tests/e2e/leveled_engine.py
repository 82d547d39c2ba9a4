"""A real engine with a disk, in a process that may be killed: python -m tests.e2e.leveled_engine

Prints one JSON line for each prompt of 2,048 tokens that it answered, and for what its disk has.
"""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.api import (
    CacheGrant,
    Finished,
    LeaseRequest,
    Request,
    Retention,
    Sampling,
    Started,
    Tokens,
)
from engine.config import EngineConfig, LevelsConfig, RemoteConfig
from engine.core.core import Core
from engine.server.service import core_of_model, smoke_test
from engine.storage.folder import wait_for_lock
from engine.storage.objects import FolderObjects
from engine.storage.plans import StoreSettings
from engine.storage.record import HEADER_BYTES
from engine.storage.remote_link import RemoteLink
from engine.storage.slabs import DiskCalls
from engine.storage.store import DiskStore
from engine.storage.unlocking import SealSettings, unlock

KEY_VARIABLE = "TRUNKLINE_TEST_SEAL"
PROMPT_TOKENS, OUTPUT_TOKENS = 2048, 8
WAIT_S = 30.0


def answer(core: Core, name: str, tokens: tuple[int, ...], grant: CacheGrant) -> dict[str, Any]:
    """Answer one prompt; return its tokens, what was cached, and the time to the first token."""
    began_s = time.monotonic()
    first_s, out = 0.0, list[int]()
    core.submit(Request(name, tokens, OUTPUT_TOKENS, grant, Sampling(temperature=0)))
    found: dict[str, Any] = {"name": name}
    while True:
        for event in core.step():
            if isinstance(event, Started):
                found |= {"cached": event.cached_tokens, "loaded": dict(event.loaded_tokens)}
            elif isinstance(event, Tokens):
                first_s = first_s or time.monotonic() - began_s
                out += [token.token_id for token in event.tokens]
            elif isinstance(event, Finished):
                return found | {"tokens": out, "first_s": round(first_s, 4)}
        if core.is_waiting_for_levels:
            time.sleep(0.0005)


def say(facts: dict[str, Any]) -> None:
    """Print one line."""
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
    sys.stdout.flush()


def wait_for_level(core: Core, name: str, records: int) -> None:
    """Run until a level has `records` records."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        core.step()
        for level in core.stats().levels:
            if level.name == name and level.state == "open" and level.blocks >= records:
                return
        time.sleep(0.002)
    raise TimeoutError(f"{core.stats().levels[-1]}; expected {records} records")


def let_all_down(folder: Path, far: Path) -> int:
    """Give up the place of each record of a sealed store that has an object; return how many."""
    with closing(wait_for_lock(folder, WAIT_S, time.sleep)):
        size = int(next(folder.glob("*.slab")).name.split("-")[0]) - HEADER_BYTES
        link = RemoteLink(lambda: FolderObjects(far), time.monotonic, WAIT_S)
        store = DiskStore(
            StoreSettings(folder, disk_bytes=2**30, slot_bytes=size),
            lambda slot: memoryview(b""),
            lambda: time.time_ns() // 1_000_000,
            time.monotonic,
            DiskCalls(),
            seals=unlock(folder, SealSettings(key_env=KEY_VARIABLE), os.environ),
            link=link,
        )
        assert store.remote is not None
        count = sum(store.remote.let_down(number) for number in range(1, 100_000))
        store.close()
        link.close()
    return count


def main() -> None:
    """Answer; with `stay`, then say that the levels have it all and wait to be killed. With
    `let_down`, take everything off the disk that the remote store has.

    Arguments: model, folder, task, and the folder of a remote store: then the disk is sealed.
    """
    model, folder, task, *rest = sys.argv[1:5]
    if task == "let_down":
        say({"name": "let down", "records": let_all_down(Path(folder), Path(rest[0]))})
        return
    levels = LevelsConfig(disk_gib=1.0, dir=folder, slab_mib=64)
    if rest:
        remote = RemoteConfig(f"file://{rest[0]}", timeout_ms=10_000)
        levels = replace(levels, seal=True, key_env=KEY_VARIABLE, remote=remote)
    config = EngineConfig(kv_memory_mib=128, levels=levels)
    core, _ = core_of_model(Path(model), config)
    smoke_test(core)
    chance = random.Random(1)
    warm = tuple(chance.randrange(40_000) for _ in range(PROMPT_TOKENS))
    cold = tuple(chance.randrange(40_000) for _ in range(PROMPT_TOKENS))
    kept = LeaseRequest(PROMPT_TOKENS, Retention("hour", 3600, 7200), "lease")
    if task == "stay":
        say(answer(core, "cold", warm, CacheGrant(b"n", leases=(kept,))))
        for name in ("disk", "remote")[: 1 + len(rest)]:
            wait_for_level(core, name, PROMPT_TOKENS // 16)
        say({"name": "stored"})
        time.sleep(WAIT_S)
    else:
        wait_for_level(core, "remote" if rest else "disk", 1)
        say(answer(core, "warm", warm, CacheGrant(b"n")))
        say(answer(core, "other", cold, CacheGrant(b"n")))
    core.close()


if __name__ == "__main__":
    main()
