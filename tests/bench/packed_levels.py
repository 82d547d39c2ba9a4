"""What packed copies take and bring back: python -m tests.bench.packed_levels

Prompts of the documentation's prose are answered by an engine over a disk, once for each fidelity,
and promised; then another engine over the same folder answers them again, loaded and cold, in
turns. Prints the bytes of a token on host and disk, the time to the first token where the load was
whole, and how many of the greedy tokens agree with those over exact copies.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from engine.api import (
    FIDELITIES,
    CacheGrant,
    Fidelity,
    LeaseRequest,
    Retention,
)
from engine.config import EngineConfig, LevelsConfig
from engine.core.core import Core
from engine.model_store import load_card
from engine.server.composition import core_of_model
from engine.server.service import smoke_test
from engine.statistics import LevelStats
from tests.bench.answers import ask, wait_for_level
from tests.bench.kv_texts import texts, windows
from tests.bench.models import default_card
from tests.bench.results import spread

HOUR = Retention("hour", promise_s=3600, limit_s=7200)


@contextmanager
def engine(model: Path, folder: Path) -> Iterator[Core]:
    """Yield an engine with host memory and a disk."""
    levels = LevelsConfig(
        host_mib=256, disk_gib=2.0, dir=str(folder), disk_tokens_min=16, look_ms=1_000
    )
    core, _ = core_of_model(model, EngineConfig(kv_memory_mib=320, levels=levels))
    try:
        smoke_test(core)
        yield core
    finally:
        core.close()


def agreement(found: Sequence[int], exact: Sequence[int]) -> tuple[int, int]:
    """Return how many tokens agree before the first that differs, and how many were compared."""
    for index, (one, other) in enumerate(zip(found, exact, strict=False)):
        if one != other:
            return index, index + 1
    return len(exact), len(exact)


def lines_of(level: LevelStats, run_tokens: int) -> Iterator[str]:
    """Yield the bytes of a token on a level, for each fidelity."""
    for one in level.copies:
        per_token = one.bytes / one.blocks / run_tokens
        yield f"{level.name:5} {one.fidelity:6} {per_token:9,.0f} bytes a token"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a prepared model's folder")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1_700)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--times", type=int, default=3, help="loads of each prompt")
    chosen = parser.parse_args()
    card = load_card(chosen.model) if chosen.model else default_card()
    model, tokenizer = Path(card.folder), Tokenizer.from_file(str(card.tokenizer_path))
    text = texts(None)["python topics"]
    prompts = windows(text, tokenizer, chosen.tokens, chosen.prompts, seed=1)
    runs = (chosen.tokens - 1) // 16
    first_s: dict[str, list[float]] = {name: [] for name in (*FIDELITIES, "cold")}
    agree = {name: [0, 0] for name in FIDELITIES}
    exact: list[list[int]] = []
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "levels"

        def grant_of(number: int, fidelity: Fidelity) -> CacheGrant:
            lease = LeaseRequest(runs * 16, HOUR, f"{fidelity}{number}")
            name = f"{fidelity} {number}".encode()
            return CacheGrant(name, leases=(lease,), fidelity=fidelity)

        with engine(model, folder) as core:
            for number, prompt in enumerate(prompts):
                for fidelity in FIDELITIES:
                    ask(core, f"{number}{fidelity}", prompt, grant_of(number, fidelity), 1)
            disk = wait_for_level(core, "disk", len(prompts) * runs * len(FIDELITIES))
            for level in core.stats().levels:
                print(*lines_of(disk if level.name == "disk" else level, 16), sep="\n")
        for turn in range(chosen.times):
            with engine(model, folder) as core:
                wait_for_level(core, "disk", 1)
                for number, prompt in enumerate(prompts):
                    for fidelity in FIDELITIES:
                        grant = grant_of(number, fidelity)
                        found = ask(core, f"{number}{fidelity}", prompt, grant, chosen.output)
                        got = found.loaded.get("disk", 0)
                        assert found.fidelity == (fidelity if got else "exact")
                        if got == runs * 16:  # on a busy machine a look or a load may end in time
                            first_s[fidelity].append(found.first_s)
                        if fidelity == "exact" and not turn:
                            exact.append(found.tokens)
                        same, of = agreement(found.tokens, exact[number])
                        agree[fidelity][0] += same
                        agree[fidelity][1] += of
                    if not turn:
                        cold = ask(core, f"{number}cold", prompt, CacheGrant(b"cold"), 1)
                        first_s["cold"].append(cold.first_s)
    base = statistics.median(first_s["cold"])
    for name, times in first_s.items():
        if not times:
            continue
        times_ms = [1e3 * one for one in times]
        middle = statistics.median(times_ms)
        print(
            f"{name:6} first token {middle:7.0f} ms {spread(times_ms, '.0f')},"
            f" {1e3 * base / middle:.1f} times as fast as cold"
        )
    for fidelity, (same, of) in agree.items():
        print(
            f"{fidelity:6} {len(first_s[fidelity])} of {chosen.times * len(prompts)} loads were"
            f" whole; {same} of {of} greedy tokens agree with the exact ones"
        )


if __name__ == "__main__":
    main()
