"""The grammar compiler: queues, threads and caches, and isolation between namespaces."""

from __future__ import annotations

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
    WAITING_MAX,
    CompiledCache,
    GrammarCompiler,
    Outcome,
)
from engine.grammar.grammar import CompiledGrammar
from engine.grammar.sandbox import SandboxSettings
from tests.grammars import VOCAB, compiled, schema_file

GOOD = Grammar("json_schema", '{"type": "integer"}')
SLOW = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
PATIENCE_S = 60.0


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[GrammarCompiler]:
    settings = SandboxSettings(str(schema_file(tmp_path)), VOCAB, (VOCAB - 1,), cpu_s_max=1)
    compiler = GrammarCompiler(settings, time.monotonic)
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


def integer_at_least(bound: int) -> Grammar:
    return Grammar("json_schema", f'{{"type": "integer", "minimum": {bound}}}')


def test_submit_does_not_wait(compiler: GrammarCompiler) -> None:
    """The engine's thread submits and polls within microseconds."""
    compiler.submit("bomb", b"n", SLOW)

    assert compiler.take_ready() == []
    found = outcomes(compiler, "bomb")["bomb"]
    assert isinstance(found, RequestRefused)
    assert found.code == "grammar_too_big"


def test_submit_refuses_a_source_that_is_too_long(compiler: GrammarCompiler) -> None:
    """No queue grows by a megabyte."""
    with pytest.raises(RequestRefused) as caught:
        compiler.submit("r", b"n", Grammar("regex", "a" * 200_000))

    assert caught.value.code == "grammar_too_big"


def test_a_second_request_uses_the_cached_grammar(compiler: GrammarCompiler) -> None:
    """An agent sends the same schema a thousand times."""
    compiler.submit("a", b"n", GOOD)
    first = outcomes(compiler, "a")["a"]

    compiler.submit("b", b"n", GOOD)

    assert compiler.take_ready() == [("b", first)]
    assert isinstance(first, CompiledGrammar)


def test_a_refusal_is_cached(compiler: GrammarCompiler) -> None:
    """The same bomb costs its second of processor time once."""
    compiler.submit("a", b"n", SLOW)
    first = outcomes(compiler, "a")["a"]

    compiler.submit("b", b"n", SLOW)

    assert compiler.take_ready() == [("b", first)]


def test_a_namespace_does_not_use_anothers_cached_grammar(compiler: GrammarCompiler) -> None:
    """A fast outcome would reveal that another tenant uses the schema."""
    compiler.submit("a", b"north", GOOD)
    outcomes(compiler, "a")

    compiler.submit("b", b"south", GOOD)

    assert compiler.take_ready() == []
    assert isinstance(outcomes(compiler, "b")["b"], CompiledGrammar)


def test_concurrent_equal_submissions_share_one_compilation(
    compiler: GrammarCompiler,
) -> None:
    for name in ("a", "b", "c"):
        compiler.submit(name, b"n", GOOD)

    found = outcomes(compiler, "a", "b", "c")

    assert found["a"] is found["b"] is found["c"]


def test_a_namespace_with_bombs_delays_no_other_namespace(compiler: GrammarCompiler) -> None:
    """It has one thread at a time; the other thread serves the other namespaces."""
    for bound in range(4):
        bomb = Grammar("json_schema", f'{{"type": "integer", "multipleOf": {999_983 - bound}}}')
        compiler.submit(f"bomb{bound}", b"north", bomb)
    compiler.submit("good", b"south", GOOD)

    found = outcomes(compiler, "good")

    assert isinstance(found["good"], CompiledGrammar)
    assert "bomb3" not in found


def test_a_cancelled_request_gets_no_outcome(compiler: GrammarCompiler) -> None:
    """It may be cancelled before its grammar is compiled, meanwhile, and after."""
    for name in ("a", "b", "c"):
        compiler.submit(name, b"n", integer_at_least(ord(name)))
    compiler.cancel("c")
    outcomes(compiler, "a", "b")
    compiler.submit("d", b"n", integer_at_least(ord("a")))
    compiler.cancel("d")
    compiler.cancel("unknown")
    compiler.submit("e", b"n", GOOD)

    found = outcomes(compiler, "e")

    assert set(found) == {"e"}


def test_the_queue_of_a_namespace_is_bounded(compiler: GrammarCompiler) -> None:
    compiler.submit("bomb", b"n", SLOW)
    for number in range(WAITING_MAX - 1):
        compiler.submit(f"r{number}", b"n", integer_at_least(number))

    with pytest.raises(EngineUnavailable) as caught:
        compiler.submit("one more", b"n", GOOD)
    compiler.submit("of others", b"m", GOOD)

    assert caught.value.code == "queue_full"


def test_mark_too_big_refuses_later_submissions(compiler: GrammarCompiler) -> None:
    compiler.submit("a", b"n", GOOD)
    outcomes(compiler, "a")

    compiler.mark_too_big(b"n", GOOD)
    compiler.submit("b", b"n", GOOD)

    ((_, outcome),) = compiler.take_ready()
    assert isinstance(outcome, EngineError)
    assert outcome.code == "grammar_too_big"


def test_close_ends_a_running_compilation(compiler: GrammarCompiler) -> None:
    """A stopping engine does not wait for a bomb."""
    compiler.submit("bomb", b"n", SLOW)

    compiler.close()

    assert not [t for t in threading.enumerate() if t.name.startswith("grammar-")]


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
