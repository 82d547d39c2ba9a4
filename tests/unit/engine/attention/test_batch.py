"""A step's rows as tensors, by hand."""

from __future__ import annotations

from engine.attention.batch import make_batch
from engine.plan import Row, StepPlan


def test_each_token_has_its_position_and_slot() -> None:
    """Tables are read from the block that the slice starts in, wherever the blocks lie."""
    rows = (
        Row(7, 14, 4, [9, 2, 5], 0, [1, 2, 3, 4]),
        Row(8, 32, 1, [0, 1, 6], 3, None, samples=(8,)),
    )

    batch = make_batch(StepPlan(step=1, rows=rows), 16, {8: 42}.__getitem__)

    assert batch.token_ids.tolist() == [1, 2, 3, 4, 42]
    assert batch.positions.tolist() == [14, 15, 16, 17, 32]
    assert batch.slots.tolist() == [9 * 16 + 14, 9 * 16 + 15, 32, 33, 96]
    assert batch.row_ends == [4, 5]


def test_logits_are_wanted_where_a_token_is_drawn_or_a_prompt_is_scored() -> None:
    """A slice from the middle of a prompt needs none: the head is a fifth of the work."""
    rows = (
        Row(1, 0, 3, [0], 0, [1, 2, 3]),
        Row(2, 0, 2, [1], 0, [4, 5], prompt_logprobs=0, next_token_id=6),
        Row(3, 0, 2, [2], 0, [7, 8], samples=(3, 4)),
    )

    batch = make_batch(StepPlan(step=1, rows=rows), 16, lambda _: 0)

    assert batch.logit_rows == [3, 4, 6]
