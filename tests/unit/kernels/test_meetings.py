"""The protocol by which lanes meet, as a model under random schedules, with planted faults.

A lane's stream runs kernels in order: a product writes the lane's part of each row into a buffer,
then a reduce reads all lanes' parts. A reduce has a program a row, some of which are resident at a
time. A write stays in the lane's own cache until it drains or a release drains it. No read may see
another meeting's part; see `kernels.gpu.peer_reduce`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

RESIDENT = 2
"""Programs of a launch that run at once."""
TURNS_MAX = 200_000


class StaleReadError(Exception):
    """A lane read a part of another meeting."""


@dataclass
class Lane:
    """Memory of one GPU. `parts` by (buffer, row): the meeting that wrote it, as peers see it.
    `cached`: writes that they do not see yet. `flags` by (row, peer), `counts` by row."""

    parts: dict[tuple[int, int], int] = field(default_factory=dict)
    cached: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    flags: dict[tuple[int, int], int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def drain(self) -> None:
        """Let peers see the oldest write."""
        self.parts.update(self.cached[:1])
        del self.cached[:1]

    def release(self) -> None:
        """Let peers see all writes."""
        self.parts.update(self.cached)
        self.cached.clear()


@dataclass(frozen=True)
class Plan:
    """`steps`: rows of each meeting of each step. `fault`: what is planted."""

    lanes: int
    steps: list[list[int]]
    fault: str = ""

    def buffer(self, meeting: int) -> int:
        """Return the buffer of a step's meeting: its first has one of its own, so that no two
        meetings in a row have the same, however many a step has."""
        if self.fault == "one buffer":
            return 0
        if self.fault == "two buffers in a step of odd length":
            return meeting % 2
        return 0 if meeting == 0 else 1 + (meeting - 1) % 2


def program(
    plan: Plan, lanes: list[Lane], own: int, row: int, place: tuple[int, int]
) -> Iterator[None]:
    """Run the program of a row of a reduce: meet, then read."""
    buffer, meeting = place
    lane = lanes[own]
    number = lane.counts[row] = lane.counts.get(row, 0) + 1
    peers = [peer for peer in range(plan.lanes) if peer != own]
    if plan.fault != "no fence":
        lane.release()
    for peer in peers:
        lanes[peer].flags[row, own] = number
        yield
    for peer in peers:
        while plan.fault != "no wait" and lane.flags.get((row, peer), 0) < number:
            yield
    for peer in peers:
        found = lanes[peer].parts.get((buffer, row))
        if found != meeting:
            raise StaleReadError(f"lane {own} read {found} of lane {peer} in meeting {meeting}")
        yield


def stream(plan: Plan, lanes: list[Lane], own: int, rng: random.Random) -> Iterator[None]:
    """Run a lane's kernels in order; a kernel begins when the one before has ended."""
    meeting = 0
    for step in plan.steps:
        for index, rows in enumerate(step):
            buffer = plan.buffer(index)
            for row in rng.sample(range(rows), rows):
                lanes[own].cached.append(((buffer, row), meeting))
                yield
            waiting = list(range(rows))
            live: list[Iterator[None]] = []
            while waiting or live:
                while waiting and len(live) < RESIDENT:
                    place = buffer, meeting
                    live.append(program(plan, lanes, own, waiting.pop(0), place))
                one = rng.choice(live)
                if next(one, "ended") == "ended":
                    live.remove(one)
                yield
            meeting += 1


def run(plan: Plan, rng: random.Random) -> None:
    """Run all lanes in a random order, some of them in bursts."""
    lanes = [Lane() for _ in range(plan.lanes)]
    live = [stream(plan, lanes, own, rng) for own in range(plan.lanes)]
    for _ in range(TURNS_MAX):
        if not live:
            return
        rng.choice(lanes).drain()
        one = rng.choice(live)
        for _ in range(rng.choice((1, 1, 1, 20))):
            if next(one, "ended") == "ended":
                live.remove(one)
                break
    raise AssertionError("lanes wait for each other without end")


def steps(rng: random.Random) -> list[list[int]]:
    """Return meetings of some steps: odd and even numbers of them, of one row and of several. The
    last of a step may have fewer rows, as behind the last attention."""
    return [[rng.choice((1, 3, 5)) for _ in range(rng.choice((2, 3, 4)))] for _ in range(3)]


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_no_lane_reads_a_part_of_another_meeting(lanes: int) -> None:
    """Under 150 random schedules."""
    for seed in range(150):
        rng = random.Random(seed)
        run(Plan(lanes, steps(rng)), rng)


@pytest.mark.parametrize(
    "fault", ["one buffer", "no wait", "no fence", "two buffers in a step of odd length"]
)
def test_a_planted_fault_is_found(fault: str) -> None:
    """Within 150 schedules each; the model can tell right from wrong."""
    found = 0
    for seed in range(150):
        rng = random.Random(seed)
        try:
            run(Plan(2, [[3, 3, 3]] * 3, fault), rng)
        except StaleReadError:
            found += 1

    assert found
