"""A real engine with a sealed disk and a remote store: python -m tests.e2e.remote_engine MODEL
FOLDER TASK FAR

With TASK `stay` it answers a promised prompt, says when disk and remote store have it all, and
waits to be killed; `demote` takes everything off the disk that the remote store has; `read`
answers that prompt and another one. Prints JSON lines.
"""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from engine.api import CacheGrant, LeaseRequest, Retention
from engine.config import EngineConfig, LevelsConfig, RemoteConfig
from engine.core.core import Core
from engine.server.composition import core_of_model
from engine.server.service import smoke_test
from engine.storage.folder import wait_for_lock
from engine.storage.index.index import RecordIndex
from engine.storage.index.index_file import INDEX_NAME
from engine.storage.index.remote_rows import RemoteRows
from engine.storage.sealing.unlocking import SealSettings, unlock
from tests.e2e.leveled_engine import PROMPT_TOKENS, WAIT_S, answer, say
from tests.e2e.patient_engine import LOOK_MS, wait_for_loads

KEY_VARIABLE = "TRUNKLINE_TEST_SEAL"


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


def demote_all(folder: Path) -> int:
    """Give up the place of each record of a sealed store that has an object; return how many."""
    with (
        closing(wait_for_lock(folder, WAIT_S, time.sleep)),
        closing(unlock(folder, SealSettings(key_env=KEY_VARIABLE), os.environ)) as seals,
        closing(RecordIndex(folder / INDEX_NAME, may_make=False, seals=seals)) as index,
    ):
        rows = RemoteRows(index.file)
        there = [row.record_id for row in index.rows() if rows.name_of(row.record_id)]
        with index.file.change():
            for record_id in there:
                rows.demote(record_id)
    return len(there)


def main() -> None:
    """Do one task."""
    model, folder, task, far = sys.argv[1:5]
    if task == "demote":
        say({"name": "demoted", "records": demote_all(Path(folder))})
        return
    wait_for_loads(pytest.MonkeyPatch())
    levels = LevelsConfig(
        disk_gib=1.0,
        dir=folder,
        slab_mib=64,
        look_ms=LOOK_MS,
        seal=True,
        key_env=KEY_VARIABLE,
        remote=RemoteConfig(f"file://{far}", timeout_ms=10_000),
    )
    core, _ = core_of_model(Path(model), EngineConfig(kv_memory_mib=128, levels=levels))
    smoke_test(core)
    chance = random.Random(1)
    warm = tuple(chance.randrange(40_000) for _ in range(PROMPT_TOKENS))
    cold = tuple(chance.randrange(40_000) for _ in range(PROMPT_TOKENS))
    kept = LeaseRequest(PROMPT_TOKENS, Retention("hour", 3600, 7200), "lease")
    if task == "stay":
        say(answer(core, "cold", warm, CacheGrant(b"n", leases=(kept,))))
        for name in ("disk", "remote"):
            wait_for_level(core, name, PROMPT_TOKENS // 16)
        say({"name": "stored"})
        time.sleep(WAIT_S)
    else:
        wait_for_level(core, "remote", 1)
        say(answer(core, "warm", warm, CacheGrant(b"n")))
        say(answer(core, "other", cold, CacheGrant(b"n")))
    core.close()


if __name__ == "__main__":
    main()
