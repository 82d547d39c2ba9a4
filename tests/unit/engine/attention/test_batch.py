"""A step's rows as tensors, against values worked out by hand."""

from __future__ import annotations

from engine.attention.batch import make_batch
from engine.plan import Row, StepPlan


def test_batch_has_position_and_slot_of_each_token() -> None:
    """A block table is read from the block in which the row starts."""
    rows = (
        Row(7, 14, 4, [9, 2, 5], 0, [1, 2, 3, 4]),
        Row(8, 32, 1, [0, 1, 6], 3, None, samples=(8,)),
    )

    batch = make_batch(StepPlan(step=1, rows=rows), 16, {8: 42}.__getitem__)

    assert batch.token_ids.tolist() == [1, 2, 3, 4, 42]
    assert batch.positions.tolist() == [14, 15, 16, 17, 32]
    assert batch.slots[0].tolist() == [9 * 16 + 14, 9 * 16 + 15, 32, 33, 96]
    assert batch.row_ends == [4, 5]


def test_logit_rows_are_sampled_or_scored_tokens() -> None:
    """A chunk from the middle of a prompt needs no logits: the head is a fifth of the work."""
    rows = (
        Row(1, 0, 3, [0], 0, [1, 2, 3]),
        Row(2, 0, 2, [1], 0, [4, 5], prompt_logprobs=0, next_token_id=6),
        Row(3, 0, 2, [2], 0, [7, 8], samples=(3, 4)),
    )

    batch = make_batch(StepPlan(step=1, rows=rows), 16, lambda _: 0)

    assert batch.logit_rows == [3, 4, 6]


def test_each_group_has_its_own_slots() -> None:
    """A table beside the first may have holes before the row; they are not read."""
    rows = (
        Row(7, 30, 3, [9, 2, 5], 0, [1, 2, 3], beside=([-1, 8, 7], [-1, 3, 4])),
        Row(8, 32, 1, [0, 1, 6], 0, [4], beside=([-1, -1, 10], [-1, 12, 11])),
    )

    batch = make_batch(StepPlan(step=1, rows=rows), 16, lambda _: 0)

    assert [slots.tolist() for slots in batch.slots] == [
        [46, 47, 80, 96],
        [8 * 16 + 14, 8 * 16 + 15, 7 * 16, 160],
        [3 * 16 + 14, 3 * 16 + 15, 4 * 16, 176],
    ]
