"""The steps that a runner takes before anybody is served, so that nobody waits for what the first
of a kind costs: kernels compiled and loaded, ways of multiplying chosen, memory taken.

Plans like any other, so that nobody keeps a second list of what a step launches: prompts of many
lengths with a prefix in common, a full house, and every way of drawing. Their rows read and write
block 0, over and over, and copy it to the last one; whoever takes these steps wipes both. Knows no
device. Called by the device runner.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from engine.api import Sampling
from engine.plan import BegunSequence, BlockCopy, Group, Row, StepPlan

MANY = 128
"""Tokens: a prefix that is read once for all, and rows that are not launched as a few are."""

SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(),
    Sampling(seed=0),
    Sampling(top_k=20, top_p=0.9, min_p=0.05, seed=0),
    Sampling(top_p=0.9, seed=0),
    Sampling(temperature=0, logprobs=1),
    Sampling(logit_bias={0: 1.0}),
    Sampling(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
)
"""Between them they ask for everything that a draw can depend on."""


class WarmupLimits(Struct, frozen=True, gc=False):
    """What a step may have, and the size of the vocabulary."""

    block_size: int
    blocks: int
    context: int
    sequences: int
    step_tokens: int
    vocab: int


def first_steps(limits: WarmupLimits) -> Iterator[StepPlan]:
    """The plans, each with sequences of its own to be ended after it; ids are below 0.

    Two prompts at a time, twice as long as the ones before, up to the longest step; then as many
    as there may be; then draws. In all about twice the tokens of the longest step.
    """
    most = limits.step_tokens
    for total in [*(1 << n for n in range(1, most.bit_length())), most]:
        yield _prompts(limits, 2, total // 2)
    yield _prompts(limits, limits.sequences, 2)
    yield _prompts(limits, limits.sequences, 1)
    for first in range(0, len(SAMPLINGS), limits.sequences):
        kinds = SAMPLINGS[first : first + limits.sequences]
        yield _draws(limits, tuple(kind for kind in kinds if kind in SAMPLINGS[:2]) or kinds)
        yield _draws(limits, kinds, prompt_logprobs=1, masks=1)
        yield _draws(limits, kinds, masks=len(kinds))


def _prompts(limits: WarmupLimits, sequences: int, tokens: int) -> StepPlan:
    """Prompts of `tokens` behind a prefix in common, as many and as long as may be."""
    size = limits.block_size
    shared = min(MANY // size, (limits.context - 1) // size)
    start = shared * size
    sequences = max(1, min(sequences, limits.sequences, limits.step_tokens))
    tokens = max(1, min(tokens, limits.context - start, limits.step_tokens // sequences))
    ids = range(-1, -1 - sequences, -1)
    rows = tuple(_row(limits, i, start, tokens, (i,)) for i in ids)
    has_group = sequences > 1 and shared > 0
    return StepPlan(
        step=0,
        rows=rows,
        groups=(Group(0, sequences, 0, shared),) if has_group else (),
        begun=tuple(_begun(i, start + tokens, SAMPLINGS[0]) for i in ids),
    )


def _draws(
    limits: WarmupLimits,
    kinds: tuple[Sampling, ...],
    prompt_logprobs: int | None = None,
    masks: int = 0,
) -> StepPlan:
    """One prompt, from which each kind draws, the first `masks` of them under a mask."""
    tokens = min(MANY, limits.context, limits.step_tokens)
    ids = tuple(range(-1, -1 - len(kinds), -1))
    mask = np.full(-(-limits.vocab // 32), -1, np.int32)
    return StepPlan(
        step=0,
        rows=(_row(limits, ids[0], 0, tokens, ids, prompt_logprobs),),
        begun=tuple(_begun(i, tokens, kind) for i, kind in zip(ids, kinds, strict=True)),
        copies=(BlockCopy(0, limits.blocks - 1, 1),),
        masks=dict.fromkeys(ids[:masks], mask),
    )


def _row(
    limits: WarmupLimits, sequence: int, start: int, tokens: int, samples: tuple[int, ...],
    prompt_logprobs: int | None = None,
) -> Row:  # fmt: skip
    return Row(
        sequence,
        start,
        tokens,
        [0] * -(-(start + tokens) // limits.block_size),
        0,
        [0] * tokens,
        samples,
        prompt_logprobs,
    )


def _begun(sequence: int, tokens: int, sampling: Sampling) -> BegunSequence:
    return BegunSequence(sequence, sampling, [0] * tokens, tokens)
