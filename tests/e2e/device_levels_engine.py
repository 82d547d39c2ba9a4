"""A tiny model on a device with levels, in a process that may be killed.

    python -m tests.e2e.device_levels_engine MODEL FOLDER TASK DEVICE BLOCKS

`stay`: answers a promised prompt with the prefix computed, on the device, and from host memory,
says that the disk has it, and waits to be killed; `read`: answers it from disk. Each for an exact
and a packed namespace. Prints one JSON line for each answer. Such a small model computes a prefix
as soon as it could be loaded, so the cost of computing is made up: all that is known is loaded.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import msgspec

from engine.api import CacheGrant, Fidelity, LeaseRequest, Quota, Retention
from engine.config import EngineConfig, LevelsConfig
from engine.core.core import Core
from engine.scheduler.step_cost import StepCost
from engine.server.composition import core_of_model
from engine.server.service import smoke_test
from tests.bench.answers import ask, wait_for_level, wait_until
from tests.bench.results import print_line
from tests.e2e.leveled_engine import OUTPUT_TOKENS, stay

PROMPT_TOKENS, PUSHES = 449, 9
PAYER = Quota(payer=b"one")
"""Of all: a payer's blocks are evicted for its own first."""
FIDELITIES: tuple[Fidelity, ...] = ("exact", "near")


def prompt(seed: int) -> tuple[int, ...]:
    """Return a random prompt."""
    chance = random.Random(seed)
    return tuple(chance.randrange(3, 60) for _ in range(PROMPT_TOKENS))


def grant_of(fidelity: Fidelity, *, is_kept: bool = False) -> CacheGrant:
    """Return the grant of a namespace of one fidelity."""
    kept = LeaseRequest(PROMPT_TOKENS, Retention("hour", 3600, 7200), "lease")
    leases = (kept,) if is_kept else ()
    return CacheGrant(fidelity.encode(), PAYER, leases=leases, fidelity=fidelity)


def answer(core: Core, name: str, fidelity: Fidelity, *, is_kept: bool = False) -> None:
    """Answer the prompt, and print what came."""
    grant = grant_of(fidelity, is_kept=is_kept)
    found = ask(core, f"{name}, {fidelity}", prompt(1), grant, OUTPUT_TOKENS)
    print_line(msgspec.json.encode(found).decode())


def main() -> None:
    """Do the task."""
    with patch.object(StepCost, "seconds_of_slice", lambda self, start, count: 1.0):
        run()


def run() -> None:
    """Do the task; see the module."""
    model, folder, task, device, blocks = sys.argv[1:6]
    levels = LevelsConfig(host_mib=4, disk_gib=1.0, dir=folder, slab_mib=64, look_ms=1_000)
    wanted: dict[str, Any] = {"kv_blocks": int(blocks), "sequences_max": 8, "step_tokens_max": 512}
    chosen: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
    config = msgspec.structs.replace(
        msgspec.convert(wanted, EngineConfig), levels=levels, device=chosen
    )
    core, _ = core_of_model(Path(model), config)
    smoke_test(core)
    levels_below = core.levels
    assert levels_below is not None, "there are some"

    def is_settled() -> bool:
        return not levels_below.is_busy

    if task == "read":
        wait_for_level(core, "disk", 1)
        for fidelity in FIDELITIES:
            answer(core, "disk", fidelity)
        core.close()
        return
    for fidelity in FIDELITIES:
        answer(core, "computed", fidelity, is_kept=True)
        wait_until(core, is_settled)
        if fidelity == "exact":
            answer(core, "device", fidelity)
    blocks_kept = PROMPT_TOKENS // 16
    wait_for_level(core, "disk", len(FIDELITIES) * blocks_kept)
    names = [one.encode() for one in FIDELITIES]
    wait_until(core, lambda: all(core.cache.use(one).below >= blocks_kept for one in names))
    for number in range(PUSHES):
        grant = CacheGrant(b"push", PAYER, at_rest="never")
        ask(core, f"push{number}", prompt(number + 100), grant, OUTPUT_TOKENS)
        wait_until(core, is_settled)
    for fidelity in FIDELITIES:
        answer(core, "host", fidelity)
    stay()
    core.close()


if __name__ == "__main__":
    main()
