"""The grammar compiler: queues, threads and caches, fairness to payers, privacy of namespaces."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api import Grammar
from engine.errors import EngineError, EngineUnavailable, RequestRefused
from engine.grammar.compiler import (
    BYTES_MAX,
    ENTRIES_MAX,
    NAMESPACE_BYTES_MAX,
    NAMESPACE_ENTRIES_MAX,
    QUEUE_S_MAX,
    WAITING_MAX,
    CompiledCache,
    GrammarCompiler,
    Outcome,
)
from engine.grammar.grammar import CompiledGrammar
from engine.grammar.sandbox import GrammarSandbox
from tests.grammars import compiled, sandbox_settings

GOOD = Grammar("json_schema", '{"type": "integer"}')
SLOW = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
PATIENCE_S = 60.0


class FakeClock:
    """A clock that goes on by `step_s` with each reading."""

    def __init__(self) -> None:
        self.now_s = self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(sandbox_settings(tmp_path, cpu_s_max=1), time.monotonic)
    yield compiler
    compiler.close()


def outcomes(compiler: GrammarCompiler, *names: str) -> dict[str, Outcome]:
    """Poll until all these requests have an outcome."""
    found: dict[str, Outcome] = {}
    until_s = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not set(names) <= set(found):
        assert time.monotonic() < until_s, f"only {sorted(found)}"
        found.update(compiler.take_ready())
        pause.wait(0.002)
    return found


def outcome_of(compiler: GrammarCompiler, name: str, grammar: Grammar) -> Outcome:
    """Submit a grammar of the payer and namespace n, and wait for its outcome."""
    compiler.submit(name, b"n", b"n", grammar)
    return outcomes(compiler, name)[name]


def integer_at_least(bound: int) -> Grammar:
    return Grammar("json_schema", f'{{"type": "integer", "minimum": {bound}}}')


def test_a_machine_without_room_for_a_process_refuses_for_now(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar is not at fault: a client tries again, and the refusal is not remembered."""

    def fail(*arguments: object, **settings: object) -> None:
        raise BlockingIOError(11, "no more processes")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", fail)
        refusal = outcome_of(compiler, "early", GOOD)

    assert isinstance(refusal, EngineUnavailable)
    assert refusal.code == "queue_full"
    assert isinstance(outcome_of(compiler, "late", GOOD), CompiledGrammar)


def test_a_tokenizer_that_cannot_be_read_early_is_the_first_grammars_refusal(
    compiler: GrammarCompiler, tmp_path: Path
) -> None:
    """The engine serves what needs no grammar."""
    (tmp_path / "tokenizer.json").write_text("{}")
    compiler.load()
    refusal = outcome_of(compiler, "a", GOOD)

    assert isinstance(refusal, RequestRefused)
    assert refusal.code == "grammar_unsupported"


def test_a_machine_without_room_for_a_thread_refuses_for_now(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own thread submits: an error would end the requests of all tenants."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(EngineUnavailable, match="thread"):
            compiler.submit("early", b"n", b"n", GOOD)

    assert isinstance(outcome_of(compiler, "late", GOOD), CompiledGrammar)


def test_a_grammar_that_is_erased_while_it_is_compiled_is_not_cached(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is the namespace's data. The request that waits for it goes on."""
    tried: list[Grammar] = []
    check = GrammarSandbox.check

    def count(sandbox: GrammarSandbox, grammar: Grammar) -> int:
        tried.append(grammar)
        return check(sandbox, grammar)

    monkeypatch.setattr(GrammarSandbox, "check", count)
    compiler.submit("before", b"n", b"n", GOOD)
    compiler.erase(b"n")
    found = outcomes(compiler, "before")["before"]
    found_again = outcome_of(compiler, "after", GOOD)

    assert isinstance(found, CompiledGrammar)
    assert isinstance(found_again, CompiledGrammar)
    assert tried == [GOOD, GOOD]


@pytest.mark.slow
def test_submit_does_not_wait(compiler: GrammarCompiler) -> None:
    """The engine's thread submits and polls within microseconds."""
    compiler.submit("bomb", b"n", b"n", SLOW)

    assert compiler.take_ready() == []
    found = outcomes(compiler, "bomb")["bomb"]
    assert isinstance(found, RequestRefused)
    assert found.code == "grammar_too_big"


def test_submit_refuses_a_source_that_is_too_long(compiler: GrammarCompiler) -> None:
    """No queue grows by a megabyte."""
    with pytest.raises(RequestRefused) as caught:
        compiler.submit("r", b"n", b"n", Grammar("regex", "a" * 200_000))

    assert caught.value.code == "grammar_too_big"


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [(GOOD, CompiledGrammar), pytest.param(SLOW, RequestRefused, marks=pytest.mark.slow)],
    ids=["good", "bomb"],
)
def test_a_second_request_gets_the_cached_outcome(
    compiler: GrammarCompiler, grammar: Grammar, kind: type
) -> None:
    """An agent sends the same schema a thousand times, and a bomb costs its second of processor
    time once."""
    first = outcome_of(compiler, "a", grammar)

    compiler.submit("b", b"n", b"n", grammar)

    assert compiler.take_ready() == [("b", first)]
    assert isinstance(first, kind)


def test_a_namespace_does_not_use_anothers_cached_grammar(compiler: GrammarCompiler) -> None:
    """A fast outcome would reveal that another tenant uses the schema."""
    compiler.submit("a", b"north", b"north", GOOD)
    outcomes(compiler, "a")

    compiler.submit("b", b"south", b"south", GOOD)

    assert compiler.take_ready() == []
    assert isinstance(outcomes(compiler, "b")["b"], CompiledGrammar)


def test_concurrent_equal_submissions_share_one_compilation(
    compiler: GrammarCompiler,
) -> None:
    for name in ("a", "b", "c"):
        compiler.submit(name, b"n", b"n", GOOD)

    found = outcomes(compiler, "a", "b", "c")

    assert found["a"] is found["b"] is found["c"]


def bomb(number: int) -> Grammar:
    return Grammar("json_schema", f'{{"type": "integer", "multipleOf": {999_983 - 2 * number}}}')


def test_a_payer_with_bombs_in_many_namespaces_delays_no_other_payer(
    compiler: GrammarCompiler,
) -> None:
    """A client makes namespaces at will. Its payer has one thread at a time, until the process that
    its bomb has ended is back; the other thread's process serves the others at once."""
    compiler.submit("warm", b"south", b"south", integer_at_least(0))
    outcomes(compiler, "warm")
    for number in range(4):
        compiler.submit(f"bomb{number}", b"north", b"north/%d" % number, bomb(number))
    rounds = []
    for number in range(1, 4):
        compiler.submit(f"good{number}", b"south", b"south", integer_at_least(number))
        rounds.append(outcomes(compiler, f"good{number}"))

    assert all(isinstance(r[f"good{n}"], CompiledGrammar) for n, r in enumerate(rounds, 1))
    assert "bomb1" not in set().union(*rounds)


def test_a_cancelled_request_gets_no_outcome(compiler: GrammarCompiler) -> None:
    """It may be cancelled before its grammar is compiled, meanwhile, and after."""
    for name in ("a", "b", "c"):
        compiler.submit(name, b"n", b"n", integer_at_least(ord(name)))
    compiler.cancel("c")
    outcomes(compiler, "a", "b")
    compiler.submit("d", b"n", b"n", integer_at_least(ord("a")))
    compiler.cancel("d")
    compiler.cancel("unknown")
    compiler.submit("e", b"n", b"n", GOOD)

    found = outcomes(compiler, "e")

    assert set(found) == {"e"}


@pytest.mark.slow
def test_a_grammar_without_a_request_is_not_compiled_further(compiler: GrammarCompiler) -> None:
    """Its client has left. The queue goes on, and a later request is tried afresh."""
    compiler.submit("bomb", b"n", b"n", SLOW)
    compiler.submit("good", b"n", b"n", GOOD)
    compiler.cancel("bomb")
    first = outcomes(compiler, "good")

    compiler.submit("bomb again", b"n", b"n", SLOW)
    assert compiler.take_ready() == []  # no refusal was cached
    again = outcomes(compiler, "bomb again")["bomb again"]

    assert set(first) == {"good"}
    assert isinstance(again, RequestRefused)


def test_the_queue_of_a_payer_is_bounded(compiler: GrammarCompiler) -> None:
    """In all its namespaces together."""
    compiler.submit("bomb", b"n", b"n", SLOW)
    compiler.submit("bomb of others", b"m", b"m", SLOW)  # counts for its own payer
    for number in range(WAITING_MAX - 1):
        namespace = b"n%d" % (number % 5)
        compiler.submit(f"r{number}", b"n", namespace, integer_at_least(number))

    with pytest.raises(EngineUnavailable) as caught:
        compiler.submit("one more", b"n", b"n9", GOOD)
    compiler.submit("of others", b"m", b"m", GOOD)

    assert caught.value.code == "queue_full"
    assert caught.value.message == (
        f"{WAITING_MAX} requests of this tenant wait for a grammar; limit {WAITING_MAX}."
    )


def is_taken(compiler: GrammarCompiler, number: int) -> bool:
    """Submit a grammar of the payer n; return whether its queue had room."""
    try:
        compiler.submit(f"r{number}", b"n", b"n", integer_at_least(number))
    except EngineUnavailable:
        return False
    return True


def test_the_queue_of_a_payer_is_bounded_in_seconds(tmp_path: Path) -> None:
    """Whose grammars take long may have few in the queue; others have the whole length."""
    clock = FakeClock()
    compiler = GrammarCompiler(sandbox_settings(tmp_path, cpu_s_max=1), clock)
    try:
        clock.step_s = QUEUE_S_MAX / 20  # between two readings
        outcome_of(compiler, "slow", GOOD)
        outcome_of(compiler, "next", integer_at_least(1))  # so the first one's time is known
        clock.step_s = 0.0
        compiler.submit("bomb", b"n", b"n", SLOW)
        refused = [number for number in range(2, 40) if not is_taken(compiler, number)]
        for number in range(20):
            compiler.submit(f"s{number}", b"m", b"m", integer_at_least(number))
    finally:
        compiler.close()

    assert 25 < len(refused) < 38


def test_mark_too_big_refuses_later_submissions(compiler: GrammarCompiler) -> None:
    outcome_of(compiler, "a", GOOD)

    compiler.mark_too_big(b"n", GOOD)
    compiler.submit("b", b"n", b"n", GOOD)

    ((_, outcome),) = compiler.take_ready()
    assert isinstance(outcome, EngineError)
    assert outcome.code == "grammar_too_big"


def test_close_ends_a_running_compilation(compiler: GrammarCompiler) -> None:
    """A stopping engine does not wait for a bomb."""
    others = set(threading.enumerate())  # of compilers that tests keep
    compiler.submit("bomb", b"n", b"n", SLOW)

    compiler.close()

    assert not [t for t in set(threading.enumerate()) - others if t.name.startswith("grammar-")]


# -- the cache --------------------------------------------------------------------------------


def test_the_cache_is_bounded_per_namespace_and_in_total() -> None:
    """One tenant's thousand schemas evict its own first."""
    cache, outcome = CompiledCache(), compiled(Grammar("regex", "a"))
    kept = Grammar("regex", "kept")
    cache.add(b"quiet", kept, outcome, 100)

    for number in range(NAMESPACE_ENTRIES_MAX + 20):
        cache.add(b"busy", Grammar("regex", f"{number}"), outcome, 100)

    assert cache.find(b"quiet", kept) is outcome
    assert len(cache) == NAMESPACE_ENTRIES_MAX + 1
    assert cache.find(b"busy", Grammar("regex", "0")) is None

    for number in range(ENTRIES_MAX + 20):
        cache.add(b"n%d" % number, kept, outcome, 100)

    assert len(cache) == ENTRIES_MAX
    assert cache.held_bytes == 100 * ENTRIES_MAX


def test_the_cache_is_bounded_by_bytes() -> None:
    """A few large grammars weigh as much as many small ones."""
    cache, outcome = CompiledCache(), compiled(Grammar("regex", "a"))

    for namespace in range(20):
        for number in range(4):
            cache.add(
                b"n%d" % namespace, Grammar("regex", f"{number}"), outcome, NAMESPACE_BYTES_MAX // 3
            )

    assert cache.held_bytes <= BYTES_MAX
    assert cache.find(b"n19", Grammar("regex", "0")) is None
    assert cache.find(b"n19", Grammar("regex", "3")) is outcome


def test_erasing_a_namespace_keeps_the_others() -> None:
    """The cache subtracts its bytes."""
    cache, outcome = CompiledCache(), compiled(Grammar("regex", "a"))
    for namespace in (b"north", b"south"):
        for number in range(3):
            cache.add(namespace, Grammar("regex", f"{number}"), outcome, 10)

    cache.erase(b"north")
    cache.erase(b"nowhere")

    assert cache.find(b"north", Grammar("regex", "1")) is None
    assert cache.find(b"south", Grammar("regex", "1")) is outcome
    assert cache.held_bytes == 30


def test_evicts_the_least_recently_used_grammar() -> None:
    cache, outcome = CompiledCache(), compiled(Grammar("regex", "a"))
    grammars = [Grammar("regex", f"{number}") for number in range(NAMESPACE_ENTRIES_MAX)]
    for grammar in grammars:
        cache.add(b"n", grammar, outcome, 1)

    cache.find(b"n", grammars[0])
    cache.add(b"n", Grammar("regex", "new"), outcome, 1)

    assert cache.find(b"n", grammars[0]) is outcome
    assert cache.find(b"n", grammars[1]) is None
