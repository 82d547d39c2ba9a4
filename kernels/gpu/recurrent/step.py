"""What the kernels of recurrent layers share: how a step's rows lie, and small functions.

A sequence's states lie at its *seat*, a row of the state memory [seats + 1, bytes]. A step's rows
of one sequence, T rows in all, are a *run*; in a decoding step every row is one. All of this is
read on the GPU, so that a graph's launches depend on the number of rows alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 64
"""Tokens of a chunk of a prompt."""
FEW = 8
"""Up to so many rows of a run are followed one by one, with its state in registers, and all rows of
one with drafts, whose state is left before them. Others are cut into chunks."""
PRECISION = tl.constexpr("tf32x3")
"""Of products of fp32, each made of three in tf32: in fp32 itself the matrix units have none."""


class StepRuns(NamedTuple):
    """The runs of a step, int32 on the GPU.

    Lists are padded with runs and chunks of no rows. Rows whose seat is `seats_max` or more are
    padding: their states are not touched, and what they read is zero.
    """

    seats: torch.Tensor
    """[T], of each row."""
    seats_max: int
    firsts: torch.Tensor | None = None
    """[T]: the first row of each row's run; None in a step whose runs all have one row."""
    run_firsts: torch.Tensor | None = None
    """[R]: the first row of each run."""
    run_counts: torch.Tensor | None = None
    """[R]: rows of each run."""
    run_kept: torch.Tensor | None = None
    """[R]: the rows of each run after which its state is left: those before its drafts."""
    run_chunks: torch.Tensor | None = None
    """[R]: the first chunk of each run; -1 of one whose rows are followed one by one."""
    chunk_firsts: torch.Tensor | None = None
    """[N]: the first row of each chunk."""
    chunk_counts: torch.Tensor | None = None
    """[N]: rows of each chunk, up to `CHUNK`."""

    @property
    def lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """First rows, counts, kept rows and chunks of the runs; the seats in place of each if there
        are no lists, so that a launch has an address."""
        lists = self.run_firsts, self.run_counts, self.run_kept, self.run_chunks
        firsts, counts, kept, chunks = (self.seats if one is None else one for one in lists)
        return firsts, counts, kept, chunks


def chunks_max(rows: int, runs: int) -> int:
    """Return the most chunks that so many rows have, in at most so many runs of over `FEW`."""
    return rows // CHUNK + min(rows // (FEW + 1), runs)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)); above 20 that is x."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
