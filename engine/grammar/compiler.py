"""The grammar compiler: a queue and a cache per namespace, and the threads that compile.

The engine's thread submits grammars and polls for outcomes; it never waits. A thread tries each
grammar in a child process first, then compiles it in the engine's process. One namespace has one
thread at a time, so that it waits for its own slow grammars alone. Outcomes, refusals included, are
cached per namespace: a shared cache would reveal one namespace's grammars to another by its speed.
The compiler knows no step. Core calls it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from engine.api import Clock, Grammar, Namespace
from engine.errors import EngineError, EngineUnavailable, RequestRefused
from engine.grammar.grammar import CompiledGrammar, Vocabulary, check_source, compile_grammar
from engine.grammar.sandbox import GrammarSandbox, SandboxSettings

WORKERS: Final = 2
"""Threads that compile, each with a child process."""
WAITING_MAX: Final = 64
"""Requests of one namespace that may wait for a grammar."""

ENTRIES_MAX: Final = 512
"""Cached outcomes, over all namespaces."""
NAMESPACE_ENTRIES_MAX: Final = 64
"""Cached outcomes of one namespace."""
BYTES_MAX: Final = 256 * 2**20
"""Bytes of cached outcomes, over all namespaces."""
NAMESPACE_BYTES_MAX: Final = 64 * 2**20
"""Bytes of cached outcomes of one namespace."""

Outcome = CompiledGrammar | EngineError
Key = tuple[str, str]


class GrammarSource(Protocol):
    """The interface through which core has grammars compiled."""

    def submit(self, request_id: str, namespace: Namespace, grammar: Grammar) -> None:
        """Compile a grammar; `take_ready` returns the outcome. Raises EngineError if it is refused
        at once.
        """

    def cancel(self, request_id: str) -> None:
        """Drop the request's interest in its grammar."""

    def take_ready(self) -> list[tuple[str, Outcome]]:
        """Return the outcomes since the last call."""

    def mark_too_big(self, namespace: Namespace, grammar: Grammar) -> None:
        """Refuse this grammar from now on: it grew too large during generation."""

    def erase(self, namespace: Namespace) -> None:
        """Forget the outcomes of a namespace."""

    def close(self) -> None:
        """Stop compiling; no grammar is submitted any more."""


class CompiledCache:
    """Outcomes by namespace and source, least recently used evicted first, bounded by count and
    bytes.
    """

    def __init__(self) -> None:
        self._entries: dict[Namespace, OrderedDict[Key, tuple[Outcome, int]]] = {}
        self._order: OrderedDict[tuple[Namespace, Key], None] = OrderedDict()
        self._namespace_bytes: dict[Namespace, int] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def find(self, namespace: Namespace, grammar: Grammar) -> Outcome | None:
        """Return a cached outcome or None, and renew its use. O(length of the source)."""
        key: Key = (grammar.kind, grammar.text)
        entries = self._entries.get(namespace)
        found = None if entries is None else entries.get(key)
        if entries is None or found is None:
            return None
        entries.move_to_end(key)
        self._order.move_to_end((namespace, key))
        return found[0]

    def add(self, namespace: Namespace, grammar: Grammar, outcome: Outcome, size: int) -> None:
        """Cache an outcome of `size` bytes; evict others, first of the same namespace, then
        of any.
        """
        key: Key = (grammar.kind, grammar.text)
        self._remove(namespace, key)
        entries = self._entries.setdefault(namespace, OrderedDict())
        entries[key] = (outcome, size)
        self._order[namespace, key] = None
        self.held_bytes += size
        self._namespace_bytes[namespace] = self._namespace_bytes.get(namespace, 0) + size
        while (
            len(entries) > NAMESPACE_ENTRIES_MAX
            or self._namespace_bytes[namespace] > NAMESPACE_BYTES_MAX
        ) and len(entries) > 1:
            self._remove(namespace, next(iter(entries)))
        while len(self._order) > ENTRIES_MAX or self.held_bytes > BYTES_MAX:
            self._remove(*next(iter(self._order)))

    def replace(self, namespace: Namespace, grammar: Grammar, outcome: Outcome) -> None:
        """Replace the outcome of an entry, if it is cached."""
        if self.find(namespace, grammar) is not None:
            self.add(namespace, grammar, outcome, len(grammar.text))

    def erase(self, namespace: Namespace) -> None:
        """Forget a namespace. O(its entries)."""
        for key in list(self._entries.get(namespace, ())):
            self._remove(namespace, key)

    def _remove(self, namespace: Namespace, key: Key) -> None:
        entries = self._entries.get(namespace, OrderedDict())
        if key not in entries:
            return
        _, size = entries.pop(key)
        del self._order[namespace, key]
        self.held_bytes -= size
        self._namespace_bytes[namespace] -= size
        if not entries:
            del self._entries[namespace], self._namespace_bytes[namespace]


@dataclass(slots=True)
class _CompileJob:
    """One grammar to compile, and the requests that wait for it."""

    namespace: Namespace
    grammar: Grammar
    request_ids: list[str]


class GrammarCompiler:
    """A `GrammarSource` with threads. It loads nothing before the first grammar is submitted."""

    def __init__(self, settings: SandboxSettings, clock: Clock, *, workers: int = WORKERS) -> None:
        self._settings = settings
        self._clock = clock
        self._workers = workers
        self._lock = threading.Condition()
        self._cache = CompiledCache()
        self._queues: OrderedDict[Namespace, deque[_CompileJob]] = OrderedDict()
        self._compiling: dict[Namespace, _CompileJob] = {}
        self._waiting: dict[str, _CompileJob] = {}
        self._ready: deque[tuple[str, Outcome]] = deque()
        self._threads: list[threading.Thread] = []
        self._sandboxes: list[GrammarSandbox] = []
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._is_closed = False

    # -- the engine's thread --------------------------------------------------------------------

    def submit(self, request_id: str, namespace: Namespace, grammar: Grammar) -> None:
        """See `GrammarSource`. Microseconds, and O(length of the source)."""
        check_source(grammar, self._settings.limits)
        with self._lock:
            outcome = self._cache.find(namespace, grammar)
            if outcome is not None:
                self._ready.append((request_id, outcome))
                return
            queue = self._queues.get(namespace, deque())
            job = next(
                (a for a in [*queue, *self._jobs_compiling(namespace)] if a.grammar == grammar),
                None,
            )
            waiting = sum(len(a.request_ids) for a in [*queue, *self._jobs_compiling(namespace)])
            if waiting >= WAITING_MAX:
                raise EngineUnavailable(
                    "queue_full", f"{waiting} requests wait for a grammar; limit {WAITING_MAX}."
                )
            if job is None:
                job = _CompileJob(namespace, grammar, [])
                self._queues.setdefault(namespace, deque()).append(job)
            job.request_ids.append(request_id)
            self._waiting[request_id] = job
            if len(self._threads) < self._workers:
                self._start_thread()
            self._lock.notify()

    def cancel(self, request_id: str) -> None:
        """See `GrammarSource`. A queued grammar that no request waits for is not compiled."""
        with self._lock:
            stale = [pair for pair in self._ready if pair[0] == request_id]
            for pair in stale:
                self._ready.remove(pair)
            job = self._waiting.pop(request_id, None)
            if job is None:
                return
            job.request_ids.remove(request_id)
            queue = self._queues.get(job.namespace)
            if not job.request_ids and queue is not None and job in queue:
                queue.remove(job)
                if not queue:
                    del self._queues[job.namespace]

    def take_ready(self) -> list[tuple[str, Outcome]]:
        """See `GrammarSource`."""
        if not self._ready:
            return []
        with self._lock:
            ready = list(self._ready)
            self._ready.clear()
        return ready

    def mark_too_big(self, namespace: Namespace, grammar: Grammar) -> None:
        """See `GrammarSource`. A later submission is refused."""
        message = "The grammar became too large during generation."
        with self._lock:
            self._cache.replace(namespace, grammar, RequestRefused("grammar_too_big", message))

    def erase(self, namespace: Namespace) -> None:
        """See `GrammarSource`. An outcome that is being compiled at that moment is cached
        afterwards.
        """
        with self._lock:
            self._cache.erase(namespace)

    def close(self) -> None:
        """End the threads and their processes; queued grammars get no outcome."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        for sandbox in self._sandboxes:
            sandbox.kill()
        for thread in self._threads:
            thread.join(self._settings.wall_s_max)

    # -- the threads ----------------------------------------------------------------------------

    def _start_thread(self) -> None:
        name = f"grammar-{len(self._threads)}"
        sandbox = GrammarSandbox(self._settings, self._clock)
        thread = threading.Thread(target=self._work, args=(sandbox,), name=name, daemon=True)
        self._sandboxes.append(sandbox)
        self._threads.append(thread)
        thread.start()

    def _work(self, sandbox: GrammarSandbox) -> None:
        try:
            while (job := self._next()) is not None:
                size, outcome = self._compile(sandbox, job.grammar)
                self._finish(job, outcome, size)
        finally:
            sandbox.close()

    def _next(self) -> _CompileJob | None:
        """Return the next grammar of the namespace that waited longest without a thread; None at
        the end.
        """
        with self._lock:
            while not self._is_closed:
                name = next((n for n in self._queues if n not in self._compiling), None)
                if name is not None:
                    queue = self._queues.pop(name)
                    job = queue.popleft()
                    if queue:
                        self._queues[name] = queue  # behind the other namespaces
                    self._compiling[name] = job
                    return job
                self._lock.wait()
            return None

    def _compile(self, sandbox: GrammarSandbox, grammar: Grammar) -> tuple[int, Outcome]:
        """Return the size and outcome of a grammar. Any error becomes a refusal."""
        try:
            size = sandbox.check(grammar)
            return size, compile_grammar(grammar, self._load())
        except RequestRefused as refusal:
            return len(grammar.text), refusal
        except Exception as error:
            message = f"The grammar could not be compiled: {type(error).__name__}."
            return len(grammar.text), RequestRefused("grammar_unsupported", message)

    def _load(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                s = self._settings
                self._vocabulary = Vocabulary.load(
                    Path(s.tokenizer_path), s.vocab_size, s.end_token_ids, s.limits
                )
            return self._vocabulary

    def _finish(self, job: _CompileJob, outcome: Outcome, size: int) -> None:
        with self._lock:
            del self._compiling[job.namespace]
            if isinstance(outcome, CompiledGrammar) or outcome.code != "grammar_unsupported":
                self._cache.add(job.namespace, job.grammar, outcome, size)
            for request_id in job.request_ids:
                del self._waiting[request_id]
                self._ready.append((request_id, outcome))
            self._lock.notify()

    def _jobs_compiling(self, namespace: Namespace) -> list[_CompileJob]:
        job = self._compiling.get(namespace)
        return [] if job is None else [job]
