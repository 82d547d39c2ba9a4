"""States of recurrent layers for the C kernels, which read and write them where they lie.

Everything is fp32, the last inputs of convolutions too, so that no cut of a prompt rounds any.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from engine.model_store import Architecture
from engine.plan import StepPlan
from engine.states.places import StatePlaces


class CpuStates:
    """The states of all sequences, and a step's rows: row i is its tokens [firsts[i], firsts[i +
    1]), int32, of which those from `drafts[i]`, int32, are drafts, and its sequence has place
    `slots[i]`, int64. `pool`: see `StatePlaces`."""

    def __init__(self, config: Architecture, pool: torch.Tensor | None = None) -> None:
        self._places = StatePlaces(config, torch.float32, torch.device("cpu"), pool)
        self.layout = self._places.layout
        self.slots = np.empty(0, np.int64)
        self.firsts = np.zeros(1, np.int32)
        self.drafts = np.empty(0, np.int32)

    @property
    def data(self) -> torch.Tensor:
        """The states [places, bytes]; they move when places are added, in `begin` and `end`."""
        return self._places.data

    @property
    def places(self) -> int:
        """Sequences for which there is memory."""
        return self._places.places

    def begin(self, plan: StepPlan) -> None:
        """Lay out a step. Sequences begin from zeros, or from restored states. O(rows)."""
        self.slots = np.array(self._places.begin(plan), np.int64)
        self.firsts = np.cumsum([0, *(row.count for row in plan.rows)], dtype=np.int32)
        self.drafts = self.firsts[1:] - np.array([row.drafts for row in plan.rows], np.int32)

    def clear(self, blocks: Iterable[int]) -> None:
        """See `StatePlaces.clear`."""
        self._places.clear(blocks)

    def end(self, plan: StepPlan) -> None:
        """See `StatePlaces.end`."""
        self._places.end(plan)
