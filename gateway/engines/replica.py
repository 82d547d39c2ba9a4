"""A replica: one engine of a served model, with its state, over a connection that comes and goes.

`Link` is what keeps the connection: a keeper of this process, or a connection to an engine
elsewhere. It hands each engine that serves to its replica. The replica is what jobs loop over, and
among which `gateway.engines.replicas` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final, Literal, Protocol

from engine.api import EngineInfo, EngineRole, Request
from engine.client.cache_event_totals import CacheEventTotals
from engine.client.client import Engine, EngineConnection
from engine.client.namespace_stats import NamespaceTable
from engine.client.request_stream import RequestStream
from engine.errors import EngineUnavailable
from engine.statistics import Stats
from gateway.caching.namespaces import owner_of

LOSSES_MAX: Final = 2
"""Requests that a replica may lose in a row before it rests."""
REST_S_MAX: Final = 30.0

ReplicaState = Literal["connecting", "ready", "draining", "drained", "lost", "wrong"]
"""`drained`: its connection ended after a drain. `wrong`: it answers and may not serve, for the
reason beside it."""


class Link(Protocol):
    """Keeps the connection to a replica's engine."""

    @property
    def restarts(self) -> int:
        """Number of engines that were lost."""

    def failure(self) -> str:
        """Return why no engine ever will serve; "" while one may."""

    def retry_after_s(self) -> float:
        """Return the seconds until the next engine may serve."""

    def start(self) -> None:
        """Keep a connection from now on."""

    async def wait_ready(self) -> None:
        """Wait until the first engine serves. Raises EngineError if none ever will."""

    def begin_drain(self) -> None:
        """Seek no further engine."""

    async def close(self) -> None:
        """End the connection, and what the link has started."""


class Replica:
    """One engine of a model. Belongs to the event loop."""

    def __init__(
        self,
        name: str = "",
        engine: Engine | None = None,
        judge: Callable[[EngineConnection, frozenset[str]], None] | None = None,
    ) -> None:
        """`name`: "" for the only replica of a model. `engine`: for tests and embedding, one that
        runs already. `judge`: called with an engine that died, and the ids of the requests in its
        last step."""
        self.name = name
        self.engine = engine
        """The engine that serves now, if there is one."""
        self.state: ReplicaState = "connecting" if engine is None else "ready"
        self.reason = ""
        """Why it is in this state, for operators."""
        self.link: Link | None = None
        self.is_draining = False
        self.rescue: Callable[[Replica, Request, RequestStream], bool] | None = None
        """Takes a request that the engine has lost over; set where there are other replicas."""
        self.joined: Callable[[Replica, EngineConnection], None] | None = None
        """Called with each engine that serves; set where there are other replicas."""
        self.returned: Callable[[Replica], None] | None = None
        """Called when an engine elsewhere is there, before it takes requests; may `hold_back`."""
        self.drains: Callable[[Replica, EngineConnection], None] | None = None
        """Called when its engine takes no requests any more and waits for what is to be moved: it
        calls `let_go` at the end."""
        self.address: tuple[str, int] | None = None
        """Where gateways and other engines reach it."""
        self.is_elsewhere = False
        """Whether the engine outlives this gateway, and can be away while the gateway serves."""
        self.is_held_back = False
        """Whether it takes no requests yet, although an engine is there."""
        self._failed, self._done = 0, 0
        self._rest_until_s = -inf
        self._judge = judge
        self._last_stats = Stats()

    @property
    def info(self) -> EngineInfo | None:
        """Description of the running engine; None without one."""
        return None if self.engine is None else self.engine.info

    @property
    def role(self) -> EngineRole:
        """What its keeper says that it is for."""
        return "any" if self.info is None else self.info.role

    @property
    def stats(self) -> Stats:
        """The latest heartbeat; without an engine that of the last one."""
        return self._last_stats if self.engine is None else self.engine.stats

    @property
    def namespaces(self) -> NamespaceTable:
        """Statistics of each namespace; empty without an engine."""
        return NamespaceTable() if self.engine is None else self.engine.namespaces

    @property
    def cache_events(self) -> CacheEventTotals:
        """Blocks that namespaces have lost and gained; empty without an engine."""
        return CacheEventTotals() if self.engine is None else self.engine.cache_events

    def ready(self) -> bool:
        """Return whether it accepts requests now."""
        engine = self.engine
        if engine is None or self.is_draining or self.is_held_back:
            return False
        return engine.ready()

    @property
    def condition(self) -> str:
        """Why it takes no requests, in a word for clients: its state, `lost` for an engine that is
        being lost."""
        return "lost" if self.state == "ready" and not self.ready() else self.state

    def describe(self) -> dict[str, object]:
        """Return its state, for operators, with the load of its latest heartbeat."""
        info, stats = self.info, self.stats
        return {
            "name": self.name,
            "state": self.state,
            "reason": self.reason,
            "role": self.role,
            "epoch": None if info is None else info.epoch,
            "losses": 0 if self.link is None else self.link.restarts,
            "running": stats.running,
            "waiting": stats.waiting,
            "blocks": stats.blocks,
            "free_blocks": stats.free_blocks,
        }

    def running(self, code: str = "not_ready") -> Engine:
        """Return the engine that serves now. Raises EngineUnavailable."""
        if self.engine is None:
            wait_s = 1.0 if self.link is None else self.link.retry_after_s()
            message = "The engine is starting."
            if self.is_elsewhere:
                message = f"The engine {self.name or 'elsewhere'} is {self.condition}."
            raise EngineUnavailable(code, message, wait_s)
        return self.engine

    async def drain(self, timeout_s: float) -> None:
        """Accept no new requests; let running ones finish within `timeout_s`."""
        self.is_draining = True
        if self.link is not None:
            self.link.begin_drain()
        if self.engine is not None:
            await self.engine.drain(timeout_s)

    def hurry(self) -> None:
        """Wait for answers of its engine only briefly from now on, since the gateway closes."""
        if isinstance(self.engine, EngineConnection):
            self.engine.hurry()

    async def close(self) -> None:
        """End the link, and with it all streams."""
        if self.link is not None:
            await self.link.close()

    # -- called by its link -------------------------------------------------------------------

    def hold(self, engine: EngineConnection) -> None:
        """Take an engine that serves now."""
        engine.cache_events.group_by(owner_of)
        if self.rescue is not None:
            engine.rescue = partial(self.rescue, self)
        assert engine.info is not None
        self.engine, self.state, self.reason = engine, "ready", ""
        self.is_held_back = False
        if self.joined is not None:
            self.joined(self, engine)
        if self.returned is not None:
            self.returned(self)

    def begin_move(self, engine: EngineConnection) -> None:
        """Have what is promised there moved: the engine drains."""
        if self.drains is None:
            engine.let_go()
        else:
            self.drains(self, engine)

    def release(self, engine: EngineConnection, reason: str) -> None:
        """Let an engine go whose connection is closed."""
        self._last_stats = engine.stats
        self.engine = None
        if self.state == "draining":
            self.state, self.reason = "drained", "It has ended after its drain."
        else:
            self.state, self.reason = "lost", reason

    def record_death(self, engine: EngineConnection, in_step: frozenset[str]) -> None:
        """Judge the requests in the last step of an engine that has died."""
        if self._judge is not None:
            self._judge(engine, in_step)

    # -- called by what has to be done before it takes requests ---------------------------------

    def hold_back(self, reason: str) -> None:
        """Take no requests until `admit`, or until the next engine."""
        self.is_held_back = True
        if self.state == "ready":
            self.state, self.reason = "connecting", reason

    def admit(self) -> None:
        """Take requests again."""
        self.is_held_back = False
        if self.state == "connecting" and self.engine is not None:
            self.state, self.reason = "ready", ""

    # -- requests that it has lost ------------------------------------------------------------

    def note_loss(self, now_s: float) -> None:
        """Note that it has lost a request: after two in a row it rests, longer each time."""
        if isinstance(self.engine, EngineConnection) and self.engine.done != self._done:
            self._failed, self._done = 0, self.engine.done
        self._failed += 1
        if self._failed >= LOSSES_MAX:
            exponent = min(self._failed - LOSSES_MAX, 5)
            self._rest_until_s = now_s + min(REST_S_MAX, float(2**exponent))

    def rests(self, now_s: float) -> bool:
        """Return whether others should get requests first."""
        return now_s < self._rest_until_s or self.is_stuck

    @property
    def is_stuck(self) -> bool:
        """Whether its engine's step takes many times as long as the longest of late."""
        return isinstance(self.engine, EngineConnection) and self.engine.is_stuck

    @property
    def has_foreign_hold(self) -> bool:
        """Whether a request runs here whose hold names another replica's engine."""
        return isinstance(self.engine, EngineConnection) and self.engine.has_foreign_hold
