"""Loads: the blocks of running requests that are being filled from host memory and disk.

A load brings the runs of one request in order. It ends when all are here, when one has failed (what
comes before it counts, what comes after it does not), at its deadline, or when its sequence is
released. Blocks and slots stay held until the last of its moves has ended, even after the load
has. This module chooses nothing: `levels` does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import NamedTuple

from engine.api import LEVELS_BELOW, LevelName, LoadMiss, Namespace, Payer
from engine.cache import BlockTable, PrefixCache
from engine.cache.tree.places import HostPlace
from engine.cache.tree.prefix_tree import Node
from engine.levels.level_use import LevelUse
from engine.levels.load_choice import LevelPace, LoadChoice, NotLoaded
from engine.levels.places import RunPlaces, level_of
from engine.moves import Fetch, Fetched, Move, Moved, Storage

FETCH_RECORDS_MAX = 32
"""Records that one fetch asks for."""
PART = 64
"""Runs in a row that are handed over while as many more of their load are under way."""
DEADLINE_S_MIN = 0.25
DEADLINE_FACTOR = 4.0
"""A load is given up after this many times its predicted time, and not before the least."""
SHARED_MIN = 64
SHARED_PART = 1 / 4
"""Of the most loads of a block under way, the part where several payers have requests, but not
below the least: what another one's next load waits behind. Steps, and so turns, are short then."""
TURNS_MIN = 8
"""Turns that a load has at least: with long prompts beside it a turn takes a step's time, and its
blocks wait for the steps in flight before it begins."""


class _State(Enum):
    FETCHING = 1
    READY = 2
    MOVING = 3
    DONE = 4
    FAILED = 5


@dataclass(slots=True, eq=False, repr=False)
class _Piece:
    """One run of a load: its node, the level it comes from, its slot and the format of that, the
    blocks it fills.
    """

    node: Node
    level: LevelName
    slot: int
    form: int
    block: int
    beside: tuple[int, ...]
    check: bytes
    is_damaged: bool = False
    state: _State = field(init=False)

    def __post_init__(self) -> None:
        self.state = _State.READY if self.level == "host" else _State.FETCHING


class LoadPlan(NamedTuple):
    """The copies of a request's prefix behind the first `first` runs, which the device has.

    `copies`: those that are worth loading, none where computing is no slower; `known`: how many
    there are.
    """

    first: int
    copies: Sequence[Node]
    known: int
    choice: LoadChoice


@dataclass(slots=True, eq=False, repr=False)
class Load:
    """The load of one sequence.

    `loaded`: the runs that are in place, counted from the first one, once it `is_ended`; `miss`:
    why not all are, and `missed`: the level that did not bring the next one, with its reason.
    `placed`: those that were handed over before its end; `done`: those that are in place so far.
    `ready`: its pieces whose slots are full, and which no move copies yet. `after_step`: it fills
    blocks only when this step has been collected, since a step in flight may still write to their
    former owner. `turns`: those since its beginning.
    """

    plan: LoadPlan
    held: BlockTable
    pieces: list[_Piece]
    after_step: int
    began_s: float
    is_ended: bool = False
    loaded: int = 0
    miss: LoadMiss = ""
    missed: tuple[LevelName, NotLoaded] | None = None
    placed: int = 0
    done: int = 0
    turns: int = 0
    payer: Payer = field(init=False)
    deadline_at_s: float = field(init=False)
    ready: deque[_Piece] = field(init=False)
    under_way: int = field(init=False)

    def __post_init__(self) -> None:
        self.payer = self.held.account.payer_account.payer  # its namespace may get another one
        allowed_s = max(DEADLINE_S_MIN, DEADLINE_FACTOR * self.plan.choice.load_s)
        self.deadline_at_s = self.began_s + allowed_s
        self.ready = deque(piece for piece in self.pieces if piece.state is _State.READY)
        self.under_way = len(self.pieces)

    @property
    def namespace(self) -> Namespace:
        """Return the namespace of its sequence."""
        return self.held.namespace

    @property
    def first(self) -> int:
        """Return the index of its first run."""
        return self.plan.first

    @property
    def level(self) -> LevelName:
        """Return the slowest level that it comes from."""
        return max({piece.level for piece in self.pieces}, key=LEVELS_BELOW.index)

    def tokens_by_level(self, run_tokens: int, use: LevelUse) -> Counter[LevelName]:
        """Return the tokens that it brought, by the level they were on before its request came."""
        counts = Counter[LevelName]()
        for index, piece in enumerate(self.pieces[: self.loaded], start=self.first):
            counts[use.level_at(index * run_tokens, piece.level)] += run_tokens
        return counts

    def forms(self) -> set[int]:
        """Return the formats of the copies it brought."""
        return {piece.form for piece in self.pieces[: self.loaded]}

    def count_done(self) -> int:
        """Return how many of its leading runs are in place, as `done` says from now on. O(those
        that have come since the last call)."""
        pieces, done = self.pieces, self.done
        while done < len(pieces) and pieces[done].state is _State.DONE:
            done += 1
        self.done = done
        return done

    @property
    def is_whole_or_nothing(self) -> bool:
        """Return whether a part of it is of no use: window groups have what its end reads alone."""
        return bool(self.pieces[-1].beside)

    @property
    def copies(self) -> list[Node]:
        """Return the copies of the runs it brought."""
        return [piece.node for piece in self.pieces[: self.loaded]]


class Loads:
    """All loads whose moves have not ended.

    `part`: runs that are handed over at a time. `collected`: the last step that was. `is_shared`:
    several payers have requests. `loaded_blocks`: totals by level. `failed`: pieces that failed, by
    level; `damaged`: those of them whose bytes were not those that were written.
    """

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        storage: Storage | None,
        paces: dict[LevelName, LevelPace],
        next_id: Callable[[], int],
        verify_host: int,
        moves_max: int,
    ) -> None:
        """`moves_max`: most loads of one block under way at a time, over all requests."""
        self._cache = cache
        self._places = places
        self._storage = storage
        self._paces = paces
        self._next_id = next_id
        self._verify_host = verify_host
        self._moves_max = moves_max
        self._shared_max = min(moves_max, max(SHARED_MIN, int(moves_max * SHARED_PART)))
        self._names = [form.name for form in places.formats.formats]
        self.part = PART
        self.collected = 0
        self.is_shared = False
        self._loads: dict[Load, None] = {}
        self._moves: dict[int, tuple[Load, _Piece]] = {}
        self._moving = Counter[Payer]()
        self._fetches: dict[tuple[int, int], tuple[Load, _Piece]] = {}
        self._ended: list[Load] = []
        self._moved_from_host = 0
        self.loaded_blocks = Counter[LevelName]()
        self.failed = Counter[LevelName]()
        self.damaged = Counter[LevelName]()
        self.fetched = 0

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def moves(self) -> int:
        """Return the loads of one block that are under way."""
        return len(self._moves)

    def begin(
        self, plan: LoadPlan, table: BlockTable, after_step: int, now_s: float
    ) -> Load | None:
        """Begin to fill the entries of a table behind those that the plan says the device has.
        Return None if there is no slot for even one fetch. Only as many runs are loaded as slots
        could be had for. `after_step`: the last step that was launched before the table grew.
        """
        pieces = self._pieces(table, plan.first, plan.copies)
        if not pieces:
            return None
        held = self._cache.moves.hold_blocks(table, plan.first, now_s)
        load = Load(plan, held, pieces, after_step, now_s)
        self._loads[load] = None
        for piece in pieces:
            self._paces[piece.level].queued[piece.form] += 1
        self._fetch(load, [piece for piece in pieces if piece.level != "host"])
        return load

    def _pieces(self, table: BlockTable, first: int, copies: Sequence[Node]) -> list[_Piece]:
        """Return the pieces of a load, each with a slot that it holds."""
        on_host = [node.host for node in copies]
        hold = self._places.hold
        for host in filter(None, on_host):
            hold(host.slot)  # before a fetch takes it for itself
        payer, pieces = table.account.payer_account, list[_Piece]()
        for node, index, place in zip(copies, count(first), on_host, strict=False):
            if place is not None:
                blocks = self._targets(table, index, has_windows=place.has_windows)
                check = self._check_of(place)
                pieces.append(_Piece(node, "host", place.slot, place.form, *blocks, check))
                continue
            record, slot = node.record, None
            if record is not None:
                slot = self._places.take_slot(
                    payer.payer, table.namespace, record.form, payer.quota
                )
            if record is None or slot is None:
                break
            blocks = self._targets(table, index, has_windows=record.has_windows)
            pieces.append(_Piece(node, level_of(node), slot, record.form, *blocks, b""))
        for host in filter(None, on_host[len(pieces) :]):
            self._places.release(host.slot)
        return pieces

    def _targets(
        self, table: BlockTable, index: int, *, has_windows: bool
    ) -> tuple[int, tuple[int, ...]]:
        """Return the blocks that a place fills: group 0's, and if it has them those of the window
        groups; a hole there is not filled."""
        return table.blocks[index], tuple(row[index] for row in table.beside if has_windows)

    def give_up(self, load: Load) -> None:
        """End the load of a released sequence; moves that have not begun do not begin. Its blocks
        are freed when its moves end."""
        if not load.is_ended:
            self._end(load, 0)

    def void(self, namespace: Namespace) -> None:
        """End the loads of a namespace: what they bring is dropped."""
        for load in list(self._loads):
            if load.namespace == namespace and not load.is_ended:
                self._end(load, 0)
                self._ended.append(load)

    def next_moves(self) -> list[Move]:
        """Return the moves to submit now: those of the payer with fewest under way first, and of
        its loads the oldest, so that no payer waits for the loads of another. O(loads, these).
        """
        moves: list[Move] = []
        room = (self._shared_max if self.is_shared else self._moves_max) - len(self._moves)
        if not self._loads or room <= 0:
            return moves
        ready: dict[Payer, deque[Load]] = {}
        for load in self._loads:
            if load.ready and not load.is_ended and load.after_step <= self.collected:
                ready.setdefault(load.payer, deque()).append(load)
        while ready and len(moves) < room:
            payer = min(ready, key=self._moving.__getitem__)
            load = ready[payer][0]
            count = 1 if len(ready) > 1 else min(room - len(moves), len(load.ready))
            moves += self._moves_of(load, count)
            self._moving[payer] += count
            if not load.ready:
                ready[payer].popleft()
                if not ready[payer]:
                    del ready[payer]
        return moves

    def _moves_of(self, load: Load, count: int) -> list[Move]:
        """Return the next `count` moves of a load, which are under way from now on."""
        names, moves = self._names, list[Move]()
        for _ in range(count):
            piece = load.ready.popleft()
            piece.state = _State.MOVING
            move_id = self._next_id()
            self._moves[move_id] = (load, piece)
            what = piece.slot, piece.check, names[piece.form], piece.beside
            moves.append(Move(move_id, "load", piece.block, *what))
        return moves

    def take(self, outcomes: Sequence[Moved]) -> list[Moved]:
        """Take the outcomes of moves that were loads; return the others. O(these)."""
        others, ended = list[Moved](), Counter[Payer]()
        pace = self._paces["host"]
        for outcome in outcomes:
            found = self._moves.pop(outcome.move_id, None)
            if found is None:
                others.append(outcome)
                continue
            load, piece = found
            ended[load.payer] += 1
            if outcome.is_done:
                pace.record_block(outcome.seconds, piece.form)
                place = piece.node.host
                if place is not None and piece.check and piece.check == place.check:
                    place.is_unverified = False
            piece.is_damaged = outcome.is_damaged
            self._piece_ended(load, piece, is_done=outcome.is_done)
        self._moving -= ended
        return others

    def fetched_one(self, outcome: Fetched) -> None:
        """Take the outcome of one record's fetch: its slot is full, or it has failed."""
        found = self._fetches.pop((outcome.call_id, outcome.record_id), None)
        if found is None:
            return
        load, piece = found
        if not outcome.is_done:
            piece.is_damaged = outcome.is_damaged
            self._piece_ended(load, piece, is_done=False)
            return
        self.fetched += outcome.level == "disk"
        self._paces[outcome.level].record_block(outcome.seconds, piece.form)
        node = piece.node
        if node.record is not None:
            node.record.is_remote = outcome.level == "remote"
        if node.record is not None and node.parent is not None and node.host is None:
            self._places.hold(piece.slot)  # one for the node, one for this load
            self._places.give(node, piece.slot, outcome.check)
        if load.is_ended:
            self._let_go(load, piece)
        else:
            piece.state = _State.READY
            load.ready.append(piece)

    def take_parts(self) -> list[Load]:
        """Return the loads under way of which `part` more runs are in place; `placed` counts these.
        What is done of a long load is committed while the rest is copied. O(pieces of loads).
        """
        found = []
        for load in self._loads:
            left = len(load.pieces) - load.placed
            if load.is_ended or left < 2 * self.part or load.is_whole_or_nothing:
                continue
            done = load.count_done()
            if done - load.placed >= self.part:
                self._cache.moves.unhold_first(load.held, done - load.placed)
                load.placed = done
                found.append(load)
        return found

    def take_ended(self, now_s: float) -> list[Load]:
        """Return the loads that have ended since the last call, by success, failure or deadline;
        forget those whose moves have ended too.
        """
        ended, self._ended = self._ended, []
        for load in list(self._loads):
            if not load.is_ended:
                done = load.count_done()
                load.turns += 1
                is_late = now_s >= load.deadline_at_s and load.turns > TURNS_MIN
                is_cut = done < len(load.pieces) and load.pieces[done].state is _State.FAILED
                if done == len(load.pieces) or is_cut or is_late:
                    if done < len(load.pieces):
                        self._note_miss(load, load.pieces[done], is_cut=is_cut)
                    self._end(load, done)
                    ended.append(load)
            if load.is_ended and not load.under_way:
                del self._loads[load]
                self._cache.moves.unhold(load.held)
        return ended

    # -- internals ----------------------------------------------------------------------------

    def _check_of(self, place: HostPlace) -> bytes:
        """Return the digest to verify: for one of so many loads from host memory, and for the first
        one of what another engine has left there."""
        self._moved_from_host += 1
        is_next = self._moved_from_host % self._verify_host == 0
        return place.check if is_next or place.is_unverified else b""

    def _fetch(self, load: Load, pieces: list[_Piece]) -> None:
        for start, end in _fetches_of(pieces):
            some = pieces[start:end]
            call_id = self._next_id()
            for piece in some:
                self._fetches[call_id, piece.node.record_id] = (load, piece)
            records = tuple(piece.node.record_id for piece in some)
            assert self._storage is not None, "records come from a storage"
            slots = tuple(piece.slot for piece in some)
            size = self._places.formats.formats[some[0].form].slot_bytes
            self._storage.send(Fetch(call_id, load.namespace, records, slots, size))

    def _note_miss(self, load: Load, piece: _Piece, *, is_cut: bool) -> None:
        """Note why a load ends before a piece: that has failed (`is_cut`), or is late."""
        load.miss = "damaged" if piece.is_damaged else "level_failed"
        self.failed[piece.level] += not is_cut
        why: NotLoaded = "failed" if is_cut else "late"
        load.missed = piece.level, "damaged" if piece.is_damaged else why

    def _end(self, load: Load, loaded: int) -> None:
        load.is_ended, load.loaded = True, loaded
        load.ready.clear()
        for piece in load.pieces[:loaded]:
            self.loaded_blocks[piece.level] += 1
        for piece in load.pieces[loaded:]:
            if piece.state is _State.READY:  # it was never begun
                piece.state = _State.FAILED
                self._let_go(load, piece)
        # A block that no move fills any more may be committed: a hold on it alone would pin a block
        # of the tree below unpinned ones.
        moving = [piece for piece in load.pieces[loaded:] if piece.state is _State.MOVING]
        filling = {block for piece in moving for block in (piece.block, *piece.beside)}
        self._cache.moves.unhold_except(load.held, filling)

    def _piece_ended(self, load: Load, piece: _Piece, *, is_done: bool) -> None:
        piece.state = _State.DONE if is_done else _State.FAILED
        if not is_done:
            self.failed[piece.level] += 1
            self.damaged[piece.level] += piece.is_damaged
            self._places.strike(piece.node, piece.slot)
        self._let_go(load, piece)

    def _let_go(self, load: Load, piece: _Piece) -> None:
        """Release the slot of a piece whose moves have ended, or will not begin."""
        self._paces[piece.level].queued[piece.form] -= 1
        self._places.release(piece.slot)
        load.under_way -= 1


def _fetches_of(pieces: Sequence[_Piece]) -> Iterator[tuple[int, int]]:
    """Yield the ends of the runs of pieces that one fetch asks for: each of one format."""
    start = 0
    for index in range(1, len(pieces) + 1):
        is_last = index == len(pieces) or pieces[index].form != pieces[start].form
        if is_last or index - start >= FETCH_RECORDS_MAX:
            yield start, index
            start = index
