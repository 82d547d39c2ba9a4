"""A real engine with a disk, in a process that may be killed.

    python -m tests.e2e.leveled_engine MODEL FOLDER TASK KV_DTYPE [FAR]

`stay` answers a promised prompt of 2,048 tokens, says when every level has it all, and waits to be
killed; `read` answers that prompt and another one; `miss` that prompt alone. With FAR, a folder,
the disk is sealed and has a remote store there. Prints one JSON line for each answer, with the
processor's seconds to the first token (others' work beside it takes none).
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import msgspec
import pytest

from engine.api import CacheGrant, LeaseRequest, Retention
from engine.config import EngineConfig, LevelsConfig, RemoteConfig
from engine.core.core import Core
from engine.server.composition import core_of_model
from engine.server.service import smoke_test
from tests.bench.answers import ask, wait_for_level
from tests.bench.results import print_line
from tests.e2e.patient_engine import LOOK_MS, wait_for_loads

PROMPT_TOKENS, OUTPUT_TOKENS = 2048, 8
STAY_S = 60.0
KEY_VARIABLE = "TRUNKLINE_TEST_SEAL"


def answer(core: Core, name: str, tokens: tuple[int, ...], grant: CacheGrant) -> None:
    """Answer one prompt, and print what came."""
    found = ask(core, name, tokens, grant, OUTPUT_TOKENS, time.process_time)
    print_line(msgspec.json.encode(found).decode())


def stay() -> None:
    """Say that all is stored, and wait to be killed."""
    print_line('{"name":"stored"}')
    time.sleep(STAY_S)


def main() -> None:
    """Do the task."""
    model, folder, task, kv_dtype, *far = sys.argv[1:]
    wait_for_loads(pytest.MonkeyPatch())
    levels = LevelsConfig(disk_gib=1.0, dir=folder, slab_mib=64, look_ms=LOOK_MS)
    if far:
        remote = RemoteConfig(f"file://{far[0]}", timeout_ms=10_000)
        levels = msgspec.structs.replace(levels, seal=True, key_env=KEY_VARIABLE, remote=remote)
    names = ("disk", "remote") if far else ("disk",)
    engine = {"kv_memory_mib": 128, "kv_dtype": kv_dtype}
    config = msgspec.structs.replace(msgspec.convert(engine, EngineConfig), levels=levels)
    core, info = core_of_model(Path(model), config)
    fidelity = info.kv_fidelity
    smoke_test(core)
    chance = random.Random(1)
    warm = tuple(chance.randrange(40_000) for _ in range(PROMPT_TOKENS))
    cold = tuple(chance.randrange(40_000) for _ in range(PROMPT_TOKENS))
    kept = LeaseRequest(PROMPT_TOKENS, Retention("hour", 3600, 7200), "lease")
    if task == "stay":
        answer(core, "cold", warm, CacheGrant(b"n", leases=(kept,), fidelity=fidelity))
        for name in names:
            wait_for_level(core, name, PROMPT_TOKENS // 16)
        stay()
    else:
        wait_for_level(core, names[-1], 1)
        answer(core, "warm", warm, CacheGrant(b"n", fidelity=fidelity))
        if task == "read":
            answer(core, "other", cold, CacheGrant(b"n", fidelity=fidelity))
    core.close()


if __name__ == "__main__":
    main()
