"""Seats: block tables on the host equal those of the GPU, and what is sent is what is new."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.plan import Row
from engine.runner.seats import MEMBERSHIPS_MAX, Seats, StepRows

STRIDE = 12


def row(sequence: int, blocks: list[int], version: int = 0, *, start: int = 0, count: int = 1,
        token_ids: list[int] | None = None) -> Row:  # fmt: skip
    return Row(sequence, start, count, blocks, version, token_ids)


def send(seats: Seats, gpu: np.ndarray, *rows: Row) -> int:
    """Send the rows' new entries to `gpu`; return how many there are."""
    members = tuple(one.sequence_id for one in rows)
    entries = seats.new_entries(rows, seats.of(members))
    if entries is None:
        return 0
    gpu[entries[0]] = entries[1]
    return len(entries[0])


def test_only_new_entries_are_sent() -> None:
    seats, gpu = Seats(3, STRIDE), np.zeros(3 * STRIDE, np.int32)
    seats.take(7)
    seats.take(9)

    assert send(seats, gpu, row(7, [3, 4]), row(9, [5])) == 3
    assert send(seats, gpu, row(7, [3, 4]), row(9, [5])) == 0
    assert send(seats, gpu, row(9, [5, 6]), row(7, [3, 4, 8])) == 2
    assert send(seats, gpu, row(7, [2, 4, 8], version=1)) == 3

    seat = int(seats.of((7,))[0])
    assert gpu[seat * STRIDE :][:3].tolist() == [2, 4, 8]
    assert np.array_equal(gpu, seats.tables.reshape(-1))


@pytest.mark.parametrize("seed", range(20))
def test_tables_follow_sequences_that_come_and_go(seed: int) -> None:
    """Sequences begin, grow, change and end; every row's table is on the GPU at its seat."""
    rng = random.Random(seed)
    seats, gpu = Seats(5, STRIDE), np.zeros(5 * STRIDE, np.int32)
    tables: dict[int, tuple[list[int], int]] = {}
    for _ in range(80):
        name = rng.randrange(9)
        if name in tables and rng.random() < 0.3:
            seats.release(name)
            del tables[name]
        elif name not in tables and len(tables) < 5:
            seats.take(name)
            tables[name] = ([rng.randrange(99)], 0)
        for key, (blocks, version) in tables.items():
            if len(blocks) < STRIDE and rng.random() < 0.4:
                blocks.append(rng.randrange(99))
            if rng.random() < 0.1:
                tables[key] = ([rng.randrange(99) for _ in blocks], version + 1)
        chosen = rng.sample(sorted(tables), rng.randrange(len(tables) + 1))

        send(seats, gpu, *(row(key, *tables[key]) for key in chosen))

        for key, seat in zip(chosen, seats.of(tuple(chosen)).tolist(), strict=True):
            blocks = tables[key][0]
            assert gpu[seat * STRIDE :][: len(blocks)].tolist() == blocks
            assert seats.tables[0, seat][: len(blocks)].tolist() == blocks


def test_window_groups_have_tables_of_their_own() -> None:
    """Each group's entries go to its own tables; a hole is any block that exists."""
    seats, gpu = Seats(2, STRIDE, groups=2), np.full(4 * STRIDE, -7, np.int32)
    seats.take(7)
    seats.take(9)
    rows = [
        Row(7, 0, 1, [3, 4], 0, None, beside=([-1, 14],)),
        Row(9, 0, 1, [5], 0, None, beside=([15],)),
    ]

    assert send(seats, gpu, *rows) == 6

    first, second = (int(seats.of((name,))[0]) * STRIDE for name in (7, 9))
    assert gpu[first : first + 2].tolist() == [3, 4]
    assert gpu[2 * STRIDE + first :][:2].tolist() == [0, 14]
    assert (int(gpu[second]), int(gpu[2 * STRIDE + second])) == (5, 15)


def test_returning_sequence_gets_its_new_seat() -> None:
    """A preempted sequence ends and begins again under its id, maybe at another seat."""
    seats = Seats(2, STRIDE)
    seats.take(1)
    before = int(seats.of((1,))[0])
    seats.release(1)
    seats.take(2)
    seats.take(1)

    assert int(seats.of((1,))[0]) != before
    assert sorted(seats.of((1, 2)).tolist()) == [0, 1]
    assert len({len(seats.of((1,) * n)) for n in range(MEMBERSHIPS_MAX + 3)}) == MEMBERSHIPS_MAX + 3


def test_sequence_that_never_got_a_seat_frees_none() -> None:
    """A launch may fail before it; those that end with it would keep their seats for ever."""
    seats = Seats(2, STRIDE)
    seats.take(1)
    for ended in (2, 1):
        seats.release(ended)

    seats.take(3)
    seats.take(4)
    assert sorted(seats.of((3, 4)).tolist()) == [0, 1]


def test_rows_of_prompts_and_decoding_are_laid_out() -> None:
    rows = [
        row(0, [1], start=4),
        row(1, [1, 2], start=14, count=3, token_ids=[5, 6, 7]),
        row(2, [3], start=0, count=1, token_ids=[8]),
    ]
    step = StepRows(rows, np.array([2, 0, 1], np.int32))
    token_ids = np.zeros(step.total, np.int32)

    positions, seats = step.positions()
    step.write_token_ids(token_ids)

    assert positions.tolist() == [4, 14, 15, 16, 0]
    assert seats.tolist() == [2, 0, 0, 0, 1]
    assert token_ids.tolist() == [-1, 5, 6, 7, 8]


@pytest.mark.parametrize("blocks", [[4], [4, 6], list(range(1, STRIDE + 1))])
def test_entries_behind_a_table_are_the_sequence_s_own(blocks: list[int]) -> None:
    """Attention reads whole tiles: what it masks must be no other sequence's block."""
    seats, gpu = Seats(2, STRIDE, ahead=3), np.full(2 * STRIDE, -7, np.int32)
    seats.take(7)
    send(seats, gpu, row(7, blocks[:1]))
    send(seats, gpu, row(7, blocks))

    seat = int(seats.of((7,))[0])
    expected = [*blocks, *[blocks[-1]] * 3][:STRIDE]
    assert gpu[seat * STRIDE :][: len(expected)].tolist() == expected
