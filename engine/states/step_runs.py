"""A step's runs of rows as lists, from a runner's host buffer to the kernels.

`engine.runner.gpu_inputs` gives them room among its sections; `engine.runner.gpu_runner` fills
them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.gpu.recurrent.step import CHUNK, FEW, StepRuns, chunks_max

__all__ = ["FEW", "RUN_SECTIONS", "StepRuns", "fill_runs", "step_runs"]

Int32 = npt.NDArray[np.int32]

RUN_SECTIONS = 7
"""Lists of `StepRuns` behind the seats, in its order."""


def fill_runs(sections: Int32, counts: Int32, drafts: Int32) -> None:
    """Write the lists of a step whose sequences have so many rows each [R], the last of them drafts
    [R], to `sections` [RUN_SECTIONS, width]. O(width)."""
    firsts, run_firsts, run_counts, run_kept, run_chunks, chunk_firsts, chunk_counts = sections
    runs, total = len(counts), int(counts.sum())
    starts = np.cumsum(counts, dtype=np.int32) - counts
    firsts[:total] = np.repeat(starts, counts)
    run_firsts[:runs], run_counts[:runs], run_counts[runs:] = starts, counts, 0
    run_kept[:runs], run_kept[runs:] = counts - drafts, 0
    chunks = np.where((counts > FEW) & (drafts == 0), -(-counts // CHUNK), 0)
    before = np.cumsum(chunks) - chunks
    run_chunks[:runs], run_chunks[runs:] = np.where(chunks, before, -1), -1
    run_of = np.repeat(np.arange(runs), chunks)
    offset = (np.arange(len(run_of)) - before[run_of]) * CHUNK
    chunk_firsts[: len(run_of)] = starts[run_of] + offset
    chunk_counts[: len(run_of)] = np.minimum(CHUNK, counts[run_of] - offset)
    chunk_counts[len(run_of) :] = 0


def step_runs(
    seats: torch.Tensor, seats_max: int, sections: torch.Tensor | None = None
) -> StepRuns:
    """Return the runs of a step with these seats [T]; without `sections` each row is a run."""
    if sections is None:
        return StepRuns(seats, seats_max)
    rows = len(seats)
    runs = min(rows, seats_max)
    widths = (rows, *(runs,) * 4, *(chunks_max(rows, runs),) * 2)
    lists = (one[:width] for one, width in zip(sections, widths, strict=True))
    return StepRuns(seats, seats_max, *lists)
