"""Attention windows on the GPU runner: two runs of keys a row, against the model with a mask.

Without a GPU the kernels run in Triton's interpreter, and no graphs are captured.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.api import AttentionWindow, BlockWindow, Request, Sampling
from engine.attention.row_pieces import pieces_of
from engine.config import EngineConfig
from engine.model_store import Architecture
from engine.plan import Row
from kernels.gpu.work_list import Slices, WorkPlanner
from tests.unit.engine.runner.gpu_engine import (
    ERROR_MAX,
    FAMILIES,
    IN_INTERPRETER,
    Engine,
    request,
    tokens_of,
)
from tests.unit.engine.runner.masked_model import masked_logprobs

WINDOW = AttentionWindow(32, 16)


pytestmark = IN_INTERPRETER


def engine_of(depth: int, blocks: int, config: Architecture | None = None) -> Engine:
    engine = Engine(depth, blocks=blocks, config=config)  # step tokens 64, slices of 40
    allowed = EngineConfig(
        step_tokens_max=64, prefill_chunk_tokens_max=40, sequences_max=6,
        attention_policies=("window",),
    )  # fmt: skip
    engine.core.config = engine.core.scheduler.config = allowed
    return engine


def check_logprobs(engine: Engine, asked: Request) -> None:
    """Compare each sampled token's logprob with the model's under the mask."""
    for index in range(asked.samples):
        drawn = engine.drawn[asked.request_id, index]
        tokens = [*asked.tokens, *(token.token_id for token in drawn)]
        known = masked_logprobs(engine.config, engine.weights, tokens, asked.attention, 16)
        for at, token in enumerate(drawn, start=len(asked.tokens) - 1):
            expected = float(known[at, token.token_id])
            assert token.logprob == pytest.approx(expected, abs=ERROR_MAX), (asked.request_id, at)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_rows_read_their_sinks_and_their_window(depth: int) -> None:
    """Slices, hits and decoding across a block's end, beside plain rows that share a prefix."""
    engine = engine_of(depth, blocks=60)
    sampling = Sampling(temperature=0, logprobs=0)
    shared = tokens_of(1, 36)
    asked = [
        replace(request("w", shared + tokens_of(2, 34), sampling, count=12), attention=WINDOW),
        replace(request("x", shared + tokens_of(3, 9), sampling, samples=2), attention=WINDOW),
        replace(request("y", tokens_of(4, 50), sampling), attention=AttentionWindow(16, 0)),
        request("p", shared + tokens_of(5, 3), sampling),
        request("q", shared + tokens_of(6, 5), sampling),
    ]
    engine.run(*asked)
    again = [replace(one, request_id=f"{one.request_id} again") for one in asked[:2]]
    engine.run(*again)

    for one in (*asked, *again):
        check_logprobs(engine, one)
    assert engine.finished["w again"].usage.cached_tokens == 64


@pytest.mark.nightly
def test_layers_with_windows_of_their_own_keep_them() -> None:
    """As Gemma 3 has them: the request's window is that of the layers that read everything."""
    engine = engine_of(2, 120, FAMILIES["gemma3"])
    sampling = Sampling(temperature=0, logprobs=0)
    shared = tokens_of(1, 50)
    asked = [
        replace(request("w", shared + tokens_of(2, 29), sampling, count=4), attention=WINDOW),
        request("p", shared + tokens_of(5, 9), sampling),
    ]
    engine.run(*asked)

    for one in asked:
        check_logprobs(engine, one)


@pytest.mark.slow
def test_a_pool_smaller_than_the_sequence_is_enough() -> None:
    """Blocks behind the window go to the sequence's own end while its table still names them."""
    engine = engine_of(2, blocks=8)
    sampling = Sampling(temperature=0, logprobs=0)
    prompt = tokens_of(7, 120)
    asked = replace(request("long", prompt, sampling, count=10), attention=WINDOW)
    engine.run(asked)

    assert engine.finished["long"].ending == "done"
    check_logprobs(engine, asked)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("group", [1, 4, 8])
def test_every_key_that_a_row_reads_is_in_one_tile(seed: int, group: int) -> None:
    """Those of its sinks and of its window, and no other; beside rows that read all keys."""
    chance = np.random.default_rng(seed)
    window, size = BlockWindow(int(chance.integers(0, 3)), int(chance.integers(1, 30))), 16
    found: list[tuple[int, int, int, int, int]] = []
    for _ in range(int(chance.integers(1, 9))):
        start, count = int(chance.integers(0, 1_200)), int(chance.choice([1, 1, 5, 200]))
        if chance.random() < 0.3:
            found.append((count, start, 0, 0, 0))
            continue
        table = list(range((start + count) // size + 1))
        for piece in pieces_of(Row(0, start, count, table, 0, None), window, size):
            both = piece.begin_block * size, piece.sinks * size
            found.append((piece.end - piece.first, start + piece.first, 0, *both))
    slices = Slices(*(np.ascontiguousarray(c) for c in np.array(found, np.int32).T))
    planner = WorkPlanner(2, group, size, 132)

    plan = planner.plan(slices, np.zeros((0, 4), np.int32))

    rows = int(slices.rows.sum())
    read: list[list[int]] = [[] for _ in range(rows)]
    parts: list[list[int]] = [[] for _ in range(rows)]
    positions = [start + i for count, start, *_ in found for i in range(count)]
    for work in plan.work:
        for row, count, offset, first, keys, part, direct, _ in work.tiles.tolist():
            assert offset * size == first
            for i in range(row, row + count):
                end = first + keys if keys >= 0 else positions[i] + 1
                read[i] += range(first, end)
                parts[i].append(part)
                assert bool(direct) == (plan.parts_of_row[i] == 1)
    of_row = [one for one in found for _ in range(one[0])]
    for i, (_, _, _, floor, sinks) in enumerate(of_row):
        assert sorted(read[i]) == [*range(sinks), *range(floor, positions[i] + 1)]
        assert sorted(parts[i]) == list(range(int(plan.parts_of_row[i])))


def test_rows_under_windows_take_the_tiles_of_every_step() -> None:
    """A decoding row is two small tiles and a merge, for which graphs are captured anyway."""
    row = Row(0, 200, 1, list(range(13)), 0, None, attention=BlockWindow(1, 2))
    (piece,) = pieces_of(row, BlockWindow(1, 2), 16)
    assert (piece.blocks(row), piece.at) == ([0, 10, 11, 12], 56)
    column = [np.array([value], np.int32) for value in (1, 200, 0, 160, 16)]
    plan = WorkPlanner(2, 4, 16, 132).plan(Slices(*column), np.zeros((0, 4), np.int32))

    assert (plan.classes, plan.parts_max > 1) == ((2,), True)
    assert torch.equal(torch.from_numpy(plan.parts_of_row), torch.tensor([2], dtype=torch.int32))
