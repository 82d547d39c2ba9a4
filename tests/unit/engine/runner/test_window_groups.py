"""A model with windows through the whole engine, in torch and in C, against itself alone.

The model has three layers with a window of eight tokens to one without, as Gemma 3 has five. The
reference keeps all KV in one group, reads no cache and runs one request at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

import engine.kv.format
import engine.runner.cpu_runner
import engine.server.composition
from engine.api import (
    CacheGrant,
    Request,
    SampledToken,
    Sampling,
    tokens_within,
)
from engine.config import EngineConfig
from engine.model_store import ModelCard
from engine.models.cpu_decoder import Kernels
from engine.runner.cpu_runner import CpuRunner
from tests.models import prepared_with_windows
from tests.unit.engine.runner.cpu_engine import BLOCK, CpuEngine

CONTEXT, WINDOW = 256, 8
TOLERANCE = 2e-4
FP32 = EngineConfig(dtype="fp32", kv_dtype="fp32", sequences_max=8)
SLICES = EngineConfig(
    dtype="fp32", kv_dtype="fp32", sequences_max=8, step_tokens_max=48, prefill_chunk_tokens_max=21
)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Return a tiny model of which each fourth layer has no window."""
    folder = tmp_path_factory.mktemp("model")
    return prepared_with_windows(folder, WINDOW, context=CONTEXT)


def requests(seed: int) -> list[Request]:
    """Return the requests of a few conversations that share a beginning."""
    chance = random.Random(seed)
    system = [chance.randrange(3, 60) for _ in range(37)]
    found: list[Request] = []
    for number in range(9):
        own = [chance.randrange(3, 60) for _ in range(chance.randint(1, 60))]
        start = system[: chance.choice([0, 20, 37, 37])]
        if found and chance.random() < 0.5:
            before = list(chance.choice(found).tokens)
            start = before[: len(before) - chance.choice([0, 0, 5, 30])]
        found.append(
            Request(
                request_id=f"r{number}",
                tokens=tuple([*start, *own][:200]),
                max_tokens=chance.randint(1, 24),
                grant=CacheGrant(b"n"),
                sampling=Sampling(temperature=1.0, seed=number, logprobs=0),
                samples=chance.choice([1, 1, 2]),
                priority=chance.choice([0, 0, 1]),
            )
        )
    return found


Reference = Callable[[int], dict[tuple[str, int], list[SampledToken]]]


@pytest.fixture(scope="module")
def reference(card: ModelCard) -> Reference:
    """Return a function that gives the output of a seed's requests, each alone, with all KV in one
    group and no cache."""

    @cache
    def run(seed: int) -> dict[tuple[str, int], list[SampledToken]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.kv.format, "WASTE_MAX", -1.0)
            alone = CpuEngine(card, FP32, 64)
        assert not alone.runner.kv.format.windows
        for request in requests(seed):
            grant = CacheGrant(b"n", read=False, write=False)
            alone.core.submit(replace(request, grant=grant))
            alone.settle()
        return alone.output

    return run


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", [200, 72])
def test_output_is_that_of_the_model_without_a_cache(
    card: ModelCard, reference: Reference, seed: int, blocks: int, path: Kernels | None
) -> None:
    """Slices, hits, forks, preemptions and evictions of window blocks change no logit.

    A pool of 72 blocks holds one long sequence and little more.
    """
    asked, expected = requests(seed), reference(seed)
    busy = CpuEngine(card, SLICES, blocks, path)
    chance = random.Random(seed)
    for each in [*asked, *(replace(r, request_id=f"{r.request_id} again") for r in asked)]:
        busy.core.submit(each)
        for _ in range(chance.randint(0, 12)):
            busy.step()
    busy.settle()

    assert busy.runner.kv.format.windows == (WINDOW,) * 3
    assert busy.endings == ["done"] * 18
    assert busy.core.stats().cached_tokens_total > 0
    for (name, index), tokens in busy.output.items():
        alone = expected[name.removesuffix(" again"), index]
        assert [token.token_id for token in tokens] == [token.token_id for token in alone]
        for token, other in zip(tokens, alone, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
    if blocks == 72:
        assert busy.core.stats().evicted_blocks_total > 0


def test_window_groups_hold_their_window_alone(card: ModelCard) -> None:
    """While it decodes, a sequence of 200 tokens has its window and two blocks in each group."""
    engine = CpuEngine(card, FP32, 200)
    tokens = tuple(random.Random(1).randrange(3, 60) for _ in range(190))
    engine.core.submit(
        Request("long", tokens, 20, CacheGrant(b"n"), Sampling(temperature=0, logprobs=0))
    )
    engine.step()
    while engine.core.has_work():
        (running,) = engine.core.scheduler.running or (None,)
        if running is not None and running.table is not None:
            table = running.table
            beside = table.held_blocks - len(table.blocks)
            assert beside <= 3 * (WINDOW // BLOCK + 2)
        engine.step()

    assert engine.endings == ["done"]


def test_the_engine_makes_its_cache_with_the_models_windows(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway is told of them, since they take a part of the memory for a sequence."""
    monkeypatch.setattr(engine.server.composition, "load_card", lambda folder: card)
    monkeypatch.setattr(engine.runner.cpu_runner, "load_kernels", lambda config, threads: None)
    config = replace(FP32, device="cpu", kv_blocks=40, threads=1)

    core, info = engine.server.composition.core_of_model(tmp_path, config)

    assert info.kv_windows == core.cache.windows.windows == (WINDOW,) * 3
    assert info.kv_format == "float32-w8-w8-w8"
    assert tokens_within(info.blocks, info.kv_windows, info.block_size) == (40 - 9) * 16


def test_layers_are_dealt_to_groups_of_one_size() -> None:
    """Gemma 3's 27 billion waste 13 % of a token's bytes; a set that wastes more keeps masks."""
    gemma = [1024 if (index + 1) % 6 else 0 for index in range(62)]
    groups = engine.kv.format.deal_groups(gemma)
    assert [len(group.layers) for group in groups] == [10, 10, 10, 10, 10, 10, 2]
    assert [group.window for group in groups] == [0, *[1024] * 6]

    assert len(engine.kv.format.deal_groups([0, 0, 0, 8])) == 1
    assert len(engine.kv.format.deal_groups([8, 8])) == 1
    assert [g.layers for g in engine.kv.format.deal_groups([8, 0, 8, 0])] == [(1, 3), (0, 2)]


def test_groups_are_part_of_the_formats_name(card: ModelCard) -> None:
    """Blocks of another grouping are never read as these (rule *Exact hit*)."""
    form = CpuRunner(card, FP32, blocks=4, context=CONTEXT).kv.format

    assert form.name == "float32-w8-w8-w8"
    assert (form.blocks_per_run, form.layers) == (4, 1)
    assert (form.group_of_layer, form.row_of_layer) == ([1, 2, 3, 0], [0, 0, 0, 0])
