"""In-batch prefix sharing: a request waits while a running sequence computes its prefix.

That is rule *Single computation* of the cache. Each waiting sequence has one leader and continues
once the leader has computed a known number of tokens. A leader that ends, is preempted or makes no
progress releases its followers. This module allocates nothing and preempts nothing; only the
scheduler calls it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from engine.api import Namespace
from engine.cache import TreeMatch
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.sequence import Sequence, common_tokens

LEADER_STALLS_MAX = 8
"""Steps without progress after which a leader's followers are released."""


class PrefixSharing:
    """The sequences that wait for a leader.

    `waiting`: these sequences by id. They are outside the request queue and return to it when
    released.
    """

    def __init__(self, queue: RequestQueue, block_size: int) -> None:
        self._queue = queue
        self._size = block_size
        self.waiting: dict[int, Sequence] = {}

    def wait_for_leader(
        self, sequence: Sequence, found: TreeMatch, running: Iterable[Sequence]
    ) -> bool:
        """Make `sequence` wait if one of `running` computes tokens it needs; return whether it
        waits.

        `found`: the sequence's cached prefix. A sequence that waits leaves the request queue.
        O(running), and O(log blocks) for each running sequence with the same next block.
        """
        leader, target_tokens = self.leader_of(sequence, found, running)
        if leader is None:
            return False
        leader.followers.append((target_tokens, sequence))
        sequence.leader = leader
        self._queue.remove(sequence)
        self.waiting[sequence.sequence_id] = sequence
        return True

    def leader_of(
        self, sequence: Sequence, found: TreeMatch | None, running: Iterable[Sequence]
    ) -> tuple[Sequence | None, int]:
        """Return the one of `running` that is computing most of the tokens that `sequence` needs
        behind its cached prefix, and up to where; None and 0 if none is. Costs what
        `wait_for_leader` does.
        """
        size, target_tokens = self._size, 0 if found is None else found.cached_tokens
        if sequence.parent.request.prompt_logprobs is not None or not sequence.may_wait:
            return None, 0
        usable = sequence.shared_tokens((len(sequence.tokens) - 1) // size * size, size)
        if target_tokens >= usable:
            return None, 0  # every whole block it could use is cached
        namespace, best = sequence.parent.request.grant.namespace, None
        missing_block = _block_at(sequence, target_tokens, size)
        for other in running:
            whole = len(other.parent.request.tokens) // size * size
            if other.table is None or other.table.kv_tokens >= whole:
                continue  # it commits no more of its prompt
            # Nearly all sequences differ in the first missing block: compare that one first.
            if _block_at(other, target_tokens, size) != missing_block or not self._will_commit_more(
                other, namespace
            ):
                continue
            common = min(usable, common_tokens(sequence, other, size))
            common = other.shared_tokens(common, size)
            # Up to what the other has reached there is nothing to wait for.
            if common > max(target_tokens, other.table.kv_tokens):
                best, target_tokens = other, common
                missing_block = _block_at(sequence, target_tokens, size)
        return best, target_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, whether it waits here or not."""
        if self.waiting.pop(sequence.sequence_id, None) is not None and sequence.leader is not None:
            followers = sequence.leader.followers
            followers[:] = [pair for pair in followers if pair[1] is not sequence]
            sequence.leader = None

    def resume_reached(self, leader: Sequence) -> None:
        """Release the followers after the leader has committed their prefix."""
        if leader.followers and leader.table is not None:
            reached = leader.table.kv_tokens
            ready = [
                follower for target_tokens, follower in leader.followers if target_tokens <= reached
            ]
            leader.followers = [pair for pair in leader.followers if pair[0] > reached]
            self._resume(ready)

    def release_followers(self, leader: Sequence) -> None:
        """Return all followers of a leader that computes no further to the request queue."""
        followers = [follower for _, follower in leader.followers]
        leader.followers = []
        self._resume(followers)

    def release_stalled(self, running: Iterable[Sequence], scheduled: Container[int]) -> None:
        """Release the followers of leaders that make no progress. `scheduled`: ids that have a
        slice. O(running), and O(1) if none waits.
        """
        if not self.waiting:
            return
        for leader in running:
            if not leader.followers or leader.table is None:
                continue
            has_progress = (
                leader.sequence_id in scheduled
                or leader.load is not None
                or leader.computed > leader.table.kv_tokens
            )
            leader.stalled_steps = 0 if has_progress else leader.stalled_steps + 1
            if leader.stalled_steps >= LEADER_STALLS_MAX:
                for _, follower in leader.followers:
                    follower.may_wait = False
                self.release_followers(leader)

    def _will_commit_more(self, other: Sequence, namespace: Namespace) -> bool:
        """Return whether a running sequence will make further whole blocks of its prompt
        findable.
        """
        table = other.table
        if table is None or not table.write or table.namespace != namespace:
            return False
        # what is computed under an attention window is its own
        tokens = other.shared_tokens(len(other.parent.request.tokens), self._size)
        return table.kv_tokens // self._size < tokens // self._size

    def _resume(self, followers: Iterable[Sequence]) -> None:
        for follower in followers:
            follower.leader = None
            del self.waiting[follower.sequence_id]
            self._queue.add(follower)


def _block_at(sequence: Sequence, tokens: int, size: int) -> list[int]:
    """Return the tokens of the sequence's block that contains position `tokens`."""
    first = tokens // size * size
    return sequence.tokens[first : first + size]
