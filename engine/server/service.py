"""The engine as a service: one thread that owns the core, commands in, one frame per step out.

It knows no socket. `engine.server.server` puts it behind one; `engine.server.embedded` runs it in
the same process. An outlet is where answers go: each connection has one, and hears only of its own
requests.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Protocol

from engine.api import CacheGrant as Grant
from engine.api import (
    Cancel,
    Clock,
    Command,
    Drain,
    EndSample,
    EngineInfo,
    Erase,
    Event,
    Finished,
    GetStats,
    Namespace,
    Peek,
    Reply,
    Request,
    Sampling,
    SetQuotas,
    Submit,
    Survey,
    Surveyed,
    Usage,
)
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.constraints import Constraints
from engine.core.core import Core
from engine.errors import EngineError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.grammar import MaskFiller
from engine.grammar.sandbox import SandboxSettings
from engine.model_store import ModelCard, load_card
from engine.server.cache_event_collector import CacheEventCollector
from engine.server.tree_snapshot import survey

CANARY: Final = "canary"
CANARY_STEPS_MAX: Final = 8
COMPILE_WAIT_S: Final = 0.001
"""Between two looks at grammars that are being compiled, with nothing else to do."""

TOLD_MAX: Final = 128
"""Namespaces, and losses and gains of theirs, that a heartbeat tells of between two steps."""

BEATS_PART: Final = 20
BEAT_S_MAX: Final = 5.0
"""Nobody is without news for longer, where beats are not further apart anyway."""

Asked = Command | Literal["join", "leave"]


class ResponseSink(Protocol):
    """Where one connection's answers go. Called on the service's thread."""

    def send(self, step: int, messages: tuple[Event | Reply, ...]) -> None:
        """Everything one step has to say to this connection. May block: that is back-pressure."""


class EngineService:
    """Runs a core in a thread of its own until `stop`."""

    def __init__(
        self,
        make_core: Callable[[], tuple[Core, EngineInfo]],
        config: EngineConfig,
        clock: Clock = time.monotonic,
        *,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called in the service's thread when `ready` and when `stopped` are set."""
        self.config = config
        self.clock = clock
        self.info: EngineInfo | None = None
        self.failure: BaseException | None = None
        self._make_core = make_core
        self._changed = changed
        self._inbox: queue.SimpleQueue[tuple[ResponseSink, Asked] | None] = queue.SimpleQueue()
        self._owners: dict[str, ResponseSink] = {}
        self._outlets: dict[ResponseSink, set[Namespace]] = {}  # and of whom it is to be told
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._losses = CacheEventCollector()
        self.ready = threading.Event()
        self.stopped = threading.Event()
        self._beat_at_s = clock()
        self._is_telling = False
        self._is_draining = False

    def start(self) -> None:
        """Begin to load; `ready` is set when a token has been produced or loading has failed."""
        self._thread.start()

    def post(self, outlet: ResponseSink, command: Command) -> None:
        """Hand in a command; answers go to `outlet`. Thread-safe, never blocks."""
        self._inbox.put((outlet, command))

    def join(self, outlet: ResponseSink) -> None:
        """A connection begins: from now on it hears the heartbeat, asked or not."""
        self._inbox.put((outlet, "join"))

    def leave(self, outlet: ResponseSink) -> None:
        """A connection is gone: everything it asked for is cancelled."""
        self._inbox.put((outlet, "leave"))

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; what runs is abandoned."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    # -- the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        core: Core | None = None
        try:
            core, info = self._make_core()
            core.cache.facts = self._losses.note
            smoke_test(core)
            self.info = info
            self.ready.set()
            self._changed()
            while self._take_commands(core):
                self._deliver(core.engine_stats.step, core.step())
                self._beat(core)
                if self._is_draining and not core.has_work():
                    break
        except BaseException as failure:
            self.failure = failure
            self._fail_all()
        finally:
            if core is not None:
                core.constraints.close()
            self._refuse_the_late()
            self.ready.set()
            self.stopped.set()
            self._changed()

    def _take_commands(self, core: Core) -> bool:
        """Everything in the inbox; without work, waits for some until the heartbeat. False: stop.

        The core keeps house at each heartbeat, so nothing expires later than that. Grammars that
        are being compiled are looked after in between.
        """
        is_busy = core.has_work() or core.is_recounting
        wait_s = 0.0 if is_busy else max(0.0, self._beat_at_s - self.clock())
        if core.is_waiting_for_grammars:
            wait_s = COMPILE_WAIT_S
        while True:
            try:
                item = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            self._obey(core, *item)
            wait_s = 0.0

    def _obey(self, core: Core, outlet: ResponseSink, asked: Asked) -> None:
        match asked:
            case "join":
                self._note_changed(core)
                self._outlets[outlet] = core.namespaces()
                self._tell_stats(outlet, core)
            case "leave":
                self._outlets.pop(outlet, None)
                for request_id in [r for r, owner in self._owners.items() if owner is outlet]:
                    del self._owners[request_id]
                    core.cancel(request_id)
            case Submit(request):
                if request.request_id in self._owners:
                    message = "A request with this id is running already."
                    self._tell(outlet, core, _refused(request, "duplicate_request", message))
                else:
                    self._owners[request.request_id] = outlet
                    core.submit(request)
            case Cancel(request_id):
                if self._owners.get(request_id) is outlet:
                    core.cancel(request_id)
            case EndSample(request_id, index, output_tokens):
                if self._owners.get(request_id) is outlet:
                    core.end_sample(request_id, index, output_tokens)
            case Peek():
                self._tell(outlet, core, core.peek(asked))
            case SetQuotas(quotas):
                for quota in quotas:
                    core.cache.set_quota(quota)
            case Erase():
                self._tell(outlet, core, core.erase(asked))
            case Survey(call_id, namespace, most):
                found = survey(core.cache, namespace, most, self.clock())
                self._tell(outlet, core, Surveyed(call_id, found))
            case GetStats(call_id):
                self._tell_stats(outlet, core, call_id)
            case Drain(timeout_s):
                self._is_draining = True
                core.drain(timeout_s)

    def _tell(self, outlet: ResponseSink, core: Core, message: Event | Reply) -> None:
        outlet.send(core.engine_stats.step, (message,))

    def _tell_stats(self, outlet: ResponseSink, core: Core, call_id: int = 0) -> None:
        """With all the namespaces that have changed since it was told last."""
        self._note_changed(core)
        names = self._outlets.get(outlet, set())
        self._tell(outlet, core, core.stats(call_id, names))
        names.clear()

    def _note_changed(self, core: Core) -> None:
        changed = core.take_changed()
        for untold in self._outlets.values():
            untold |= changed

    def _deliver(self, step: int, events: list[Event]) -> None:
        """One batch per connection."""
        batches: dict[int, tuple[ResponseSink, list[Event | Reply]]] = {}
        for event in events:
            owner = self._owners.get(event.request_id)
            if owner is None:
                continue
            batches.setdefault(id(owner), (owner, []))[1].append(event)
            if isinstance(event, Finished):
                del self._owners[event.request_id]
        for outlet, batch in batches.values():
            outlet.send(step, tuple(batch))

    def _beat(self, core: Core) -> None:
        """A heartbeat, or as much of one as may keep a step waiting: the rest follows beside later
        steps. Where tens of thousands of namespaces change all the time, telling takes its own: of
        it all, one part in `BEATS_PART` at most, while that makes nobody deaf."""
        began_s = self.clock()
        if began_s < self._beat_at_s:
            return
        if not self._is_telling:
            self._note_changed(core)
        news = self._losses.take(TOLD_MAX)
        self._is_telling = len(self._losses) > 0
        for outlet, untold in self._outlets.items():
            names = [untold.pop() for _ in range(min(TOLD_MAX, len(untold)))]
            self._tell(outlet, core, core.stats(0, names))
            self._is_telling |= bool(untold)
            if news is not None:
                self._tell(outlet, core, news)
        rest_s = min(BEAT_S_MAX, BEATS_PART * (self.clock() - began_s))
        next_s = rest_s if self._is_telling else max(rest_s, self.config.heartbeat_s)
        self._beat_at_s = began_s + next_s

    def _fail_all(self) -> None:
        """The engine is broken: nobody waits for ever. Clients know what they had by then."""
        message = "The engine stopped while it worked on this request."
        for request_id, outlet in self._owners.items():
            outlet.send(0, (Finished(request_id, "failed", Usage(), "engine_died", message),))
        self._owners.clear()

    def _refuse_the_late(self) -> None:
        """What came after the last step gets its answer too."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None and isinstance(item[1], Submit):
                message = "The engine is shutting down."
                item[0].send(0, (_refused(item[1].request, "draining", message),))


def _refused(request: Request, code: str, message: str) -> Finished:
    return Finished(request.request_id, "refused", Usage(), code, message)


def smoke_test(core: Core) -> None:
    """Readiness means that a token was produced, which no count keeps. Raises EngineError if none
    comes."""
    grant = Grant(namespace=b"", read=False, write=False)
    core.submit(Request(CANARY, (0,), 1, grant, Sampling(temperature=0)))
    for _ in range(CANARY_STEPS_MAX):
        for event in core.step():
            if isinstance(event, Finished):
                if event.ending != "done":
                    raise EngineError(event.code, f"The engine's first token failed: {event.code}.")
                core.engine_stats.reset_token_counters()
                return
    raise EngineError("not_ready", "The engine produced no token.")


def core_of_model(folder: Path, config: EngineConfig) -> tuple[Core, EngineInfo]:
    """The composition root: a core over the real runner of a prepared model folder.

    Torch is imported here and nowhere above. Raises ModelError.
    """
    import torch

    card = load_card(folder)
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        from engine.runner.gpu_build import build_gpu_runner

        built = build_gpu_runner(card, config)
    else:
        from engine.runner.cpu_runner import build_runner

        built = build_runner(card, config)
    core = Core(
        PrefixCache(
            blocks=built.blocks, block_size=config.block_size, context_tokens=built.context
        ),
        built.runner,
        config,
        time.monotonic,
        vocab_size=card.config.vocab,
        context_tokens=built.context,
        pipeline_depth=built.pipeline_depth,
        constraints=_constraints(card, config),
    )
    info = EngineInfo(
        epoch=secrets.token_hex(8),
        model=card.name,
        model_digest=f"{card.digest}-{built.kv_format.name}-{built.kv_format.block_size}",
        model_dir=str(folder),
        vocab_size=card.config.vocab,
        context_tokens=built.context,
        block_size=config.block_size,
        blocks=built.blocks,
        floor_blocks_max=core.cache.floor_blocks_max,
        kv_bytes_per_block=built.kv_format.block_bytes,
        kv_format=built.kv_format.name,
        device=built.device,
        pid=os.getpid(),
    )
    return core, info


def _constraints(card: ModelCard, config: EngineConfig) -> Constraints:
    """Nothing of it costs anything before the first grammar comes."""
    settings = SandboxSettings(str(card.tokenizer_path), card.config.vocab, card.stop_token_ids)
    threads = config.threads or os.cpu_count() or 1
    return Constraints(GrammarCompiler(settings, time.monotonic), MaskFiller(min(threads, 8)))
