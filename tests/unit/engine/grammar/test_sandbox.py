"""The sandbox: a grammar that breaks the compiler breaks only a child process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api import Grammar
from engine.errors import RequestRefused
from engine.grammar.sandbox import GrammarSandbox
from tests.grammars import sandbox_settings

GOOD = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')

SLOW = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
"""Nine seconds and 360 MB in llguidance 1.9, without a drop of its fuel."""

LARGE = Grammar("regex", r"\p{L}" * 20_000)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarSandbox]:
    folder = tmp_path_factory.mktemp("trial")
    trial = GrammarSandbox(sandbox_settings(folder, cpu_s_max=1), time.monotonic)
    yield trial
    trial.close()


def refused(trial: GrammarSandbox, grammar: Grammar) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        trial.check(grammar)
    return caught.value


def test_a_valid_grammar_passes_with_its_size(trial: GrammarSandbox) -> None:
    """The cache counts bytes."""
    assert 0 < trial.check(GOOD) < 64 * 2**20


def test_a_refusal_passes_unchanged_through_the_process(trial: GrammarSandbox) -> None:
    error = refused(trial, Grammar("regex", "(a"))

    assert error.code == "grammar_invalid"
    assert "unclosed group" in error.message


@pytest.mark.parametrize("bomb", [SLOW, LARGE], ids=["slow", "large"])
def test_a_bomb_kills_its_process_and_the_next_grammar_gets_a_new_one(
    trial: GrammarSandbox, bomb: Grammar
) -> None:
    """The kernel bounds time and memory, where the library's own count does not."""
    error = refused(trial, bomb)

    assert error.code == "grammar_too_big"
    assert trial.check(GOOD) > 0


def test_a_process_that_died_between_two_grammars_is_no_fault_of_the_next(
    trial: GrammarSandbox,
) -> None:
    """The out-of-memory killer may take an idle one."""
    trial.check(GOOD)
    trial.kill()
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)

    assert trial.check(GOOD) > 0


def test_a_killed_process_gets_no_further_grammar(trial: GrammarSandbox) -> None:
    """It may take a while to die: a grammar of another tenant would be refused for its death."""
    for _ in range(3):
        trial.check(GOOD)
        trial.kill()

        assert trial.check(GOOD) > 0


def test_the_bounds_on_time_and_memory_each_apply(tmp_path: Path) -> None:
    """The slow bomb exceeds either; with little memory it has no time to be slow."""
    settings = sandbox_settings(tmp_path, memory_mib_max=16, cpu_s_max=60)
    trial = GrammarSandbox(settings, time.monotonic)

    error = refused(trial, SLOW)
    trial.close()

    assert error.code == "grammar_too_big"


def test_an_unusable_tokenizer_is_not_reported_as_an_invalid_grammar(tmp_path: Path) -> None:
    settings = sandbox_settings(tmp_path)
    Path(settings.tokenizer_path).write_text("{}")
    trial = GrammarSandbox(settings, time.monotonic)

    error = refused(trial, GOOD)

    assert error.code == "grammar_unsupported"


def test_closing_twice_is_allowed(tmp_path: Path) -> None:
    """An engine may end before its first grammar, and after its last."""
    trial = GrammarSandbox(sandbox_settings(tmp_path), time.monotonic)

    trial.close()
    assert trial.check(GOOD) > 0
    trial.kill()
    trial.close()
    trial.close()
