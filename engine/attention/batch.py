"""A step's rows as tensors: token ids, positions and KV slots.

Made anew each step from a `StepPlan`. It knows no model and no attention backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from engine.plan import StepPlan

Ints = npt.NDArray[np.int64]


class Batch(Struct, frozen=True):
    """T query tokens of R rows, in the plan's order. Tensors are int64.

    `token_ids`, `positions` [T]. `slots` [T], for each KV group: block id * block_size + offset.
    `row_ends` [R]: index behind each row's last token.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    row_ends: list[int]
    logit_rows: list[int]
    """Indices of the tokens that need logits."""
    written: torch.Tensor | None
    """Indices of the tokens whose KV is written, those that are not silent; None: all."""


def make_batch(plan: StepPlan, block_size: int, last_token: Callable[[int], int]) -> Batch:
    """Lay out a plan's rows. `last_token(sequence_id)` supplies the token of a row if its
    `token_ids` is None.

    O(tokens), numpy.
    """
    tokens: list[int] = []
    positions: list[Ints] = []
    slots: list[list[Ints]] = [[], *([] for _ in plan.rows[0].beside)]
    row_ends: list[int] = []
    logit_rows: list[int] = []
    silent: list[int] = []
    end = 0
    for row in plan.rows:
        tokens.extend(
            row.token_ids if row.token_ids is not None else (last_token(row.sequence_id),)
        )
        at = np.arange(row.start, row.start + row.count)
        positions.append(at)
        silent.extend(range(end, end + row.silent))
        for group, block_ids in zip(slots, (row.block_ids, *row.beside), strict=True):
            group.append(_slots(block_ids, at, block_size))
        if row.prompt_logprobs is not None:
            logit_rows.extend(range(end, end + row.count))
        elif row.samples:
            logit_rows.extend(range(end + row.count - 1 - row.drafts, end + row.count))
        end += row.count
        row_ends.append(end)
    return Batch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate(positions)),
        slots=tuple(torch.from_numpy(np.concatenate(group)) for group in slots),
        row_ends=row_ends,
        logit_rows=logit_rows,
        written=torch.from_numpy(np.delete(np.arange(end), silent)) if silent else None,
    )


def _slots(block_ids: Sequence[int], at: Ints, block_size: int) -> Ints:
    """Return the slots of the positions `at` of a row, which follow each other."""
    first = int(at[0]) // block_size
    table = np.asarray(block_ids[first : int(at[-1]) // block_size + 1])
    return table[at // block_size - first] * block_size + at % block_size
