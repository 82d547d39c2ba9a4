"""A real engine with a disk, in a process that may be killed.

    python -m tests.e2e.leveled_engine MODEL FOLDER TASK KV_DTYPE [FAR]

`stay` answers a promised prompt, says when every level has it all, and waits to be killed; `read`
answers that prompt and a short other one; `miss` that prompt's first tokens. With FAR, a folder,
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

PROMPT_TOKENS, FAR_PROMPT_TOKENS = 1024, 2048
"""Of the promised prompt, without FAR and with it: a remote store is so slow that fewer tokens are
computed."""
FIRST_TOKENS, OTHER_TOKENS, OUTPUT_TOKENS = 512, 64, 8
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
    chance, count = random.Random(1), FAR_PROMPT_TOKENS if far else PROMPT_TOKENS
    prompt = tuple(chance.randrange(40_000) for _ in range(count))
    other = tuple(chance.randrange(40_000) for _ in range(OTHER_TOKENS))
    grant = CacheGrant(b"n", fidelity=fidelity)
    if task == "stay":
        kept = LeaseRequest(count, Retention("hour", 3600, 7200), "lease")
        answer(core, "cold", prompt, msgspec.structs.replace(grant, leases=(kept,)))
        for name in names:
            wait_for_level(core, name, count // 16)
        stay()
    wait_for_level(core, names[-1], 1)
    if task == "miss":
        answer(core, "foreign", prompt[:FIRST_TOKENS], grant)
    else:
        answer(core, "warm", prompt, grant)
        answer(core, "other", other, grant)
    core.close()


if __name__ == "__main__":
    main()
