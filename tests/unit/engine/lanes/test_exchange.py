"""Lanes meet: sums and logits are the whole's, and an error of one ends all in bounded time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from engine.errors import ModelError
from engine.lanes.crew import Crew
from engine.lanes.exchange import Exchange, ExchangeSize, check_exchanges, exchanges
from kernels import reference_lanes
from kernels.gpu import peer_reduce

CPU = torch.device("cpu")
SIZE = ExchangeSize(rows=8, channels=32, draws=4, columns=24)


def made(lanes: int) -> tuple[Crew, list[Exchange]]:
    crew = Crew([CPU] * lanes)
    return crew, exchanges(crew, SIZE, torch.float32)


def parts_of(lanes: int, rows: int, columns: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, columns, generator=generator) for _ in range(lanes)]


@pytest.mark.parametrize("lanes", [2, 4])
def test_many_sums_and_gathers_in_a_row_are_right(lanes: int) -> None:
    """More than there are buffers, in steps of an odd number of sums."""
    crew, found = made(lanes)
    sums = [parts_of(lanes, rows, 32, rows) for rows in (8, 1, 3, 8, 2)]
    logits = [parts_of(lanes, rows, 24, 10 + rows) for rows in (4, 1, 4)]

    def work(lane: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        one = found[lane]
        totals, gathered = list[torch.Tensor](), list[torch.Tensor]()
        for _ in range(2):
            one.begin()
            for parts in sums:
                own = one.part(len(parts[lane])).copy_(parts[lane])
                total = torch.empty_like(own)
                one.sum(own, total, add=False)
                totals.append(total)
            gathered = [one.gather(parts[lane]) for parts in logits]
        return totals, gathered

    for totals, gathered in crew.run(work):
        for total, parts in zip(totals, sums * 2, strict=True):
            assert torch.equal(total, reference_lanes.sum_parts(parts))
        for rows, parts in zip(gathered, logits, strict=True):
            assert torch.equal(rows, reference_lanes.gather_parts(parts))
    crew.close()


def test_a_second_part_before_the_sum_leaves_the_first_as_it_is() -> None:
    """Attention and MLP side by side: both are parts of one sum."""
    crew, found = made(2)
    one, (first, second) = found[0], parts_of(2, 3, 32, 0)

    a, b = one.part(3).copy_(first), one.part(3).copy_(second)

    assert torch.equal(a, first)
    assert torch.equal(b, second)
    crew.close()


def test_an_error_of_a_lane_ends_the_others_and_is_the_one_that_is_raised() -> None:
    """They wait for it at their next meeting; afterwards the crew can run again."""
    crew, found = made(3)

    def work(lane: int) -> None:
        total = torch.empty(2, 32)
        found[lane].sum(torch.ones(2, 32), total, add=False)
        if lane == 1:
            raise ValueError("planted")
        found[lane].sum(torch.ones(2, 32), total, add=False)

    with pytest.raises(ValueError, match="planted"):
        crew.run(work)
    assert crew.run(lambda lane: lane) == [0, 1, 2]
    crew.close()


def test_a_lane_that_does_not_come_fails_the_others_in_time() -> None:
    crew = Crew([CPU] * 2, timeout_s=0.05)
    found = exchanges(crew, SIZE, torch.float32)

    def work(lane: int) -> None:
        if lane == 0:
            found[lane].sum(torch.ones(2, 32), torch.empty(2, 32), add=False)

    with pytest.raises(threading.BrokenBarrierError):
        crew.run(work)
    crew.close()


@pytest.mark.parametrize("lanes", [2, 4])
def test_sums_are_checked_before_an_engine_serves(lanes: int) -> None:
    crew, found = made(lanes)

    check_exchanges(crew, found, sums=4)

    assert not any(one.has_failed for one in found)
    crew.close()


def test_wrong_sums_refuse_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a bridge between two GPUs drops what one writes to the other."""
    crew, found = made(2)
    real = peer_reduce.sum_parts

    def wrong(*args: Any, **options: Any) -> None:
        real(*args, **options)
        args[3][-1, -1] += 1

    monkeypatch.setattr(peer_reduce, "sum_parts", wrong)

    with pytest.raises(ModelError, match="IOMMU and ACS"):
        check_exchanges(crew, found, sums=4)
    crew.close()
