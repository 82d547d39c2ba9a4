"""Models with window groups over levels: the same tokens computed, loaded from host memory and from
disk, by a tiny model and by Gemma 3 270M where it is on disk.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.api import CacheGrant, LeaseRequest, Retention
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig
from engine.core.core import Core
from engine.kv.format import deal_groups
from engine.model_store import ModelCard
from engine.runner.cpu_runner import build_runner
from engine.server.levels_below import build_levels
from tests.bench.answers import ask, wait_until
from tests.e2e.patient_engine import LOOK_MS, wait_for_loads
from tests.e2e.real_core import real_card
from tests.models import prepared_with_windows

pytestmark = [pytest.mark.slow]

HOUR = Retention("hour", 3600, 7200)


class LeveledEngine:
    """A core over the CPU's runner with host memory below, and a disk where there is a folder."""

    def __init__(
        self, card: ModelCard, tokens: int, *, folder: Path | None = None, runs: int = 0
    ) -> None:
        """`runs`: how many runs of a prompt the pool has room for."""
        wanted = LevelsConfig(
            host_mib=512,
            disk_gib=0.0 if folder is None else 1.0,
            dir=str(folder or ""),
            slab_mib=16,
            host_tokens_min=16,
            disk_tokens_min=16,
            look_ms=LOOK_MS,
        )
        config = EngineConfig(dtype="fp32", kv_dtype="fp32", sequences_max=4, levels=wanted)
        layers = [layer.window for layer in card.config.layers]
        blocks = len(deal_groups(layers)) * (runs or tokens // 16 + 4)
        built = build_runner(card, replace(config, kv_blocks=blocks, context_tokens_max=tokens))
        self.cache = PrefixCache(
            blocks=blocks, block_size=16, context_tokens=tokens, windows=built.kv_format.windows
        )
        now_s = time.monotonic()
        levels, off = build_levels(self.cache, config, built.kv, now_s=now_s)
        assert levels is not None, off
        assert built.kv_format.windows
        self.levels = levels
        self.core = Core(
            self.cache,
            built.runner,
            config,
            time.monotonic,
            vocab_size=card.config.vocab,
            context_tokens=tokens,
            levels=levels,
        )

    def ask(
        self, tokens: tuple[int, ...], *, is_promised: bool = False
    ) -> tuple[list[int], int, dict[str, int]]:
        """Return the answer of eight tokens, the cached tokens, and those that were loaded."""
        leases = (LeaseRequest(len(tokens), HOUR, "lease"),) if is_promised else ()
        grant = CacheGrant(b"n", leases=leases)
        answer = ask(self.core, "r", tokens, grant, 8)
        return answer.tokens, answer.cached, answer.loaded

    def cached(self, tokens: tuple[int, ...]) -> int:
        """Return how many of these tokens the device has."""
        return self.cache.peek(b"n", tokens, time.monotonic()).cached_tokens

    def rest(self, records: int = 0, *, kept: int = 0) -> None:
        """Let moves end, the disk have so many records, and levels keep so many promised blocks."""

        def is_at_rest() -> bool:
            stored = self.core.stats().levels[-1].blocks if records else 0
            below = self.cache.use(b"n").below if kept else 0
            return not self.levels.is_busy and stored >= records and below >= kept

        wait_until(self.core, is_at_rest)


def check_levels(card: ModelCard, tokens: int, vocabulary: int, folder: Path) -> None:
    """Check that a prompt has one answer: computed, loaded from host memory, loaded from disk."""
    chance = random.Random(1)
    prompt = tuple(chance.randrange(3, vocabulary) for _ in range(tokens - 11))
    first = LeveledEngine(card, tokens, runs=2 * tokens // 16)
    computed, cached, _ = first.ask(prompt)
    assert cached == 0
    for _ in range(64):  # a few runs at a time, so that what is evicted next is copied before
        first.rest()
        if not first.cached(prompt):
            break
        first.ask(tuple(chance.randrange(3, vocabulary) for _ in range(tokens // 8)))
    from_host, cached, loaded = first.ask(prompt)
    first.core.close()
    assert loaded == {"host": cached}, "the device has evicted it"
    assert cached >= len(prompt) - 32
    assert from_host == computed

    second = LeveledEngine(card, tokens, folder=folder, runs=2 * tokens // 16)
    assert second.ask(prompt, is_promised=True)[0] == computed
    second.rest(len(prompt) // 16)
    second.core.close()
    third = LeveledEngine(card, tokens, folder=folder)
    third.rest(len(prompt) // 16)
    third.ask(prompt[::-1][:100])  # an engine that has computed nothing knows no pace of it
    from_disk, cached, loaded = third.ask(prompt)
    third.core.close()
    assert loaded == {"disk": cached}
    assert cached >= len(prompt) - 32
    assert from_disk == computed


@pytest.fixture(autouse=True)
def patient_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a level has is loaded, on a busy machine too."""
    wait_for_loads(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for a disk."""
    folder = tmp_path / "levels"
    folder.mkdir(mode=0o700)
    return folder


def test_a_tiny_model_answers_the_same_from_each_level(tmp_path: Path, folder: Path) -> None:
    """In fp32, token by token; the prompt is many windows long."""
    card = prepared_with_windows(tmp_path / "model", 24, context=512)

    check_levels(card, 256, 60, folder)


def test_promises_of_a_tiny_model_outlive_the_device_and_the_engine(
    tmp_path: Path, folder: Path
) -> None:
    """More is promised than the pool holds; all of it is read back, with the answer computed."""
    card = prepared_with_windows(tmp_path / "model", 24, context=512)
    chance = random.Random(2)
    prompts = [tuple(chance.randrange(3, 60) for _ in range(245)) for _ in range(6)]
    first = LeveledEngine(card, 256, folder=folder, runs=24)
    computed = []
    for number, prompt in enumerate(prompts, start=1):
        computed.append(first.ask(prompt, is_promised=True)[0])
        first.rest(15 * number, kept=(15 + 3 * 2) * number)
    use = first.cache.use(b"n")
    assert sum(use.promised.values()) == use.below == 6 * (15 + 3 * 2) > first.cache.blocks
    for prompt, answer in zip(prompts, computed, strict=True):
        again, cached, loaded = first.ask(prompt)
        assert (again, cached) == (answer, 240)
        assert loaded
        first.rest(kept=use.below)
    assert first.cache.use(b"n").below == use.below
    first.core.close()

    second = LeveledEngine(card, 256, folder=folder)
    second.ask(prompts[0][::-1][:100])  # an engine that has computed nothing knows no pace of it
    second.rest(15 * len(prompts), kept=use.below)
    kept = second.cache.use(b"n")
    assert (sum(kept.promised.values()), kept.below) == (use.below, use.below)
    for prompt, answer in zip(prompts, computed, strict=True):
        assert second.ask(prompt) == (answer, 240, {"disk": 240})
    second.core.close()


@pytest.mark.model
def test_gemma_answers_the_same_from_each_level(folder: Path) -> None:
    """A prompt beyond its window of 512 tokens."""
    check_levels(real_card("gemma-3-270m"), 912, 200_000, folder)
