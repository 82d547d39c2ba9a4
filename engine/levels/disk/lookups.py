"""Ask the disk which records it has of a request's prompt; what it finds is known in the tree.

A lookup reads the index of the disk alone. What it finds is known here from then on, so that a load
may bring it; what an erasure has met meanwhile is not taken. Only `disk_level` calls this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.api import FIDELITIES, CacheGrant, Namespace
from engine.cache.tree.prefix_tree import Node
from engine.levels.places import RunPlaces
from engine.levels.promises import KeptPromises
from engine.moves import Look, Looked, SlotFormat, Storage, StoredRun


class DiskLookups:
    """The looks that the disk has not answered, and the sequences whose look it has."""

    def __init__(
        self,
        places: RunPlaces,
        storage: Storage,
        promises: KeptPromises,
        next_id: Callable[[], int],
        tokens_min: int,
    ) -> None:
        """`tokens_min`: the least tokens beyond what is known for which the disk is asked."""
        self._places = places
        self._storage = storage
        self._promises = promises
        self._next_id = next_id
        self._tokens_min = tokens_min
        self._asked: dict[int, tuple[int, CacheGrant, Sequence[int], int]] = {}
        self._offers: dict[int, int] = {}
        self._answered: list[int] = []

    def __len__(self) -> int:
        return len(self._asked)

    def is_worth_it(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        here: int,
        now_s: float,
        tokens_min: int | None = None,
    ) -> bool:
        """Return whether the disk may have enough of a prompt beyond what the device (`here`) and
        the known copies have. `tokens_min`: what is enough, if not what it is for a disk. O(its
        runs).
        """
        size = self._places.run_tokens
        known = len(self._places.match(namespace, tokens, now_s)) * size
        least = self._tokens_min if tokens_min is None else tokens_min
        return _whole(tokens, size) - max(here, known) >= least

    def ask(
        self,
        sequence_id: int,
        grant: CacheGrant,
        tokens: Sequence[int],
        shared: SlotFormat | None = None,
        shared_s: float = 0.0,
    ) -> None:
        """Ask the disk for the longest prefix of a request's `tokens` that it has. `shared`,
        `shared_s`: as in `Look`."""
        call_id = self._next_id()
        epoch = self._places.epochs[grant.namespace]
        self._asked[call_id] = (sequence_id, grant, tokens, epoch)
        whole = _whole(tokens, self._places.run_tokens)
        wanted = tuple(tokens[:whole])
        self._storage.send(Look(call_id, grant.namespace, wanted, shared, shared_s))

    def take_offer(self, sequence_id: int) -> int:
        """Return how many tokens of a sequence's prompt the disk and a shared store have together,
        as its look has found; 0 where the shared store has no more."""
        return self._offers.pop(sequence_id, 0)

    def take_answered(self) -> list[int]:
        """Return the sequences whose look has been answered since the last call."""
        answered, self._answered = self._answered, []
        return answered

    def take(self, outcome: Looked, now_s: float) -> None:
        """Give nodes the records that a look has found. About 10 us a record."""
        found = self._asked.pop(outcome.call_id, None)
        if found is None:
            return
        sequence_id, grant, tokens, epoch = found
        self._answered.append(sequence_id)
        places, namespace, payer = self._places, grant.namespace, grant.quota.payer or grant.payer
        if epoch != places.epochs[namespace]:
            return
        parent: Node | None = None
        promised, until_s = list[Node](), list[float]()
        if outcome.shared_runs:
            runs_there = len(outcome.runs) + outcome.shared_runs
            self._offers[sequence_id] = runs_there * places.run_tokens
        runs = zip(*[iter(tokens)] * places.run_tokens, strict=False)
        for own, run in zip(runs, outcome.runs, strict=False):
            form = self._format_of(namespace, run)
            if form is None:
                break  # a miss: its store replaces it
            parent = places.know(namespace, payer, parent, own, run, form)
            if run.promise_s > 0:
                until_s.append(now_s + run.promise_s)
                promised.append(parent)
        self._promises.confirm(promised, until_s, now_s)

    def _format_of(self, namespace: Namespace, run: StoredRun) -> int | None:
        """Return the format of a record; None if this engine has it not, or if the namespace allows
        no such copy.
        """
        formats = self._places.formats
        form = formats.of_record(run.fidelity, run.slot_bytes)
        if form is None or formats.is_own(form):
            return form
        allowed = FIDELITIES.index(formats.allowed(namespace))
        return form if FIDELITIES.index(run.fidelity) <= allowed else None


def _whole(tokens: Sequence[int], run_tokens: int) -> int:
    """Return the tokens of a prompt's whole runs, without its last token at least."""
    return (len(tokens) - 1) // run_tokens * run_tokens
