"""Fakes: a runner whose KV is the token prefixes themselves, a clock set by hand, a FIFO policy;
and the facts of a small engine.

The fake runner is a token oracle. A slot of its "KV" holds the exact prefix it was computed from,
not tensors, and a row reads every slot before it through its block table, as attention would. Wrong
sharing, a missing copy, a stale block or a freed one shows up as a prefix that is not the
sequence's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import xxhash

from engine.api import AttentionWindow, EngineInfo, SampledToken, Sampling
from engine.cache.tree.prefix_tree import Node
from engine.errors import InvariantViolation
from engine.plan import (
    BegunSequence,
    BlockCopy,
    Mask,
    Row,
    StateCopy,
    StepPlan,
    StepResult,
    TokensBySequence,
)

Slot = tuple[bytes, int, int]
"""The content of a slot of the fake KV: its namespace, its KV group and the exact prefix."""

BROKEN: Slot = (b"", -1, -1)
"""The content that a failed step has written."""

ENGINE_INFO = EngineInfo(
    epoch="e", model="m", model_digest="digest", model_dir="", vocab_size=100, context_tokens=64,
    block_size=16, blocks=8, floor_blocks_max=4, kv_bytes_per_block=1, kv_format="f", device="cpu",
    pid=1,
)  # fmt: skip


class OracleError(InvariantViolation):
    """A row read a slot that does not hold its own prefix."""


class FakeClock:
    """A clock that advances only on request."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FirstInFirstOut:
    """An eviction policy that evicts the leaf that entered the tree first."""

    def score(self, node: Node) -> float:
        return node.inserted_at_s


def tag_after(tag: int, token: int) -> int:
    """Return the exact prefix as one number: 64 bits of a hash chain over its tokens."""
    return xxhash.xxh3_64_intdigest(token.to_bytes(4, "little"), seed=tag)


def next_token(
    tag: int, sampling: Sampling, sample: int, position: int, vocab: int, mask: Mask | None = None
) -> int:
    """Return the "model's" token: a function of the prefix and of the key of the random choice."""
    seed = 0 if sampling.temperature == 0 else (sampling.seed or 0)
    sample = 0 if sampling.temperature == 0 else sample
    words = b"".join(n.to_bytes(8, "little", signed=n < 0) for n in (seed, sample, position))
    number = xxhash.xxh3_64_intdigest(words, seed=tag)
    if mask is None:
        return number % vocab
    allowed = [i for i in range(vocab) if int(mask[i // 32]) >> i % 32 & 1]
    if not allowed:
        raise OracleError("a row draws under a mask that allows nothing")
    return allowed[number % len(allowed)]


def solo_output(
    prompt: Sequence[int], sampling: Sampling, sample: int, count: int, vocab: int
) -> list[int]:
    """Return the tokens of a sequence that runs alone: no cache, no batch, no preemption."""
    tag, out = 0, []
    for token in prompt:
        tag = tag_after(tag, token)
    for position in range(count):
        out.append(next_token(tag, sampling, sample, position, vocab))
        tag = tag_after(tag, out[-1])
    return out


def _drafts_of(row: Row) -> list[int]:
    """Return the drafts of a row."""
    return list(row.token_ids or ())[row.count - row.drafts :] if row.drafts else []


class FakeRunner:
    """`engine.plan.Runner` over prefix tags. Steps run in launch order.

    `namespace_of` returns the namespace of a sequence id (None: all in one namespace).
    `fail_launch` and `fail_collect`: step numbers that raise there; `nan_steps`: step numbers whose
    first sampling sequence is reported as failed. A broken step writes broken slots, which no row
    may read later. `spares_smoke_test`: steps of the engine's own smoke test do not break. `words`:
    tokens that every sequence samples first. `computed_tokens` counts all computed tokens, drafts
    too, which are written as the prefixes that they would be. With `windows`, a row reads in each
    window group the keys in its window, and fails at a hole or a slot of another group.
    `attention_of` returns a sequence's attention window: each token must read the keys that this
    allows it, no more and no less, and what is computed beyond its shared blocks is another
    sequence's KV for all others. With `state_blocks`, a sequence has a recurrent state, the prefix
    that it was computed from, which each row takes on up to its drafts and which is kept in that
    many blocks.
    Single-threaded; every call is O(tokens), with an attention window O(tokens * tokens).
    """

    def __init__(
        self, blocks: int, block_size: int, *, vocab_size: int, windows: tuple[int, ...] = ()
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.vocab_size = vocab_size
        self.slots: list[Slot | None] = [None] * (blocks * block_size)
        self.namespace_of: Callable[[int], bytes] | None = None
        self.attention_of: Callable[[int], AttentionWindow | None] = lambda _: None
        self.begun: dict[int, BegunSequence] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tags: dict[int, list[int]] = {}
        self.computed_tokens = 0
        self.steps = 0
        self.fail_launch: set[int] = set()
        self.fail_collect: set[int] = set()
        self.nan_steps: set[int] = set()
        self.spares_smoke_test = False
        self.words: Sequence[int] = ()
        self._results: deque[StepResult] = deque()
        self._broken: dict[int, set[int]] = {}
        self.state_blocks = 0
        self._states: dict[int, int] = {}
        """By sequence, the tokens that its state has taken in."""
        self._names: dict[int, bytes] = {}
        """The namespaces of sequences, which the engine has forgotten where it keeps a last state.
        """

    def launch(self, plan: StepPlan) -> None:
        """Run the whole step now; its result waits for `collect`."""
        self.steps += 1
        if self.spares_smoke_test and not any(
            self._namespace(row.sequence_id) for row in plan.rows
        ):
            for steps in (self.fail_launch, self.fail_collect, self.nan_steps):
                steps.discard(plan.step)
        for keep in plan.keeps:
            if keep.sequence_id in plan.ended:
                self._keep(keep)
        for sequence_id in plan.ended:
            self._forget(sequence_id)
        for begun in plan.begun:
            self._begin(begun)
        for restore in plan.restores:
            self._restore(restore)
        for copy in plan.copies:
            self._copy(copy)
        self._check_groups(plan)
        if plan.step in self.fail_launch:
            raise RuntimeError("planted: launch")
        self._run(plan)

    def collect(self) -> StepResult:
        """Return the oldest launched step's result."""
        if not self._results:
            raise OracleError("collected a step that was not launched")
        result = self._results.popleft()
        self._broken.pop(result.step, None)
        if result.step in self.fail_collect:
            raise RuntimeError("planted: collect")
        return result

    # -- one step -----------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> None:
        """Read all rows, then write all: no row may depend on this step's writes."""
        broken = self._breaks(plan)
        for row in plan.rows:
            if self._check(row):
                broken.update((row.sequence_id, *row.samples))
        self._broken[plan.step] = broken
        written: set[int] = set()
        sampled: TokensBySequence = {}
        failed: dict[int, str] = {}
        logprobs: TokensBySequence = {}
        for row in plan.rows:
            self._write(row, written, is_broken=row.sequence_id in broken)
            if row.prompt_logprobs is not None:
                logprobs[row.sequence_id] = self._next_tokens(row)
            for sequence_id in row.samples:
                drawn = self._draw(sequence_id, row, plan.masks.get(sequence_id))
                if plan.step in self.nan_steps and not failed:
                    failed[sequence_id] = "nan_logits"
                else:
                    sampled[sequence_id] = drawn
        for keep in plan.keeps:
            if keep.sequence_id not in plan.ended:
                self._keep(keep, is_broken=keep.sequence_id in broken)
        self._results.append(
            StepResult(step=plan.step, sampled=sampled, failed=failed, prompt_logprobs=logprobs)
        )

    def _breaks(self, plan: StepPlan) -> set[int]:
        """Return the sequences whose KV this step makes unusable."""
        rows = [row for row in plan.rows if row.samples][:1] if plan.step in self.nan_steps else []
        rows = list(plan.rows) if plan.step in self.fail_collect else rows
        return {id_ for row in rows for id_ in (row.sequence_id, *row.samples)}

    def _check(self, row: Row) -> bool:
        """Compare a row's claims and reads with its own prefix; return whether it reads a broken
        slot.
        """
        if row.sequence_id not in self.begun:
            raise OracleError(f"sequence {row.sequence_id} has a row and has not begun")
        end, own = row.start + row.count - row.drafts, self.tokens[row.sequence_id]
        if row.count < 1 + row.drafts or row.start < 0 or end > len(own):
            raise OracleError(f"{row.sequence_id}: positions {row.start} to {end} of {len(own)}")
        if row.token_ids is None and (row.count, end) != (1, len(own)):
            raise OracleError(f"{row.sequence_id}: not the last token it sampled")
        known = None if row.token_ids is None else list(row.token_ids)[: row.count - row.drafts]
        if known is not None and known != own[row.start : end]:
            raise OracleError(f"{row.sequence_id}: computes tokens that are not its own")
        if row.drafts and (len(row.token_ids or ()) != row.count or len(row.samples) != 1):
            raise OracleError(f"{row.sequence_id}: drafts of no sample")
        end += row.drafts
        if row.samples and end - row.drafts != len(own):
            raise OracleError(f"{row.sequence_id}: draws from a position that is not its last")
        if self.state_blocks and self._states[row.sequence_id] != row.start:
            state = self._states[row.sequence_id]
            raise OracleError(f"{row.sequence_id}: a state after {state} tokens at {row.start}")
        if len(row.beside) != len(self.windows):
            raise OracleError(f"{row.sequence_id}: {len(row.beside)} tables beside the first")
        if any(end > len(table) * self.block_size for table in (row.block_ids, *row.beside)):
            raise OracleError(f"{row.sequence_id}: its block table does not reach {end}")
        in_flight = set().union(*self._broken.values())
        firsts = (0, *(max(0, row.start - window + 1) for window in self.windows))
        in_place = row.start + row.silent
        read = set(range(in_place)) if row.attention is None else self._keys_read(row)
        if row.attention is not None or self.attention_of(row.sequence_id) is not None:
            self._check_keys(row)
        contents = self._contents(row.sequence_id)
        broken = [
            self._read(row, group, position, contents[position], in_flight)
            for group, first in enumerate(firsts)
            for position in (read if group == 0 else range(first, in_place))
        ]
        return any(broken)

    def _keys_read(self, row: Row) -> set[int]:
        """Return the keys before a row that its tokens read by the plan."""
        tokens = range(row.start, row.start + row.count)
        return {key for token in tokens for key in self._keys_by_plan(row, token)} - set(tokens)

    def _keys_by_plan(self, row: Row, token: int) -> set[int]:
        """Return the keys that the token at a position reads, before itself, by the plan."""
        if row.attention is None:
            return set(range(token))
        block, size = token // self.block_size, self.block_size
        blocks = [*range(row.attention.sinks), *range(row.attention.first_read(block), block + 1)]
        return {key for b in blocks for key in range(b * size, (b + 1) * size) if key < token}

    def _check_keys(self, row: Row) -> None:
        """Compare what each token reads by the plan with what its request asked for."""
        asked, size = self.attention_of(row.sequence_id), self.block_size
        for token in range(row.start, row.start + row.count):
            allowed = set(range(token))
            if asked is not None:
                before = token // size * size - asked.tokens
                allowed = {key for key in allowed if key < asked.sink_tokens or key >= before}
            if self._keys_by_plan(row, token) != allowed:
                raise OracleError(f"position {token} of {row.sequence_id} reads other keys")

    def _contents(self, sequence_id: int) -> list[int]:
        """Return what the slots of a sequence hold: their exact prefix, and beyond the shared
        blocks of an attention window that window, too."""
        tags, asked = self.tags[sequence_id], self.attention_of(sequence_id)
        if asked is None:
            return tags
        shared = asked.shared_tokens(self.block_size)
        own = [tag_after(tag_after(tag, asked.tokens), asked.sink_tokens) for tag in tags[shared:]]
        return tags[:shared] + own

    def _read(self, row: Row, group: int, position: int, content: int, in_flight: set[int]) -> bool:
        found = self.slots[self._slot(row, group, position)]
        where = f"position {position} of {row.sequence_id} in group {group}"
        if found is None:
            raise OracleError(f"{where} was never written")
        if found is BROKEN:
            if row.sequence_id not in in_flight:
                raise OracleError(f"{where} comes from a step that failed")
            return True
        if found[0] != self._namespace(row.sequence_id):
            raise OracleError(f"{where} belongs to another namespace")
        if found[1:] != (group, content):
            raise OracleError(f"{where} holds another prefix")
        return False

    def _write(self, row: Row, written: set[int], *, is_broken: bool) -> None:
        known = len(self.tokens[row.sequence_id])
        for token in _drafts_of(row):
            self._append(row.sequence_id, token)
        namespace = self._namespace(row.sequence_id)
        contents = list(self._contents(row.sequence_id))
        del self.tokens[row.sequence_id][known:], self.tags[row.sequence_id][known:]
        for group in range(1 + len(self.windows)):
            for position in range(row.start + row.silent, row.start + row.count):
                slot = self._slot(row, group, position)
                if slot in written:
                    raise OracleError(f"{row.sequence_id}: a slot that another row writes too")
                written.add(slot)
                self.slots[slot] = BROKEN if is_broken else (namespace, group, contents[position])
        self.computed_tokens += row.count
        for sequence_id in (row.sequence_id, *row.samples):
            self._states[sequence_id] = row.start + row.count - row.drafts

    def _restore(self, copy: StateCopy) -> None:
        """Take a sequence's state from blocks, which must have that of its own prefix."""
        sequence_id, parts, tag = copy.sequence_id, list[Slot | None](), -1
        for index, block in enumerate(copy.blocks):
            slots = self.slots[block * self.block_size : (block + 1) * self.block_size]
            if len(set(slots)) != 1:
                raise OracleError(f"{sequence_id}: block {block} of its state was written to")
            parts += slots[:1]
            tag = parts[0][2] if parts[0] is not None else -1
            if parts[index] != (self._namespace(sequence_id), -1 - index, tag):
                raise OracleError(f"{sequence_id}: {parts} are no state of its namespace")
        if len(parts) != self.state_blocks or tag not in self.tags[sequence_id]:
            raise OracleError(f"{sequence_id}: {parts} are no state of its prefix")
        self._states[sequence_id] = self.tags[sequence_id].index(tag) + 1

    def _keep(self, copy: StateCopy, *, is_broken: bool = False) -> None:
        sequence_id = copy.sequence_id
        tag = self.tags[sequence_id][self._states[sequence_id] - 1]
        if len(copy.blocks) != self.state_blocks:
            raise OracleError(f"{sequence_id}: {copy.blocks} for its state")
        for index, block in enumerate(copy.blocks):
            part = (self._names[sequence_id], -1 - index, tag)
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self.slots[slot] = BROKEN if is_broken else part

    def _draw(self, sequence_id: int, row: Row, mask: Mask | None) -> tuple[SampledToken, ...]:
        if sequence_id not in self.begun:
            raise OracleError(f"sequence {sequence_id} draws and has not begun")
        begun, own = self.begun[sequence_id], self.tokens[sequence_id]
        if len(own) != row.start + row.count - row.drafts:
            raise OracleError(f"{sequence_id}: draws from another sequence's last position")
        logprob = None if begun.sampling.logprobs is None else -1.0
        drawn: list[SampledToken] = []
        drafts, masks = _drafts_of(row), (mask, *row.draft_masks)
        for draft in (*drafts, None):
            output, tag = len(own) - begun.prompt_tokens, self.tags[sequence_id][-1]
            sample, vocab = begun.sample_index, self.vocab_size
            now = masks[len(drawn)] if len(drawn) < len(masks) else None
            if mask is not None and now is None:
                raise OracleError(f"{sequence_id}: a draft without a mask behind it")
            token = next_token(tag, begun.sampling, sample, output, vocab, now)
            if output < len(self.words):
                token = self.words[output]
            self._append(sequence_id, token)
            drawn.append(SampledToken(token, logprob))
            if token != draft:
                break
        return tuple(drawn)

    def _next_tokens(self, row: Row) -> tuple[SampledToken, ...]:
        following = [*(row.token_ids or ())[1:]]
        if row.next_token_id is not None:
            following.append(row.next_token_id)
        return tuple(SampledToken(token, -1.0) for token in following)

    # -- internals ----------------------------------------------------------------------------

    def _begin(self, begun: BegunSequence) -> None:
        if begun.sequence_id in self.begun:
            raise OracleError(f"sequence {begun.sequence_id} was begun twice")
        self.begun[begun.sequence_id] = begun
        self._states[begun.sequence_id] = 0
        self._names[begun.sequence_id] = self._namespace(begun.sequence_id)
        self.tokens[begun.sequence_id] = []
        self.tags[begun.sequence_id] = []
        for token in begun.token_ids:
            self._append(begun.sequence_id, token)

    def _append(self, sequence_id: int, token: int) -> None:
        tags = self.tags[sequence_id]
        tags.append(tag_after(tags[-1] if tags else 0, token))
        self.tokens[sequence_id].append(token)

    def _forget(self, sequence_id: int) -> None:
        if self.begun.pop(sequence_id, None) is None:
            raise OracleError(f"sequence {sequence_id} ended and had not begun")
        del self.tokens[sequence_id], self.tags[sequence_id], self._states[sequence_id]
        del self._names[sequence_id]

    def _copy(self, copy: BlockCopy) -> None:
        if copy.src == copy.dst or not 0 < copy.tokens <= self.block_size:
            raise OracleError(f"{copy} copies nothing")
        src, dst, size = copy.src * self.block_size, copy.dst * self.block_size, self.block_size
        kept = self.slots[src : src + copy.tokens]
        self.slots[dst : dst + size] = kept + [None] * (size - copy.tokens)

    def _slot(self, row: Row, group: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        block_id = (row.block_ids, *row.beside)[group][block]
        if block_id < 0:
            raise OracleError(f"{row.sequence_id}: a hole at {position} in group {group}")
        return block_id * self.block_size + offset

    def _namespace(self, sequence_id: int) -> bytes:
        return b"" if self.namespace_of is None else self.namespace_of(sequence_id)

    def _check_groups(self, plan: StepPlan) -> None:
        for group in plan.groups:
            rows = plan.rows[group.first_row : group.end_row]
            if len(rows) < 2 or group.end_block <= group.first_block:
                raise OracleError(f"{group} shares nothing")
            shared = list(rows[0].block_ids[: group.end_block])
            for row in rows:
                if list(row.block_ids[: group.end_block]) != shared:
                    raise OracleError(f"{group}: rows with different blocks")
                if group.end_block * self.block_size > row.start:
                    raise OracleError(f"{group}: a block that is not in place yet")
            for tables in zip(*(row.beside for row in rows), strict=True):
                for entries in zip(*(t[: group.end_block] for t in tables), strict=True):
                    if len({block_id for block_id in entries if block_id >= 0}) > 1:
                        raise OracleError(f"{group}: rows with different window blocks")
