"""The step plan: one frozen value per step, which core makes and a runner executes.

It knows no tensor and no clock. Rules:

1. `launch(plan)` has read everything it needs when it returns: block tables and token lists are the
sequences' own lists and change afterwards. 2. Order inside a step: `keeps` of ended sequences,
`ended`, `begun`, `restores`, `copies` (as listed), the rows, the other `keeps`. 3. Rows are in the
prefix tree's depth-first order, so rows that share a run of blocks are contiguous; rows under an
attention window come last. `groups` name shared runs; a runner that ignores them is still correct.
4. A step never reads the value of a token sampled by a step not yet collected: such a row has
`token_ids=None`, and its one token is the last one its sequence sampled, which the runner keeps.
Such a row was planned as if the step before samples one token of its sequence. A row with drafts
samples several: the draw at each position is kept while all draws before it equal the drafts there,
so the tokens are those of as many steps without drafts. Its sequence has no row in a later step
until this one is collected. The KV of accepted drafts was computed by their row; that of the last
sampled token, and of drafts that were not accepted, is not in place: later rows compute it. 5. Each
token that a sequence with a mask samples is one that its mask, or the row's behind the draft before
it, allows, for any logits; masks are not written after the launch. 6. No token is sampled from a
row of logits that has a NaN or nothing above minus infinity: the sequences that would sample from
it are in `failed`. 7. A sequence that begins has recurrent states of zeros, or those that
`restores` names; each row goes on where the row before it, or the restored state, ended. A row with
drafts ends before them: what was accepted is silent in the sequence's next row. Sequences that part
after a row have its states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from engine.api import BlockWindow, SampledToken, Sampling

Mask = npt.NDArray[np.int32]
"""The tokens that may be sampled: bit i % 32 of word i // 32 is 1 where token i may. int32
[words].
"""

TokensBySequence = dict[int, tuple[SampledToken, ...]]
"""Tokens of sequences by their ids, each sequence's in order."""


class BlockCopy(Struct, frozen=True, gc=False):
    """Copy the first `tokens` slots of block `src`, all layers of its KV group, to block `dst`."""

    src: int
    dst: int
    tokens: int


class StateCopy(Struct, frozen=True, gc=False):
    """The recurrent states of a sequence, all layers, and the blocks that they are copied to or
    from, in the order of their bytes."""

    sequence_id: int
    blocks: tuple[int, ...]


class BegunSequence(Struct, frozen=True):
    """A sequence that is new to the runner, or that had ended for the runner (preempted,
    resumed)."""

    sequence_id: int
    sampling: Sampling
    token_ids: Sequence[int]
    """The whole history so far, prompt and outputs; `prompt_tokens` of them are prompt."""
    prompt_tokens: int
    sample_index: int = 0
    """The sequence's index among the request's samples; with the seed and the output position it
    keys the random choice."""


class Row(Struct, frozen=True, gc=False):
    """Compute `count` tokens of a sequence from position `start`; their KV goes to its own blocks.

    `table_version` changes when an entry of any table changes to another block; appended entries
    and holes do not change it.
    """

    sequence_id: int
    start: int
    count: int
    block_ids: Sequence[int]
    """The sequence's block table, covering `start + count` slots."""
    table_version: int
    token_ids: Sequence[int] | None
    samples: tuple[int, ...] = ()
    """The ids of the sequences that each sample next tokens from the logits of the last position
    (several right after a fork, none in the middle of a prompt)."""
    prompt_logprobs: int | None = None
    """Report logprobs of the tokens that follow each computed position within `token_ids` +
    `next_token_id`."""
    next_token_id: int | None = None
    beside: tuple[Sequence[int], ...] = ()
    """Its tables in the window groups of KV, as long as the first; an entry behind the window may
    be a hole (-1), which no query reads."""
    attention: BlockWindow | None = None
    """What the row reads of `block_ids` where that is not all before it; what no token of the row
    reads may be a hole."""
    silent: int = 0
    """The first tokens of `count`, which bring a sequence's recurrent states up to the others:
    their KV is in place and is not written. A sequence's first row since it began may have some,
    and the one behind a row with drafts."""
    drafts: int = 0
    """The last `drafts` of `token_ids` are drafts of its one sample, which draws at their positions
    and the one before them."""
    draft_masks: tuple[Mask, ...] = ()
    """The tokens that may follow each draft, for a sequence under a grammar."""


class Group(Struct, frozen=True, gc=False):
    """Rows [first_row, end_row) have the same blocks in table entries [first_block, end_block) of
    `block_ids`; in the tables beside it, where neither of two rows has a hole.

    All these blocks are full and precede each row's `start`; no row has an `attention`. Groups of
    one level do not overlap; a deeper group's rows lie inside a shallower group's, and its blocks
    begin where that group's end.
    """

    first_row: int
    end_row: int
    first_block: int
    end_block: int


class StepPlan(Struct, frozen=True):
    """The work of one step."""

    step: int
    rows: tuple[Row, ...]
    groups: tuple[Group, ...] = ()
    begun: tuple[BegunSequence, ...] = ()
    ended: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    masks: dict[int, Mask] = {}
    """By sequence id, for sampling sequences under a grammar."""
    restores: tuple[StateCopy, ...] = ()
    """States that sequences take from blocks before their rows (rule 7)."""
    keeps: tuple[StateCopy, ...] = ()
    """States that sequences leave in blocks: those of `ended` before all else, even where the step
    fails at its launch; the others after the rows."""


class StepResult(Struct, frozen=True):
    """The results of one step.

    `sampled` maps a sequence to the tokens that it sampled, one or more (rule 4). `failed` maps a
    sequence to a stable error code: only that sequence ends. `nan_logits` says that the model
    itself gave it no token, so a block that it read is at fault; `grammar_dead_end`, that its own
    mask, bias and penalties left none. `prompt_logprobs` maps a sequence to entries for the
    positions it computed.
    """

    step: int
    sampled: TokensBySequence = {}
    prompt_logprobs: TokensBySequence = {}
    failed: dict[int, str] = {}
    elapsed_s: float = 0.0
    """Seconds that the device took, without the time in which it waited for earlier steps or for
    the host; 0 if that is not measured."""
    waited_s: float = 0.0
    """Seconds that the device was idle before it, since the step before; 0 if that is not
    measured."""


class Runner(Protocol):
    """Executes steps in the order of their launch."""

    def launch(self, plan: StepPlan) -> None:
        """Start a step. Everything it needs of the plan has been read when it returns.

        May raise the error that broke the step, after recording the ended and begun sequences.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result. May raise the error that broke
        it.
        """
