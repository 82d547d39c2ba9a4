"""Lines, threads and caches of grammars: who waits for whom, and who learns what of whom."""

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
    """Look until all of these are ready."""
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


def test_asking_does_not_wait(compiler: GrammarCompiler) -> None:
    """The engine's thread has steps to make: it asks and looks, in microseconds."""
    compiler.submit("bomb", b"n", SLOW)

    assert compiler.take_ready() == []
    found = outcomes(compiler, "bomb")["bomb"]
    assert isinstance(found, RequestRefused)
    assert found.code == "grammar_too_big"


def test_what_is_too_long_is_refused_where_it_is_asked(compiler: GrammarCompiler) -> None:
    """Nobody's line grows by a megabyte."""
    with pytest.raises(RequestRefused) as caught:
        compiler.submit("r", b"n", Grammar("regex", "a" * 200_000))

    assert caught.value.code == "grammar_too_big"


def test_a_second_request_finds_what_the_first_had_compiled(compiler: GrammarCompiler) -> None:
    """An agent sends the same schema a thousand times."""
    compiler.submit("a", b"n", GOOD)
    first = outcomes(compiler, "a")["a"]

    compiler.submit("b", b"n", GOOD)

    assert compiler.take_ready() == [("b", first)]
    assert isinstance(first, CompiledGrammar)


def test_a_refusal_is_remembered_too(compiler: GrammarCompiler) -> None:
    """The same bomb costs its second of computing once."""
    compiler.submit("a", b"n", SLOW)
    first = outcomes(compiler, "a")["a"]

    compiler.submit("b", b"n", SLOW)

    assert compiler.take_ready() == [("b", first)]


def test_one_namespace_does_not_find_what_another_compiled(compiler: GrammarCompiler) -> None:
    """A schema that comes back at once would tell that somebody else uses it."""
    compiler.submit("a", b"north", GOOD)
    outcomes(compiler, "a")

    compiler.submit("b", b"south", GOOD)

    assert compiler.take_ready() == []
    assert isinstance(outcomes(compiler, "b")["b"], CompiledGrammar)


def test_those_who_ask_at_once_for_the_same_share_one_compilation(
    compiler: GrammarCompiler,
) -> None:
    """A burst of equal requests is one grammar."""
    for name in ("a", "b", "c"):
        compiler.submit(name, b"n", GOOD)

    found = outcomes(compiler, "a", "b", "c")

    assert found["a"] is found["b"] is found["c"]


def test_a_namespace_with_bombs_holds_up_nobody_else(compiler: GrammarCompiler) -> None:
    """It has one thread at a time; the other is for those who wait behind it."""
    for bound in range(4):
        bomb = Grammar("json_schema", f'{{"type": "integer", "multipleOf": {999_983 - bound}}}')
        compiler.submit(f"bomb{bound}", b"north", bomb)
    compiler.submit("good", b"south", GOOD)

    found = outcomes(compiler, "good")

    assert isinstance(found["good"], CompiledGrammar)
    assert "bomb3" not in found


def test_who_left_gets_no_outcome(compiler: GrammarCompiler) -> None:
    """Before it is compiled, while it is, and after: nobody answers for it."""
    for name in ("a", "b", "c"):
        compiler.submit(name, b"n", integer_at_least(ord(name)))
    compiler.cancel("c")
    outcomes(compiler, "a", "b")
    compiler.submit("d", b"n", integer_at_least(ord("a")))
    compiler.cancel("d")
    compiler.cancel("nobody")
    compiler.submit("e", b"n", GOOD)

    found = outcomes(compiler, "e")

    assert set(found) == {"e"}


def test_a_line_is_bounded(compiler: GrammarCompiler) -> None:
    """Who asks for more than can be compiled is told to come back."""
    compiler.submit("bomb", b"n", SLOW)
    for number in range(WAITING_MAX - 1):
        compiler.submit(f"r{number}", b"n", integer_at_least(number))

    with pytest.raises(EngineUnavailable) as caught:
        compiler.submit("one more", b"n", GOOD)
    compiler.submit("of others", b"m", GOOD)

    assert caught.value.code == "queue_full"


def test_what_proved_too_big_is_refused_from_then_on(compiler: GrammarCompiler) -> None:
    """The next one with it need not find out for itself."""
    compiler.submit("a", b"n", GOOD)
    outcomes(compiler, "a")

    compiler.mark_too_big(b"n", GOOD)
    compiler.submit("b", b"n", GOOD)

    ((_, outcome),) = compiler.take_ready()
    assert isinstance(outcome, EngineError)
    assert outcome.code == "grammar_too_big"


def test_closing_ends_what_is_being_compiled(compiler: GrammarCompiler) -> None:
    """An engine that stops does not wait for a bomb."""
    compiler.submit("bomb", b"n", SLOW)

    compiler.close()

    assert not [t for t in threading.enumerate() if t.name.startswith("grammar-")]


# -- the cache --------------------------------------------------------------------------------


def test_the_cache_is_bounded_by_namespace_and_in_all() -> None:
    """One tenant's thousand schemas push out its own first."""
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


def test_a_namespace_is_forgotten_alone() -> None:
    """Its neighbours keep theirs, and the bytes are counted back."""
    cache, outcome = CompiledCache(), compiled(Grammar("regex", "a"))
    for namespace in (b"north", b"south"):
        for number in range(3):
            cache.add(namespace, Grammar("regex", f"{number}"), outcome, 10)

    cache.erase(b"north")
    cache.erase(b"nowhere")

    assert cache.find(b"north", Grammar("regex", "1")) is None
    assert cache.find(b"south", Grammar("regex", "1")) is outcome
    assert cache.held_bytes == 30


def test_what_is_used_stays() -> None:
    """Least recently used goes first."""
    cache, outcome = CompiledCache(), compiled(Grammar("regex", "a"))
    grammars = [Grammar("regex", f"{number}") for number in range(NAMESPACE_ENTRIES_MAX)]
    for grammar in grammars:
        cache.add(b"n", grammar, outcome, 1)

    cache.find(b"n", grammars[0])
    cache.add(b"n", Grammar("regex", "new"), outcome, 1)

    assert cache.find(b"n", grammars[0]) is outcome
    assert cache.find(b"n", grammars[1]) is None
