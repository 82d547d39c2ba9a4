"""What an engine is to a simulation: its room, its limits, and how long its steps take.

A step's time is what the scheduler's own `StepCost` predicts, fitted to steps of the shape. How
many prompt tokens a step has is rule 1 of the scheduler, over its own `PromptBudget`.
"""

from __future__ import annotations

from msgspec import Struct

from engine.scheduler.scheduler import (
    DECODES_OF_ONE_PAYER,
    DECODES_OF_SHARED_STEP,
    STEPS_WITHOUT_STREAMS,
)
from engine.scheduler.step_cost import PromptBudget, StepCost, StepWork

FIT_ROUNDS = 3
FIT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIT_TOKENS = (0, 16, 64, 256, 1024, 2048)
FIT_CONTEXTS = (64, 2048, 16_384)


class EngineShape(Struct, frozen=True):
    """The constants of an engine with one model on one device."""

    name: str
    kv_tokens: int
    """Tokens of KV that the pool has room for."""
    prefill_tokens_per_s: float
    """Prompt tokens a second of a step without decodes, its fixed time left out."""
    step_s: float
    """The fixed time of a step."""
    row_s: float
    """What each sequence adds to a step."""
    context_token_s: float = 0.0
    """What each token that a decoding sequence reads adds to a step."""
    sequences_max: int = 256
    step_tokens_max: int = 2048
    gap_target_s: float = 0.05
    gap_target_shared_s: float = 0.012
    kv_bytes_per_token: int = 131_072

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step, by these constants."""
        return (
            self.step_s
            + self.row_s * work.rows
            + work.prompt_tokens / self.prefill_tokens_per_s
            + self.context_token_s * work.row_context
        )


SHAPES = {
    "8b": EngineShape("8b", 820_000, 24_700.0, 0.006, 0.000035),
    "cpu": EngineShape(
        "cpu", 23_000, 900.0, 0.012, 0.004, gap_target_shared_s=0.05, kv_bytes_per_token=46_080
    ),
}
"""`8b`: a model of 8B parameters in bf16 on a GPU of the H200's size. `cpu`: one of 135M parameters
on two cores."""


def fit_step_cost(shape: EngineShape) -> StepCost:
    """Return prices fitted to steps of a shape, as a running engine fits them to its own."""
    cost = StepCost()
    for _ in range(FIT_ROUNDS):
        for rows in FIT_ROWS:
            for tokens in FIT_TOKENS:
                for context in FIT_CONTEXTS:
                    decodes = rows - 1 if tokens else rows
                    work = StepWork(rows, tokens, decodes * context, tokens * context)
                    cost.record(work, shape.seconds(work))
    return cost


def step_budget(
    cost: StepCost, shape: EngineShape, decodes: StepWork, *, is_shared: bool
) -> PromptBudget:
    """Return the prompt tokens of a step beside its `decodes`: rule 1 of the scheduler.

    `is_shared`: several payers have requests, or had a moment ago.
    """
    tokens = max(1, shape.step_tokens_max - decodes.rows)
    target_s, shared_s = shape.gap_target_s, shape.gap_target_shared_s
    if not decodes.rows:
        longest_s = shared_s if is_shared else target_s * STEPS_WITHOUT_STREAMS
        return PromptBudget(cost, tokens, longest_s)
    decodes_s = cost.seconds(decodes)
    if is_shared:
        target_s = min(target_s, max(shared_s, DECODES_OF_SHARED_STEP * decodes_s))
    else:
        target_s = max(target_s, DECODES_OF_ONE_PAYER * decodes_s)
    return PromptBudget(cost, tokens, target_s - decodes_s)
