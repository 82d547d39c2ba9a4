"""Who waits for a twin: a request whose prefix another that runs is computing already (rule 11).

Each sequence that waits has one leader, which says from how many computed tokens on it may go on;
a leader that ends, is preempted or gets no turn lets its followers go. It allocates nothing and
preempts nobody; only the scheduler calls it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from engine.api import Namespace
from engine.cache import TreeMatch
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.sequence import Sequence, common_tokens

LEADER_STALLS_MAX = 8
"""Steps without headway after which a leader's followers go on by themselves."""


class PrefixSharing:
    """`held`: those that wait, outside the line, to which they go back."""

    def __init__(self, line: RequestQueue, block_size: int) -> None:
        self._line = line
        self._size = block_size
        self.held: dict[int, Sequence] = {}

    def holds(self, sequence: Sequence, found: TreeMatch, running: Iterable[Sequence]) -> bool:
        """Should it wait for one of `running` that is computing what it was not `found`? Then it
        leaves the line. O(running), and O(log blocks) for each that begins alike."""
        size, target = self._size, found.cached_tokens
        if sequence.work.request.prompt_logprobs is not None or not sequence.is_patient:
            return False
        if target >= (len(sequence.tokens) - 1) // size * size:
            return False  # every whole block it could use is there
        namespace, best = sequence.work.request.grant.namespace, None
        missing = _block_at(sequence, target, size)
        for other in running:
            # Nearly all differ in the first block that is missing, which a glance tells.
            if _block_at(other, target, size) != missing or not self._writes(other, namespace):
                continue
            common = common_tokens(sequence, other, size)
            if common > target:
                best, target = other, common
                missing = _block_at(sequence, target, size)
        if best is None:
            return False
        best.followers.append((target, sequence))
        sequence.leader = best
        self._line.remove(sequence)
        self.held[sequence.sequence_id] = sequence
        return True

    def drop(self, sequence: Sequence) -> None:
        """It has ended, whether it waited here or not."""
        if self.held.pop(sequence.sequence_id, None) is not None and sequence.leader is not None:
            followers = sequence.leader.followers
            followers[:] = [pair for pair in followers if pair[1] is not sequence]
            sequence.leader = None

    def reached(self, leader: Sequence) -> None:
        """Blocks of it have become findable: followers that have theirs may go on."""
        if leader.followers and leader.table is not None:
            reached = leader.table.kv_tokens
            ready = [twin for target, twin in leader.followers if target <= reached]
            leader.followers = [pair for pair in leader.followers if pair[0] > reached]
            self._resume(ready)

    def let_go(self, leader: Sequence) -> None:
        """It computes no further: whoever waits for it waits in the line again."""
        twins = [twin for _, twin in leader.followers]
        leader.followers = []
        self._resume(twins)

    def watch(self, running: Iterable[Sequence], moving: Container[int]) -> None:
        """Nobody waits long for one that gets no room or no turn. `moving`: ids with a slice."""
        for leader in running:
            if not leader.followers or leader.table is None:
                continue
            moves = leader.sequence_id in moving or leader.computed > leader.table.kv_tokens
            leader.stalled_steps = 0 if moves else leader.stalled_steps + 1
            if leader.stalled_steps >= LEADER_STALLS_MAX:
                for _, twin in leader.followers:
                    twin.is_patient = False
                self.let_go(leader)

    def _writes(self, other: Sequence, namespace: Namespace) -> bool:
        """Will this running sequence still make whole blocks of its prompt findable?"""
        table = other.table
        if table is None or not table.write or table.namespace != namespace:
            return False
        return table.kv_tokens // self._size < len(other.work.request.tokens) // self._size

    def _resume(self, twins: Iterable[Sequence]) -> None:
        for twin in twins:
            twin.leader = None
            del self.held[twin.sequence_id]
            self._line.add(twin)


def _block_at(sequence: Sequence, tokens: int, size: int) -> list[int]:
    """The tokens of its block in which token number `tokens` stands."""
    first = tokens // size * size
    return sequence.tokens[first : first + size]
