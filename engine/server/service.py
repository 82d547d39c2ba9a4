"""The engine as a service: a thread that owns the core, reads commands, and sends one frame per
step.

The service knows no socket: `engine.server.server` puts it behind one, `engine.server.embedded`
runs it in the same process. Each connection has a `ResponseSink`, which receives the events of its
own requests only.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final, Literal, Protocol

from msgspec import Struct

from engine.api import (
    Cancel,
    Clock,
    Command,
    Departed,
    Disown,
    Drain,
    EndSample,
    EngineInfo,
    Erase,
    Event,
    FindLease,
    Finished,
    GetDeparted,
    GetHeld,
    GetStats,
    Held,
    LetGo,
    Namespace,
    Peek,
    Request,
    SetQuotas,
    Started,
    Submit,
    Survey,
    Surveyed,
    Usage,
    WatchPrefixes,
)
from engine.client.step_record import StepRecord
from engine.config import EngineConfig
from engine.core.core import Core
from engine.core.smoke_test import smoke_test_request
from engine.core.storage_meter import StorageMeter
from engine.errors import (
    DIED_MESSAGE,
    DRAINING_MESSAGE,
    DUPLICATE_MESSAGE,
    EngineError,
    InvariantViolation,
)
from engine.protocol import Messages, Reply
from engine.server.cache_event_collector import CacheEventCollector
from engine.server.departed_gateways import DepartedGateways
from engine.server.prefix_reporter import PrefixReporter
from engine.server.recorded_runner import RecordedRunner
from engine.server.tree_snapshot import find_lease, survey
from engine.statistics import LevelStats

SMOKE_TEST_STEPS_MAX: Final = 8
COMPILE_POLL_S: Final = 0.001
"""Seconds between two checks of grammars that are being compiled, without other work."""
STORE_SHARE: Final = 1 / 3
"""The part of a drain's time for which an engine without requests stays to store promises."""
LEVELS_POLL_S: Final = 0.0005
"""Seconds between two turns of the levels, without other work."""

COMMANDS_S: Final = 0.005
"""Seconds that commands may always take between two steps."""
COMMANDS_SHARE: Final = 1 / 4
"""The part of the last step's time that they may take, if that is more. The rest stay in the inbox,
in their order: a flood would stop all streams, and the heartbeats by which the gateway knows a live
engine. Long steps take more at once, or a flood of one tenant would hold up others for many."""

HEARTBEAT_ITEMS_MAX: Final = 128
"""Namespaces, and losses and gains, that a heartbeat sends between two steps."""

HEARTBEAT_SHARE: Final = 20
"""Heartbeats take at most one part in this many of the engine's time."""
HEARTBEAT_S_MAX: Final = 5.0
"""Longest time between heartbeats, in seconds, unless they are configured further apart."""


class Join(Struct, frozen=True):
    """A connection begins, of a gateway with this start. `moves`: it moves promises from the engine
    when it drains, and says when it has."""

    start: str
    moves: bool = False


SinkCommand = Command | Join | Literal["leave"]
CoreCall = Callable[[Core], None]
"""What the service's thread does between two steps for another engine."""


class ResponseSink(Protocol):
    """Receives the messages for one connection. Called in the service's thread."""

    def send(self, step: int, messages: Messages) -> None:
        """Send all messages of one step to this connection. May block, which is back-pressure."""


class EngineService:
    """Runs a core in a thread until `stop`."""

    def __init__(
        self,
        make_core: Callable[[], tuple[Core, EngineInfo]],
        config: EngineConfig,
        clock: Clock = time.monotonic,
        *,
        record: StepRecord | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`record`: gets the ids of the requests in each step. `on_change`: called in the service's
        thread when `ready` and when `stopped` are set."""
        self.config = config
        self.clock = clock
        self.info: EngineInfo | None = None
        self.levels_off: tuple[LevelStats, ...] = ()
        self.failure: BaseException | None = None
        self._make_core = make_core
        self._record = record
        self._on_change = on_change
        self._inbox: queue.SimpleQueue[tuple[ResponseSink, SinkCommand] | CoreCall | None] = (
            queue.SimpleQueue()
        )
        self._owners: dict[str, ResponseSink] = {}  # of live requests
        self._sinks: dict[ResponseSink, set[Namespace]] = {}  # and the namespaces to report to each
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._accepted: Counter[ResponseSink] = Counter()  # Submits
        self._starts: dict[ResponseSink, str] = {}  # of gateways that name theirs
        self._gateways = DepartedGateways(clock)
        self._prefixes = PrefixReporter[ResponseSink]()
        self._cache_events = CacheEventCollector()
        self._storage: StorageMeter  # once the core is made
        self.ready = threading.Event()
        self.stopped = threading.Event()
        self._heartbeat_at_s = clock()
        self._has_more_news = False
        self._is_draining = False
        self._leave_at_s = self._leave_at_last_s = float("-inf")
        self._movers: set[ResponseSink] = set()  # gateways that a drained engine waits for
        self._step_s = 0.0  # of the last step

    def start(self) -> None:
        """Start loading; `ready` is set once a token was produced or loading has failed."""
        self._thread.start()

    def post(self, sink: ResponseSink, command: Command) -> None:
        """Submit a command; replies go to `sink`. Thread-safe, never blocks."""
        self._inbox.put((sink, command))

    def call(self, work: CoreCall) -> None:
        """Have something short done between two steps. Thread-safe, never blocks."""
        self._inbox.put(work)

    def join(self, sink: ResponseSink, start: str = "", *, moves: bool = False) -> None:
        """Add a connection: from now on it receives heartbeats. `start`: names the gateway's start;
        "" for a connection whose requests are not counted by it. `moves`: see `Join`."""
        self._inbox.put((sink, Join(start, moves)))

    def leave(self, sink: ResponseSink) -> None:
        """Remove a connection and cancel its requests."""
        self._inbox.put((sink, "leave"))

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread and abandon running requests."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    # -- the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        core: Core | None = None
        try:
            core, info = self._make_core()
            core.cache.facts = self._cache_events.note
            if self._record is not None:
                core.runner = RecordedRunner(core.runner, core.requests, self._record)
            smoke_test(core)
            self._storage = StorageMeter(core.cache, core.namespaces(), core.clock())
            self.info, self.levels_off = info, core.engine_stats.levels_off
            self.ready.set()
            self._on_change()
            while self._take_commands(core):
                began_s = self.clock()
                events = core.step()
                self._step_s = self.clock() - began_s
                self._deliver(core, events)
                self._send_heartbeat(core)
                if self._is_draining and not core.has_work() and not self._is_needed(core):
                    break
        except BaseException as failure:
            self.failure = failure
        try:
            if core is not None:
                self._close(core)
        except BaseException as failure:
            self.failure = self.failure or failure
        self._refuse_late_requests()
        self.ready.set()
        self.stopped.set()
        self._on_change()

    def _close(self, core: Core) -> None:
        """End the requests that a failure has left, and what works beside the core."""
        if isinstance(self.failure, InvariantViolation):
            core.disown_copies()
        if self.failure is not None:
            self._fail_all()
        core.close()

    def _take_commands(self, core: Core) -> bool:
        """Handle the commands in the inbox; without work, wait for one until the heartbeat.

        Returns False to stop. The core runs its maintenance at each heartbeat, so no block expires
        later than that. Grammars that are being compiled are polled in between. Commands take
        `COMMANDS_S` or `COMMANDS_SHARE` at most, and while a step runs on the device the time until
        the next launch is due.
        """
        is_busy = core.has_work() or core.is_recounting
        now_s = self.clock()
        rest_s = min(self._heartbeat_at_s - now_s, self._prefixes.wait_s(core, now_s))
        wait_s = 0.0 if is_busy else max(0.0, rest_s)
        if core.is_waiting_for_grammars:
            wait_s = COMPILE_POLL_S
        elif core.is_waiting_for_levels:
            wait_s = LEVELS_POLL_S
        until_s = inf
        while True:
            hold_s = core.launch_hold_s()
            if not hold_s and self.clock() >= until_s:
                return True
            wait_s = max(wait_s, hold_s)
            try:
                item = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            until_s = min(until_s, self.clock() + max(COMMANDS_S, COMMANDS_SHARE * self._step_s))
            if isinstance(item, tuple):
                self._handle(core, *item)
            else:
                item(core)
            wait_s = 0.0

    def _handle(self, core: Core, sink: ResponseSink, command: SinkCommand) -> None:
        match command:
            case Join(start, moves):
                self._collect_changes(core)
                if moves:
                    self._movers.add(sink)
                if start:
                    self._starts[sink] = start
                    self._gateways.join(start)
                self._sinks[sink] = core.namespaces()
                self._send_stats(sink, core)
            case "leave":
                self._sinks.pop(sink, None)
                self._movers.discard(sink)
                self._accepted.pop(sink, None)
                self._prefixes.stop(core, sink)
                for request_id in [r for r, owner in self._owners.items() if owner is sink]:
                    del self._owners[request_id]
                    self._gateways.abandon(request_id)
                    core.abandon(request_id)
                if start := self._starts.pop(sink, ""):
                    self._gateways.leave(start)
            case Submit(request):
                self._accepted[sink] += 1
                if request.request_id in self._owners:
                    refusal = _refused(request, "duplicate_request", DUPLICATE_MESSAGE)
                    self._reply(sink, core, refusal)
                else:
                    self._owners[request.request_id] = sink
                    if sink in self._starts and not request.adopts:
                        self._gateways.submit(self._starts[sink], request)
                    core.submit(request)
            case Cancel(request_id):
                if self._owners.get(request_id) is sink:
                    core.cancel(request_id)
            case EndSample(request_id, index, output_tokens):
                if self._owners.get(request_id) is sink:
                    core.end_sample(request_id, index, output_tokens)
            case Peek():
                self._reply(sink, core, core.peek(command))
            case SetQuotas(quotas):
                for quota in quotas:
                    core.set_quota(quota)
            case Erase():
                core.erase(command, partial(self._reply, sink, core))
            case Survey(call_id, namespace, most):
                found = survey(core.cache, namespace, most, self.clock())
                self._reply(sink, core, Surveyed(call_id, found))
            case FindLease():
                self._reply(sink, core, find_lease(core, command))
            case LetGo():
                self._movers.discard(sink)
            case WatchPrefixes():
                self._prefixes.start(core, sink)
            case GetStats(call_id):
                self._send_stats(sink, core, call_id)
            case GetHeld(call_id):
                self._collect_changes(core)
                self._reply(sink, core, Held(call_id, self._storage.read(core.clock())))
            case GetDeparted(call_id, settled):
                self._reply(sink, core, Departed(call_id, self._gateways.read(settled)))
            case Disown(request_ids):
                for counts in self._gateways.disown(self._starts.get(sink, ""), request_ids):
                    core.engine_stats.disown(counts)
            case Drain(timeout_s):
                self._is_draining = True
                self._leave_at_s = self.clock() + STORE_SHARE * timeout_s
                self._leave_at_last_s = self.clock() + timeout_s
                core.drain(timeout_s)

    def _is_needed(self, core: Core) -> bool:
        """Return whether a drained engine stays: for gateways that move promises, for engines that
        fetch, or for what is being copied below the device.
        """
        now_s = self.clock()
        if self._movers or (core.levels is not None and core.levels.sharing):
            return now_s < self._leave_at_last_s
        return core.is_waiting_for_levels and now_s < self._leave_at_s

    def _reply(self, sink: ResponseSink, core: Core, message: Event | Reply) -> None:
        sink.send(core.engine_stats.step, (message,))

    def _send_stats(self, sink: ResponseSink, core: Core, call_id: int = 0) -> None:
        """Send the statistics, with all namespaces that changed since the sink's last ones."""
        self._collect_changes(core)
        names = self._sinks.get(sink, set())
        self._reply(sink, core, core.stats(call_id, names))
        names.clear()

    def _collect_changes(self, core: Core) -> None:
        changed = core.take_changed()
        self._storage.note(changed)
        for changes in self._sinks.values():
            changes |= changed

    def _deliver(self, core: Core, events: list[Event]) -> None:
        """Send one batch of events per connection, behind the facts that the step has changed."""
        batches: dict[ResponseSink, list[Event | Reply]] = {}
        for sink, facts in self._prefixes.take(core, self._accepted, self.clock()).items():
            batches[sink] = [*facts]
        latest, batch = None, list[Event | Reply]()
        for event in events:
            owner = self._owners.get(event.request_id)
            if owner is None:
                continue
            if owner is not latest:  # events of one connection mostly follow each other
                latest, batch = owner, batches.setdefault(owner, [])
            batch.append(event)
            if isinstance(event, Finished):
                self._gateways.note_end(event)
                del self._owners[event.request_id]
            elif isinstance(event, Started):
                self._gateways.note_start(event)
        for sink, batch in batches.items():
            sink.send(core.engine_stats.step, tuple(batch))

    def _send_heartbeat(self, core: Core) -> None:
        """Send a heartbeat, or the part of it that may delay a step; the rest follows after later
        steps.

        With tens of thousands of changing namespaces a heartbeat takes long: then all heartbeats
        together take at most 1/HEARTBEAT_SHARE of the time, unless they would be further apart than
        HEARTBEAT_S_MAX.
        """
        began_s = self.clock()
        if began_s < self._heartbeat_at_s:
            return
        if not self._has_more_news:
            self._collect_changes(core)
        self._storage.update(core.clock(), HEARTBEAT_ITEMS_MAX)
        news = self._cache_events.take(HEARTBEAT_ITEMS_MAX)
        self._has_more_news = len(self._cache_events) > 0 or self._storage.is_behind
        for sink, changes in self._sinks.items():
            names = [changes.pop() for _ in range(min(HEARTBEAT_ITEMS_MAX, len(changes)))]
            self._reply(sink, core, core.stats(0, names))
            self._has_more_news |= bool(changes)
            if news is not None:
                self._reply(sink, core, news)
        rest_s = min(HEARTBEAT_S_MAX, HEARTBEAT_SHARE * (self.clock() - began_s))
        next_s = rest_s if self._has_more_news else max(rest_s, self.config.heartbeat_s)
        self._heartbeat_at_s = began_s + next_s

    def _fail_all(self) -> None:
        """End all requests with `engine_died`. Clients know the usage seen by then."""
        for request_id, sink in self._owners.items():
            sink.send(0, (Finished(request_id, "failed", Usage(), "engine_died", DIED_MESSAGE),))
        self._owners.clear()

    def _refuse_late_requests(self) -> None:
        """Refuse the requests that came after the last step."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, tuple) and isinstance(item[1], Submit):
                item[0].send(0, (_refused(item[1].request, "draining", DRAINING_MESSAGE),))


def _refused(request: Request, code: str, message: str) -> Finished:
    return Finished(request.request_id, "refused", Usage(), code, message)


def smoke_test(core: Core) -> None:
    """Produce one token, which no counter keeps: the engine is ready only after that.

    Raises EngineError if no token comes.
    """
    core.submit(smoke_test_request())
    for _ in range(SMOKE_TEST_STEPS_MAX):
        for event in core.step():
            if isinstance(event, Finished):
                if event.ending != "done":
                    message = f"The engine's smoke test failed: {event.message}"
                    raise EngineError(event.code, message)
                core.engine_stats.reset()
                return
    raise EngineError("not_ready", f"The engine produced no token in {SMOKE_TEST_STEPS_MAX} steps.")
