"""A step's rows as tensors: token ids, positions and KV slots.

Made anew each step from a `StepPlan`. It knows no model and no attention backend. The CPU runner
calls it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from msgspec import Struct

from engine.plan import StepPlan


class Batch(Struct, frozen=True):
    """T query tokens of R rows, in the plan's order. Tensors are int64.

    `token_ids`, `positions`, `slots` [T]; a slot is block id * block_size + offset. `row_ends` [R]:
    index behind each row's last token. `logit_rows`: indices of the tokens whose logits are needed.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_ends: list[int]
    logit_rows: list[int]


def make_batch(plan: StepPlan, block_size: int, last_token: Callable[[int], int]) -> Batch:
    """Lay out a plan's rows. `last_token(sequence_id)` supplies the token of a row whose
    `token_ids` is None.

    O(tokens), numpy.
    """
    tokens: list[int] = []
    positions, slots = [], []
    row_ends: list[int] = []
    logit_rows: list[int] = []
    end = 0
    for row in plan.rows:
        tokens.extend(
            row.token_ids if row.token_ids is not None else (last_token(row.sequence_id),)
        )
        at = np.arange(row.start, row.start + row.count)
        first = row.start // block_size
        table = np.asarray(row.block_ids[first : (row.start + row.count - 1) // block_size + 1])
        positions.append(at)
        slots.append(table[at // block_size - first] * block_size + at % block_size)
        if row.prompt_logprobs is not None:
            logit_rows.extend(range(end, end + row.count))
        elif row.samples:
            logit_rows.append(end + row.count - 1)
        end += row.count
        row_ends.append(end)
    return Batch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate(positions)),
        slots=torch.from_numpy(np.concatenate(slots)),
        row_ends=row_ends,
        logit_rows=logit_rows,
    )
