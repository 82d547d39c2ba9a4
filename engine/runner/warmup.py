"""Warm-up steps, which a runner takes before it serves.

They spare clients the first-time costs: compiling and loading kernels, choosing matrix product
algorithms, allocating memory.

They are ordinary plans, so that no second list of kernels has to be kept: prompts of many lengths
with a shared prefix, a full batch, and every way of sampling. Their rows read and write block 0 and
copy it to the last block; the runner zeroes both afterwards. The module knows no device.
`engine.runner.gpu_runner` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from engine.api import Sampling
from engine.plan import BegunSequence, BlockCopy, Group, Row, StepPlan

PREFIX_TOKENS = 128
"""Length of the shared prefix, long enough to be read once for all rows; and of the prompts that
sample, long enough for the kernels of many rows."""

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
"""Together they use every parameter that sampling depends on."""


class WarmupLimits(Struct, frozen=True, gc=False):
    """Limits of a step, the size of the KV pool in blocks, the size of the vocabulary, and how many
    block tables a row has."""

    block_size: int
    blocks: int
    context: int
    sequences: int
    step_tokens: int
    vocab: int
    kv_groups: int = 1


def warmup_plans(limits: WarmupLimits) -> Iterator[StepPlan]:
    """Yield the plans. Each begins its own sequences, with ids below 0; the caller ends them after
    the step.

    First two prompts at a time, doubling in length up to the longest step; then full batches; then
    sampling. In all about twice the tokens of the longest step.
    """
    longest = limits.step_tokens
    for total in [*(1 << n for n in range(1, longest.bit_length())), longest]:
        yield _prompts(limits, 2, total // 2)
    yield _prompts(limits, limits.sequences, 2)
    yield _prompts(limits, limits.sequences, 1)
    for first in range(0, len(SAMPLINGS), limits.sequences):
        kinds = SAMPLINGS[first : first + limits.sequences]
        yield _sampling(limits, tuple(kind for kind in kinds if kind in SAMPLINGS[:2]) or kinds)
        yield _sampling(limits, kinds, prompt_logprobs=1, masks=1)
        yield _sampling(limits, kinds, masks=len(kinds))


def _prompts(limits: WarmupLimits, sequences: int, tokens: int) -> StepPlan:
    """Return a step of prompts of `tokens` after a shared prefix; both counts are cut to the
    limits."""
    size = limits.block_size
    shared = min(PREFIX_TOKENS // size, (limits.context - 1) // size)
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


def _sampling(
    limits: WarmupLimits,
    kinds: tuple[Sampling, ...],
    prompt_logprobs: int | None = None,
    masks: int = 0,
) -> StepPlan:
    """Return a step of one prompt from which each kind samples, the first `masks` of them under a
    mask."""
    tokens = min(PREFIX_TOKENS, limits.context, limits.step_tokens)
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
    table = [0] * -(-(start + tokens) // limits.block_size)
    return Row(
        sequence,
        start,
        tokens,
        table,
        0,
        [0] * tokens,
        samples,
        prompt_logprobs,
        beside=(table,) * (limits.kv_groups - 1),
    )


def _begun(sequence: int, tokens: int, sampling: Sampling) -> BegunSequence:
    return BegunSequence(sequence, sampling, [0] * tokens, tokens)
