"""A runner whose pool is int8: answers depend on no copy and no way through a level."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.api import CacheGrant, Request, Started
from engine.config import EngineConfig, LevelsConfig
from engine.kv.transfer import CpuTransferEngine
from engine.model_store import ModelCard
from engine.models.cpu_decoder import Kernels
from engine.moves import Move, Moved, SlotLayout
from engine.plan import BlockCopy, Row, StepPlan
from engine.runner.cpu_runner import CpuRunner, build_runner
from engine.server.composition import core_of_model
from engine.storage.memory.arena import HostArena
from tests.unit.engine.runner.test_cpu_runner import (
    BLOCKS,
    CONTEXT,
    GREEDY,
    INT8,
    begun,
    drawn,
    run,
    tokens_of,
)


@pytest.fixture
def in_c(card: ModelCard, kernels_of: Callable[[int], Kernels]) -> CpuRunner:
    return CpuRunner(card, INT8, blocks=BLOCKS, context=CONTEXT, kernels=kernels_of(2))


@pytest.fixture(params=["torch", "c"])
def runner(request: pytest.FixtureRequest, card: ModelCard) -> CpuRunner:
    """A runner in torch or in C."""
    if request.param == "c":
        made: CpuRunner = request.getfixturevalue("in_c")
        return made
    return CpuRunner(card, INT8, blocks=BLOCKS, context=CONTEXT)


def test_copied_block_is_independent_of_source(runner: CpuRunner) -> None:
    """Copy-on-write: both sequences write the slot behind the copied ones, and answer as if each
    were alone."""
    prompt = tokens_of(5, 20)
    run(runner, StepPlan(0, (Row(1, 0, 20, [0, 1], 0, prompt),), begun=(begun(1, prompt),)))
    rows = (Row(1, 20, 1, [0, 1], 0, [11], (1,)), Row(2, 20, 1, [0, 6], 0, [22], (2,)))
    plan = StepPlan(1, rows, begun=(begun(2, [*prompt, 22]),), copies=(BlockCopy(1, 6, 4),))
    together = drawn(run(runner, plan))

    for sequence_id, token in ((1, 11), (2, 22)):
        history = [*prompt, token]
        row = Row(9, 0, 21, [30, 31], 0, history, (9,))
        alone = drawn(run(runner, StepPlan(2, (row,), begun=(begun(9, history),))))[9]
        run(runner, StepPlan(3, (), ended=(9,)))

        assert together[sequence_id].token_id == alone.token_id
        assert together[sequence_id].logprob == pytest.approx(alone.logprob, abs=1e-4)


def test_blocks_come_back_from_a_level_bit_for_bit(in_c: CpuRunner) -> None:
    """Rule *Fidelity*: a copy in the pool's own format is what was saved, scales included, and an
    answer over loaded copies equals one from nothing.
    """
    runner = in_c
    prompt = tokens_of(6, 49)
    row = Row(1, 0, 49, [0, 1, 2, 3], 0, prompt, (1,))
    first = drawn(run(runner, StepPlan(0, (row,), begun=(begun(1, prompt),))))[1]
    layout = SlotLayout.uniform(4, runner.kv.format.block_bytes)
    arena, ended = HostArena.create(layout), threading.Semaphore(0)
    transfer = CpuTransferEngine(runner.kv, arena, on_moved=ended.release)

    def moved(moves: list[Move]) -> list[Moved]:
        transfer.submit(moves)
        assert all(ended.acquire(timeout=30) for _ in moves)
        return transfer.poll()

    try:
        saved = moved([Move(n, "offload", n, n) for n in range(3)])
        runner.kv.data.zero_()
        loads = [Move(n, "load", n + 10, n, check=one.check) for n, one in enumerate(saved)]
        assert all(one.is_done for one in moved(loads))
    finally:
        transfer.close()
        arena.close()

    row = Row(2, 48, 1, [10, 11, 12, 13], 0, prompt[48:], (2,))
    again = drawn(run(runner, StepPlan(1, (row,), begun=(begun(2, prompt),), ended=(1,))))[2]

    assert again == first


def test_built_runner_has_nearly_twice_the_blocks(card: ModelCard) -> None:
    """34 bytes a token and head where bf16 takes 64 and fp32 128; warm-up leaves the KV zero."""
    built = build_runner(card, EngineConfig(kv_dtype="int8", kv_memory_mib=4, threads=1))

    assert isinstance(built.runner, CpuRunner)
    assert built.kv_format.block_bytes == 2 * 2 * 16 * 34
    assert built.blocks == 4 * 2**20 // built.kv_format.block_bytes
    assert built.kv_format.name in ("int8t-panels", "int8t")
    assert not built.runner.kv.data.any()


def test_engine_tells_its_pool_and_is_another_cache(card: ModelCard) -> None:
    """The gateway is told the fidelity, and no namespace of one format is found by another."""
    told = []
    for kv_dtype in ("bf16", "int8"):
        settings = {"device": "cpu", "kv_dtype": kv_dtype, "kv_memory_mib": 1, "threads": 1}
        core, info = core_of_model(Path(card.folder), msgspec.convert(settings, EngineConfig))
        core.close()
        told.append(info)

    assert [info.kv_fidelity for info in told] == ["exact", "near"]
    assert len({info.model_digest for info in told}) == 2
    assert told[1].blocks > 1.8 * told[0].blocks


def test_tokens_that_were_read_are_told_as_near(card: ModelCard) -> None:
    """From the device, and of copies: these have the pool's own format, which is no packed one."""
    config = msgspec.structs.replace(
        INT8, device="cpu", kv_memory_mib=1, threads=1, levels=LevelsConfig(host_mib=1)
    )
    core, _ = core_of_model(Path(card.folder), config)
    told = []
    try:
        for name in ("first", "again"):
            grant = CacheGrant(b"n", fidelity="near")
            core.submit(Request(name, tuple(tokens_of(7, 40)), 1, grant, GREEDY))
            while core.has_work():
                told += [event for event in core.step() if isinstance(event, Started)]
        assert core.levels is not None
        formats = core.levels.places.formats.formats
    finally:
        core.close()

    assert [(event.cached_tokens, event.fidelity) for event in told] == [(0, "near"), (39, "near")]
    assert [(one.name, one.fidelity) for one in formats] == [("", "near")]
