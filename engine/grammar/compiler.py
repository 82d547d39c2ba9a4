"""The grammar compiler: a queue per payer, a cache per namespace, and the threads that compile.

The engine's thread submits grammars and polls for outcomes; it never waits. A thread tries each
grammar in a child process first, then compiles it in the engine's process. One payer has one thread
at a time, until that thread's child process is ready for the next grammar: however slow a payer's
grammars are and in however many namespaces, only its own wait for them. Outcomes, refusals
included, are cached per namespace: a shared cache would reveal one namespace's grammars to another
by its speed. The compiler knows no step. Core calls it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Protocol

from engine.api import Clock, Grammar, Namespace, Payer
from engine.errors import EngineError, EngineUnavailable, RequestRefused
from engine.grammar.grammar import CompiledGrammar, Vocabulary, check_source, compile_grammar
from engine.grammar.sandbox import GrammarSandbox, SandboxSettings

WORKERS: Final = 2
"""Threads that compile, each with a child process."""
WAITING_MAX: Final = 64
"""Requests of one payer that may wait for a grammar."""
QUEUE_S_MAX: Final = 30.0
"""Seconds of compilation that one payer may have in the queue, as its latest compilations took."""
PAYERS_MAX: Final = 1_000
"""Payers with compilation times that are remembered."""
SMOOTHING: Final = 0.3
"""The weight of the latest compilation in a payer's mean time."""

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

    def submit(self, request_id: str, payer: Payer, namespace: Namespace, grammar: Grammar) -> None:
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
class _Compilation:
    """One grammar to compile, and the requests that wait for it."""

    payer: Payer
    namespace: Namespace
    grammar: Grammar
    request_ids: list[str]
    sandbox: GrammarSandbox | None = None
    """The child process that tries it, as long as it does."""
    is_erased: bool = False
    """Its namespace was erased meanwhile, so its outcome is not cached."""


class GrammarCompiler:
    """A `GrammarSource` with threads. Without `load` it reads nothing before the first grammar."""

    def __init__(self, settings: SandboxSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Condition()
        self._cache = CompiledCache()
        self._queues: OrderedDict[Payer, deque[_Compilation]] = OrderedDict()
        self._compiling: dict[Payer, _Compilation] = {}  # the payers that have a thread
        self._mean_s: OrderedDict[Payer, float] = OrderedDict()
        self._waiting: dict[str, _Compilation] = {}
        self._ready: deque[tuple[str, Outcome]] = deque()
        self._threads: list[threading.Thread] = []
        self._sandboxes: list[GrammarSandbox] = []
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._is_closed = False

    def load(self) -> None:
        """Read the model's tokens now instead of for the first grammar, where nothing else may
        stand still: the library holds the interpreter's lock meanwhile, about a second for 100,000
        tokens. A tokenizer that cannot be read is the first grammar's refusal.
        """
        with suppress(ValueError, OSError):
            self._load()

    # -- the engine's thread --------------------------------------------------------------------

    def submit(self, request_id: str, payer: Payer, namespace: Namespace, grammar: Grammar) -> None:
        """See `GrammarSource`. Microseconds, and O(length of the source)."""
        check_source(grammar, self._settings.limits)
        with self._lock:
            outcome = self._cache.find(namespace, grammar)
            if outcome is not None:
                self._ready.append((request_id, outcome))
                return
            compilations = [*self._queues.get(payer, ()), *self._compiling_of(payer)]
            compilation = next(
                (c for c in compilations if c.namespace == namespace and c.grammar == grammar), None
            )
            self._check_queue(payer, compilations, is_new=compilation is None)
            self._start_threads()
            if compilation is None:
                compilation = _Compilation(payer, namespace, grammar, [])
                self._queues.setdefault(payer, deque()).append(compilation)
            compilation.request_ids.append(request_id)
            self._waiting[request_id] = compilation
            self._lock.notify()

    def _check_queue(self, payer: Payer, compilations: list[_Compilation], *, is_new: bool) -> None:
        """Raise EngineUnavailable if the payer's queue is full."""
        waiting = sum(len(compilation.request_ids) for compilation in compilations)
        if waiting >= WAITING_MAX:
            message = f"{waiting} requests of this tenant wait for a grammar; limit {WAITING_MAX}."
            raise EngineUnavailable("queue_full", message)
        queue_s = self._mean_s.get(payer, 0.0) * (len(compilations) + 1)
        if is_new and compilations and queue_s > QUEUE_S_MAX:
            message = (
                f"This tenant's waiting grammars take about {queue_s:.0f} s to compile;"
                f" limit {QUEUE_S_MAX:.0f} s."
            )
            raise EngineUnavailable("queue_full", message)

    def cancel(self, request_id: str) -> None:
        """See `GrammarSource`. A grammar that no request waits for is not compiled further."""
        with self._lock:
            stale = [pair for pair in self._ready if pair[0] == request_id]
            for pair in stale:
                self._ready.remove(pair)
            compilation = self._waiting.pop(request_id, None)
            if compilation is None:
                return
            compilation.request_ids.remove(request_id)
            if compilation.request_ids:
                return
            queue = self._queues.get(compilation.payer)
            if queue is not None and compilation in queue:
                queue.remove(compilation)
                if not queue:
                    del self._queues[compilation.payer]
            elif compilation.sandbox is not None:
                compilation.sandbox.kill()

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
        """See `GrammarSource`. O(waiting grammars)."""
        with self._lock:
            self._cache.erase(namespace)
            for compilation in chain(self._compiling.values(), *self._queues.values()):
                compilation.is_erased |= compilation.namespace == namespace

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

    def _start_threads(self) -> None:
        """Start the threads that do not run yet, all at once: the second payer's is ready by then.
        Raises EngineUnavailable if the machine has room for none.
        """
        while len(self._threads) < WORKERS:
            name = f"grammar-{len(self._threads)}"
            sandbox = GrammarSandbox(self._settings, self._clock)
            thread = threading.Thread(target=self._work, args=(sandbox,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if self._threads:
                    return
                message = "No thread could be started for the grammar."
                raise EngineUnavailable("queue_full", message) from error
            self._sandboxes.append(sandbox)
            self._threads.append(thread)

    def _work(self, sandbox: GrammarSandbox) -> None:
        try:
            self._prepare(sandbox)
            while (compilation := self._next(sandbox)) is not None:
                began_s = self._clock()
                size, outcome = self._compile(sandbox, compilation)
                self._finish(compilation, outcome, size)
                self._prepare(sandbox)  # where the grammar ended the process, its payer waits
                self._release(compilation.payer, self._clock() - began_s)
        finally:
            sandbox.close()

    def _prepare(self, sandbox: GrammarSandbox) -> None:
        """Have the thread's process ready; the next check meets the error of a failure again."""
        with suppress(RequestRefused, OSError):
            if not self._is_closed:
                sandbox.prepare()

    def _next(self, sandbox: GrammarSandbox) -> _Compilation | None:
        """Return the next grammar of the payer that waited longest without a thread; None at the
        end.
        """
        with self._lock:
            while not self._is_closed:
                payer = next((p for p in self._queues if p not in self._compiling), None)
                if payer is not None:
                    queue = self._queues.pop(payer)
                    compilation = queue.popleft()
                    if queue:
                        self._queues[payer] = queue  # behind the other payers
                    self._compiling[payer] = compilation
                    compilation.sandbox = sandbox
                    return compilation
                self._lock.wait()
            return None

    def _compile(self, sandbox: GrammarSandbox, compilation: _Compilation) -> tuple[int, Outcome]:
        """Return the size and outcome of a grammar. Any error becomes a refusal."""
        grammar = compilation.grammar
        try:
            size = sandbox.check(grammar)
            with self._lock:
                compilation.sandbox = None  # a cancellation from here on stops nothing
            return size, compile_grammar(grammar, self._load())
        except EngineError as refusal:
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

    def _finish(self, compilation: _Compilation, outcome: Outcome, size: int) -> None:
        """Publish an outcome. Without a request left the process may have been killed for that, so
        a refusal is not the grammar's.
        """
        with self._lock:
            compilation.sandbox = None
            is_final = isinstance(outcome, CompiledGrammar) or (
                bool(compilation.request_ids)
                and outcome.code in ("grammar_invalid", "grammar_too_big")
            )
            if is_final and not compilation.is_erased:
                self._cache.add(compilation.namespace, compilation.grammar, outcome, size)
            for request_id in compilation.request_ids:
                del self._waiting[request_id]
                self._ready.append((request_id, outcome))
            compilation.request_ids = []

    def _release(self, payer: Payer, took_s: float) -> None:
        """Let a thread take the payer's next grammar; remember how long this one took."""
        with self._lock:
            del self._compiling[payer]
            before_s = self._mean_s.pop(payer, took_s)
            self._mean_s[payer] = before_s + SMOOTHING * (took_s - before_s)
            if len(self._mean_s) > PAYERS_MAX:
                self._mean_s.popitem(last=False)
            self._lock.notify()

    def _compiling_of(self, payer: Payer) -> list[_Compilation]:
        """Return the payer's grammar that is being compiled and has no outcome yet."""
        compilation = self._compiling.get(payer)
        return [] if compilation is None or not compilation.request_ids else [compilation]
