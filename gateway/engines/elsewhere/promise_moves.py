"""Moves promises between engines elsewhere: off one that drains, and on from one that is gone.

The gateway that has made a promise moves it: its books know the prefix by a digest, an engine that
has it tells the tokens, and another one adopts it by a request that is no client's. It fetches the
copies, computes what is missing, and grants the lease for the time that is left. Then the books
change the engine of the promise, once, and the engine that drains erases the lease, on its disk
too. At each instant the books name one engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final, Literal

from msgspec.structs import replace

from engine.api import (
    AT_REST,
    AtRest,
    CacheGrant,
    Clock,
    Finished,
    LeaseFound,
    LeaseRequest,
    Namespace,
    Quota,
    Request,
    Started,
)
from engine.client.client import EngineConnection
from engine.errors import EngineError
from engine.protocol import unpack_tokens
from gateway.caching.contract import ContractManager
from gateway.caching.namespaces import fidelity_in
from gateway.caching.prefix_index import IndexedPrefix, digest_prefixes
from gateway.engines.replica import Replica
from gateway.engines.served_models import ServedModel, ServedModels
from gateway.errors import error_location
from gateway.periodic_task import PeriodicTask

ROUND_S: Final = 1.0
GRACE_S: Final = 10.0
"""Longer than a network that is gone for a moment, and than an engine takes to start again."""
RETRY_S: Final = 60.0
"""Seconds after which what was not found is looked for again."""
MOVES_MAX: Final = 4
"""Promises of one engine that move at a time: as many fetches as an engine has."""
HOMES_MAX: Final = 3
"""Engines that are asked, one after another, to take a promise over."""
POLL_S: Final = 0.05
WAIT_S: Final = 30.0
"""Longest time for which an adoption waits to begin."""

Outcome = Literal["moved", "found", "lacking", "no_room", "failed", "ended"]
"""`found`: moved, off an engine that is gone. `lacking`: no engine has it. `no_room`: none may
promise it. `ended`: it was erased, or is over."""
Terms = Callable[[ServedModel, int, int], tuple[Quota, AtRest]]
Log = Callable[[str, dict[str, object]], None]


class PromiseMoves:
    """The moves of one gateway's promises. Belongs to its event loop."""

    def __init__(
        self,
        models: ServedModels,
        contracts: ContractManager,
        terms: Terms,
        new_id: Callable[[], str],
        count: Callable[[str, Outcome], None],
        clock: Clock,
        log: Log,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        """`terms`: see `CacheUsage.terms_of`. `count`: is told each move's end, with its model.
        `grace_s`: for so long an engine may be away before its promises are looked for."""
        self._models, self._contracts, self._terms = models, contracts, terms
        self._new_id, self._count = new_id, count
        self._clock, self._log, self._grace_s = clock, log, grace_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._emptying: set[str] = set()
        """Epochs of the engines that are being emptied."""
        self._gone: dict[str, float] = {}
        """When an epoch was first found gone, or looked for in vain."""
        self._live, self._due_at_s = set[str](), -inf
        """The engines that were there at the last look, and when the next one is due at the latest.
        """
        self._owed: dict[str, dict[tuple[Namespace, str], IndexedPrefix]] = {}
        """By replica: moved leases that it could not be told to erase."""
        self._rounds = PeriodicTask("promise_moves", self.look, ROUND_S, log, clock)

    def open(self) -> None:
        """Be called for each engine that drains from now on."""
        for model in self._models:
            model.replicas.drains = self._begin_of(model)

    def start(self) -> None:
        """Look each second for promises of engines that are gone."""
        self.open()
        self._rounds.start()

    async def close(self) -> None:
        """Stop; what has not moved stays where it is in the books."""
        await self._rounds.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def look(self) -> None:
        """Look for the promises of engines that are gone, and erase what is owed."""
        for model in self._models:
            if any(one.is_elsewhere for one in model.replicas):
                await self._erase_owed(model)
        now_s, due, gone = self._clock(), list[IndexedPrefix](), dict[str, float]()
        live = {one.info.epoch for model in self._models for one in model.replicas if one.info}
        if live == self._live and now_s < self._due_at_s:
            return
        for entry in self._contracts.entries.promised(now_s):
            epoch = entry.epoch
            if self._contracts.is_alive(epoch) or epoch in self._emptying:
                continue
            gone[epoch] = self._gone.get(epoch, now_s + self._grace_s)
            if now_s >= gone[epoch]:
                due.append(entry)
        outcomes = Counter[Outcome]()
        for entry in due:
            gone[entry.epoch] = now_s + RETRY_S
            of = self._models.of_namespace(entry.key[0])
            if of is not None and any(one.is_elsewhere for one in of.replicas):
                outcome = await self._find(of, entry)
                outcomes[outcome] += 1
                self._note_end(of, "found" if outcome == "moved" else outcome)
        self._live, self._gone = live, gone
        self._due_at_s = min(gone.values(), default=now_s + RETRY_S)
        if outcomes["moved"]:
            self._log("promises_found", dict(outcomes.items()))

    def _note_end(self, model: ServedModel, outcome: Outcome) -> None:
        model.replicas.promise_moves[outcome] += 1
        self._count(model.name, outcome)

    # -- an engine that drains ------------------------------------------------------------------

    def _begin_of(self, model: ServedModel) -> Callable[[Replica, EngineConnection], None]:
        def begin(replica: Replica, engine: EngineConnection) -> None:
            task = asyncio.create_task(self._empty_safely(model, replica, engine))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return begin

    async def _empty_safely(
        self, model: ServedModel, source: Replica, engine: EngineConnection
    ) -> None:
        """Log what is a fault of ours."""
        try:
            await self._empty(model, source, engine)
        except Exception as error:
            self._log("background_failed", {"task": "promise_moves", **error_location(error)})

    async def _empty(self, model: ServedModel, source: Replica, engine: EngineConnection) -> None:
        """Move what this gateway has promised at an engine, also what its last requests promise;
        then let it go."""
        info, began_s = engine.info, self._clock()
        assert info is not None, "it has served"
        self._emptying.add(info.epoch)
        outcomes, tried = Counter[Outcome](), set[IndexedPrefix]()
        try:
            while True:
                due = [
                    one
                    for one in self._contracts.entries.promised(self._clock())
                    if one.epoch == info.epoch and one not in tried
                ]
                tried.update(due)
                await self._move_all(model, source, engine, due, outcomes)
                if not due and (not engine.in_flight or source.engine is not engine):
                    return
                await asyncio.sleep(0 if due else POLL_S)
        finally:
            self._emptying.discard(info.epoch)
            engine.let_go()
            took_s = round(self._clock() - began_s, 2)
            if outcomes:
                self._log(
                    "promises_moved",
                    {"replica": source.name, "s": took_s, **dict(outcomes.items())},
                )

    async def _move_all(
        self,
        model: ServedModel,
        source: Replica,
        engine: EngineConnection,
        entries: Iterable[IndexedPrefix],
        outcomes: Counter[Outcome],
    ) -> None:
        left = iter(entries)

        async def work() -> None:
            for entry in left:
                outcome = await self._move(model, source, engine, entry)
                outcomes[outcome] += 1
                self._note_end(model, outcome)

        async with asyncio.TaskGroup() as group:
            for _ in range(MOVES_MAX):
                group.create_task(work())

    async def _move(
        self, model: ServedModel, source: Replica, engine: EngineConnection, entry: IndexedPrefix
    ) -> Outcome:
        """Move one promise off an engine that drains."""
        (namespace, digest), since = entry.key, self._contracts.entries.erasures
        try:
            found = await engine.find_lease(namespace, digest.hex())
        except EngineError:
            return "failed"
        if not found.token_ids:  # another gateway may have moved it
            return await self._find(model, entry, but=source)
        homes = model.replicas.homes(self._request(model, entry, found), but=source)
        outcome = await self._adopt(model, entry, found, homes[:HOMES_MAX], source, since)
        if outcome == "moved":
            try:
                await engine.erase(namespace, lease_id=digest.hex())
            except EngineError:
                self._owed.setdefault(source.name, {})[namespace, digest.hex()] = entry
        return outcome

    async def _erase_owed(self, model: ServedModel) -> None:
        """Have an engine that is back erase what it could not be told to: its disk may promise it
        still. What is promised there again stays."""
        for replica in model.replicas:
            if not replica.ready() or replica.name not in self._owed:
                continue
            for (namespace, lease_id), entry in self._owed.pop(replica.name).items():
                if self._models.of_namespace(namespace) is not model:
                    self._owed.setdefault(replica.name, {})[namespace, lease_id] = entry
                elif replica.info is not None and entry.epoch != replica.info.epoch:
                    try:
                        await replica.running().erase(namespace, lease_id=lease_id)
                    except EngineError:
                        self._owed.setdefault(replica.name, {})[namespace, lease_id] = entry

    # -- an engine that is gone -----------------------------------------------------------------

    async def _find(
        self, model: ServedModel, entry: IndexedPrefix, but: Replica | None = None
    ) -> Outcome:
        """Have the engine that keeps most of a promised prefix promise it: a copy that it got by
        requests of its own, or what it has taken over of the engine before. No bytes move."""
        (namespace, digest), since = entry.key, self._contracts.entries.erasures
        ready = [one for one in model.replicas if one is not but and one.ready()]

        async def ask(replica: Replica) -> LeaseFound:
            engine = replica.engine
            if not isinstance(engine, EngineConnection):
                return LeaseFound(0)
            try:
                return await engine.find_lease(namespace, digest.hex())
            except EngineError:
                return LeaseFound(0)

        answers = await asyncio.gather(*map(ask, ready))
        best = max(zip(answers, ready, strict=True), key=_kept_bytes, default=None)
        if best is None or not best[0].token_ids:
            return "lacking"
        found, home = best
        return await self._adopt(model, entry, found, [home], None, since)

    # -- both -----------------------------------------------------------------------------------

    async def _adopt(
        self,
        model: ServedModel,
        entry: IndexedPrefix,
        found: LeaseFound,
        homes: Sequence[Replica],
        source: Replica | None,
        since: int,
    ) -> Outcome:
        """Have the first of `homes` that can adopt a promise whole; note it in the books. `since`:
        the erasures that were known when its tokens were asked for."""
        entries, (namespace, digest) = self._contracts.entries, entry.key
        outcome: Outcome = "no_room" if homes else "failed"
        request = self._request(model, entry, found)
        tokens = request.tokens
        if len(tokens) == entry.tokens and digest_prefixes(tokens, [len(tokens)]) != {
            len(tokens): digest
        }:
            return "lacking"
        for home in homes:
            before = entry.epoch
            if not request.grant.leases or entries.was_erased(since, namespace, [entry.key]):
                return "ended"
            try:
                if not await self._has_room(home, request):
                    continue
                outcome = "failed"
                epoch = await _run(model, request, home, source)
            except EngineError:
                outcome = "failed"
                continue
            if entries.find(entry.key) is not entry or entry.epoch != before:
                return "ended"
            if epoch and self._contracts.is_alive(epoch):
                entry.epoch, entry.losses = epoch, self._contracts.losses(namespace)
                entries.note_change(entry)
                return "moved"
            request = replace(request, request_id=self._new_id())
        return outcome

    async def _has_room(self, home: Replica, request: Request) -> bool:
        """Return whether an engine may promise all of a request now, as far as it can say."""
        grant = request.grant
        peeked = await home.running().peek(grant.namespace, request.tokens, grant.quota)
        room = peeked.promisable_tokens
        return room is None or room >= len(request.tokens)

    def _request(self, model: ServedModel, entry: IndexedPrefix, found: LeaseFound) -> Request:
        """Return the request that adopts a promise, for the time that is left of it."""
        now_s, (namespace, digest) = self._clock(), entry.key
        tokens = unpack_tokens(found.token_ids)[: entry.tokens]
        leases = tuple(
            LeaseRequest(len(tokens), lease.retention, digest.hex(), lease.age_s(now_s))
            for lease in entry.leases.values()
            if lease.promised_until_s > now_s
        )
        quota, at_rest = self._terms(model, entry.owner, entry.origin.writer)
        at_rest = min(at_rest, found.at_rest, key=AT_REST.index)
        return Request(
            self._new_id(),
            tokens,
            max_tokens=0,
            grant=CacheGrant(
                namespace, quota, leases, fidelity=fidelity_in(namespace), at_rest=at_rest
            ),
            deadline_s=WAIT_S,
            adopts=True,
        )


async def _run(model: ServedModel, request: Request, home: Replica, source: Replica | None) -> str:
    """Have an engine adopt promises; return its epoch, "" if it did not grant all. Raises
    EngineError."""
    stream = model.replicas.hand_over(request, home, source)
    granted = False
    async for event in stream:
        if isinstance(event, Started):
            granted = all(one.outcome == "granted" for one in event.leases)
        elif isinstance(event, Finished) and event.ending == "done" and granted:
            return stream.epoch
    return ""


def _kept_bytes(one: tuple[LeaseFound, Replica]) -> int:
    return len(one[0].token_ids)
