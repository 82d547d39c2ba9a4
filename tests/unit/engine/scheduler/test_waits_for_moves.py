"""A sequence that waits until moves let blocks go asks the levels once what they have of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from engine.scheduler.loading import Loading


class CountedLevels:
    """Levels that have 32 tokens of every prompt, and count the questions."""

    def __init__(self) -> None:
        self.questions = 0

    def stored_tokens(self, *_: object) -> tuple[tuple[str, int], ...]:
        """Return what is known below the device."""
        self.questions += 1
        return (("host", 32),)


def waiting(sequence_id: int) -> Any:
    """Return a sequence, as far as the question needs it."""
    grant = SimpleNamespace(namespace=b"one")
    parent = SimpleNamespace(request=SimpleNamespace(grant=grant))
    return SimpleNamespace(sequence_id=sequence_id, parent=parent, tokens=(1,) * 48)


def test_the_turns_of_a_wait_ask_once_and_another_sequence_or_prefix_anew() -> None:
    """A question walks all copies of a prompt, and a wait has hundreds of turns."""
    levels, nothing = CountedLevels(), cast("Any", None)
    loading = Loading(cast("Any", levels), nothing, nothing, nothing)
    here, further = (cast("Any", SimpleNamespace(cached_tokens=n)) for n in (0, 16))

    assert all(loading.may_load(waiting(0), here, float(turn)) for turn in range(100))
    assert levels.questions == 1
    loading.may_load(waiting(0), further, 100.0)
    loading.may_load(waiting(1), further, 101.0)
    assert levels.questions == 3
