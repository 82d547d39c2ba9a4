"""A real engine with a disk, in a process that may be killed: python -m tests.e2e.leveled_engine

Arguments: the model, the disk's folder, a task (`stay`, `read`, `miss`) and the dtype of the KV.
Prints one JSON line for each prompt of 2,048 tokens that it answered, with the processor's seconds
to the first token (others' work beside it takes none), and for what its disk has.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

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
from engine.config import EngineConfig, LevelsConfig
from engine.core.core import Core
from engine.server.composition import core_of_model
from engine.server.service import smoke_test
from tests.e2e.patient_engine import LOOK_MS, wait_for_loads

PROMPT_TOKENS, OUTPUT_TOKENS = 2048, 8
WAIT_S = 60.0


def answer(core: Core, name: str, tokens: tuple[int, ...], grant: CacheGrant) -> dict[str, Any]:
    """Answer one prompt; return its tokens, what was cached, and the seconds to the first token."""
    began_s = time.process_time()
    first_s, out = 0.0, list[int]()
    core.submit(Request(name, tokens, OUTPUT_TOKENS, grant, Sampling(temperature=0)))
    found: dict[str, Any] = {"name": name}
    while True:
        for event in core.step():
            if isinstance(event, Started):
                found |= {"cached": event.cached_tokens, "loaded": dict(event.loaded_tokens)}
                if event.wait is not None and event.wait.cause:
                    found["not_loaded"] = event.wait.cause
            elif isinstance(event, Tokens):
                first_s = first_s or time.process_time() - began_s
                out += [token.token_id for token in event.tokens]
            elif isinstance(event, Finished):
                return found | {"tokens": out, "first_s": round(first_s, 4)}
        if core.is_waiting_for_levels:
            time.sleep(0.0005)


def say(facts: dict[str, Any]) -> None:
    """Print one line."""
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
    sys.stdout.flush()


def wait_for_disk(core: Core, records: int) -> None:
    """Run until the disk has `records` records."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        core.step()
        disk = core.stats().levels[-1]
        if disk.name == "disk" and disk.state == "open" and disk.blocks >= records:
            return
        time.sleep(0.002)
    raise TimeoutError(f"{core.stats().levels[-1]}; expected {records} records")


def main() -> None:
    """Answer; with `stay`, then say that the disk has it all and wait to be killed; with `miss`,
    answer once."""
    model, folder, task, kv_dtype = sys.argv[1:5]
    wait_for_loads(pytest.MonkeyPatch())
    levels = LevelsConfig(disk_gib=1.0, dir=folder, slab_mib=64, look_ms=LOOK_MS)
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
        say(answer(core, "cold", warm, CacheGrant(b"n", leases=(kept,), fidelity=fidelity)))
        wait_for_disk(core, PROMPT_TOKENS // 16)
        say({"name": "stored"})
        time.sleep(WAIT_S)
    else:
        wait_for_disk(core, 1)
        say(answer(core, "warm", warm, CacheGrant(b"n", fidelity=fidelity)))
        if task == "read":
            say(answer(core, "other", cold, CacheGrant(b"n", fidelity=fidelity)))
    core.close()


if __name__ == "__main__":
    main()
