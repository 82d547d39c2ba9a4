"""Steps of recurrent layers for tests and benchmarks: runs of rows, and random inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.gpu.recurrent.step import CHUNK, FEW, StepRuns, chunks_max


def runs_of(
    seats: Sequence[int], counts: Sequence[int], seats_max: int, device: torch.device,
    padding: int = 0, drafts: Sequence[int] = (),
) -> StepRuns:  # fmt: skip
    """Return the runs of a step with so many rows at each of these seats, the last of them drafts,
    and padding rows behind them; without lists if every run has one row."""

    def there(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    firsts = [sum(counts[:i]) for i in range(len(counts))]
    rows = [seat for seat, count in zip(seats, counts, strict=True) for _ in range(count)]
    rows += [seats_max] * padding
    if set(counts) == {1}:
        return StepRuns(there(rows), seats_max)
    own = [first for first, count in zip(firsts, counts, strict=True) for _ in range(count)]
    kept = [c - d for c, d in zip(counts, drafts or [0] * len(counts), strict=True)]
    chunk_firsts, chunk_counts, run_chunks = list[int](), list[int](), list[int]()
    for first, count, before in zip(firsts, counts, kept, strict=True):
        has_chunks = count > FEW and before == count
        run_chunks.append(len(chunk_firsts) if has_chunks else -1)
        for start in range(0, count, CHUNK) if has_chunks else ():
            chunk_firsts.append(first + start)
            chunk_counts.append(min(CHUNK, count - start))
    most = chunks_max(len(rows), len(counts) + 2)
    lists = {
        "firsts": own + [0] * padding, "run_firsts": [*firsts, 0, 0],
        "run_counts": [*counts, 0, 0], "run_kept": [*kept, 0, 0],
        "run_chunks": [*run_chunks, -1, -1],
        "chunk_firsts": chunk_firsts + [0] * (most - len(chunk_firsts)),
        "chunk_counts": chunk_counts + [0] * (most - len(chunk_counts)),
    }  # fmt: skip
    return StepRuns(there(rows), seats_max, **{name: there(one) for name, one in lists.items()})
