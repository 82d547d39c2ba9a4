"""Doubles that tell the truth: a runner whose KV is the words themselves, and a clock by hand.

The fake runner is a token oracle. Instead of tensors, a slot of its "KV" holds the exact prefix it
was computed from, and a row reads every slot before it through its block table, as attention would.
Wrong sharing, a missing copy, a stale block or a freed one shows up as a prefix that is not the
sequence's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import xxhash

from engine.api import SampledToken, Sampling
from engine.errors import InvariantViolation
from engine.plan import BegunSequence, Row, Sampled, StepPlan, StepResult


class OracleError(InvariantViolation):
    """A row read a slot that does not hold its own history."""


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def tag_after(tag: int, token: int) -> int:
    """The exact prefix as one number: 64 bits of a chain over its tokens."""
    return xxhash.xxh3_64_intdigest(token.to_bytes(4, "little"), seed=tag)


def next_token(tag: int, sampling: Sampling, sample: int, position: int, vocab: int) -> int:
    """The "model": a function of the whole prefix and of what keys the random choice."""
    seed = 0 if sampling.temperature == 0 else (sampling.seed or 0)
    sample = 0 if sampling.temperature == 0 else sample
    words = b"".join(n.to_bytes(8, "little", signed=n < 0) for n in (seed, sample, position))
    return xxhash.xxh3_64_intdigest(words, seed=tag) % vocab


def solo_output(
    prompt: Sequence[int], sampling: Sampling, sample: int, count: int, vocab: int
) -> list[int]:
    """What a sequence draws when it is alone in the world: no cache, no batch, no preemption."""
    tag, out = 0, []
    for token in prompt:
        tag = tag_after(tag, token)
    for position in range(count):
        out.append(next_token(tag, sampling, sample, position, vocab))
        tag = tag_after(tag, out[-1])
    return out


class FakeRunner:
    """`engine.core.Runner` over tags. Steps run in launch order; `collect` gives them in order.

    `fail_steps`: step numbers whose launch or collect raises; `nan_steps`: step numbers that report
    their first drawing sequence as failed. `computed_tokens` counts what was computed in all.
    """

    def __init__(self, blocks: int, block_size: int, *, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(blocks)]
        self.begun: dict[int, BegunSequence] = {}
        self.outputs: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.tags: dict[int, int] = {}
        self.computed_tokens = 0
        self.steps = 0
        self.fail_launch: set[int] = set()
        self.fail_collect: set[int] = set()
        self.nan_steps: set[int] = set()
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Run the whole step now; its result waits for `collect`."""
        self.steps += 1
        for sequence_id in plan.ended:
            self._forget(sequence_id)
        for begun in plan.begun:
            self._begin(begun)
        for copy in plan.copies:
            kept = self.slots[copy.src][: copy.tokens]
            self.slots[copy.dst] = kept + [None] * (self.block_size - copy.tokens)
        self._check_groups(plan)
        if plan.step in self.fail_launch:
            raise RuntimeError("planted: launch")
        sampled: list[Sampled] = []
        failed: dict[int, str] = {}
        logprobs: dict[int, tuple[SampledToken, ...]] = {}
        for row in plan.rows:
            tag = self._compute(row)
            if row.prompt_logprobs is not None:
                logprobs[row.sequence_id] = self._next_tokens(row)
            for sequence_id in row.samples:
                if plan.step in self.nan_steps and not failed:
                    failed[sequence_id] = "nan_logits"
                    continue
                sampled.append(self._draw(sequence_id, tag))
        self._results.append(
            StepResult(
                step=plan.step, sampled=tuple(sampled), failed=failed, prompt_logprobs=logprobs
            )
        )

    def collect(self) -> StepResult:
        """The oldest launched step's result."""
        result = self._results.popleft()
        if result.step in self.fail_collect:
            raise RuntimeError("planted: collect")
        return result

    # -- inside -------------------------------------------------------------------------------

    def _begin(self, begun: BegunSequence) -> None:
        if begun.sequence_id in self.begun:
            raise OracleError(f"sequence {begun.sequence_id} was begun twice")
        self.begun[begun.sequence_id] = begun
        self.outputs[begun.sequence_id] = len(begun.token_ids) - begun.prompt_tokens

    def _forget(self, sequence_id: int) -> None:
        if self.begun.pop(sequence_id, None) is None:
            raise OracleError(f"sequence {sequence_id} ended and had not begun")
        del self.outputs[sequence_id]
        self.last.pop(sequence_id, None)

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.block_size)
        if block >= len(row.block_ids):
            raise OracleError(f"position {position} lies outside the block table")
        return row.block_ids[block], offset

    def _compute(self, row: Row) -> int:
        """Check the history and write the slice. Returns the tag of its last position."""
        if row.sequence_id not in self.begun:
            raise OracleError(f"sequence {row.sequence_id} has a row and has not begun")
        if row.token_ids is None:
            tokens: Sequence[int] = [self.last[row.sequence_id]]
        else:
            tokens = row.token_ids
        if len(tokens) != row.count or row.count < 1:
            raise OracleError(f"{len(tokens)} tokens for {row.count} positions")
        history = self.begun[row.sequence_id].token_ids
        tag = 0
        for position in range(row.start):
            if position >= len(history):
                tag = self._read(row, position)  # drawn since; checked when it was written
                continue
            tag = tag_after(tag, history[position])
            if self._read(row, position) != tag:
                raise OracleError(f"position {position} of {row.sequence_id} holds another prefix")
        for index, token in enumerate(tokens):
            tag = tag_after(tag, token)
            block, offset = self._slot(row, row.start + index)
            self.slots[block][offset] = tag
        self.computed_tokens += row.count
        return tag

    def _read(self, row: Row, position: int) -> int:
        block, offset = self._slot(row, position)
        tag = self.slots[block][offset]
        if tag is None:
            raise OracleError(f"position {position} of {row.sequence_id} was never written")
        return tag

    def _draw(self, sequence_id: int, tag: int) -> Sampled:
        begun = self.begun[sequence_id]
        token = next_token(
            tag, begun.sampling, begun.sample_index, self.outputs[sequence_id], self.vocab_size
        )
        self.outputs[sequence_id] += 1
        self.last[sequence_id] = token
        logprob = None if begun.sampling.logprobs is None else -1.0
        return Sampled(sequence_id, SampledToken(token, logprob))

    def _next_tokens(self, row: Row) -> tuple[SampledToken, ...]:
        following = [*(row.token_ids or ())[1:]]
        if row.next_token_id is not None:
            following.append(row.next_token_id)
        return tuple(SampledToken(token, -1.0) for token in following)

    def _check_groups(self, plan: StepPlan) -> None:
        for group in plan.groups:
            rows = plan.rows[group.first_row : group.end_row]
            if len(rows) < 2 or group.end_block <= group.first_block:
                raise OracleError(f"{group} shares nothing")
            shared = rows[0].block_ids[: group.end_block]
            for row in rows:
                if row.block_ids[: group.end_block] != shared:
                    raise OracleError(f"{group}: rows with different blocks")
                if group.end_block * self.block_size > row.start:
                    raise OracleError(f"{group}: a block that is not in place yet")
