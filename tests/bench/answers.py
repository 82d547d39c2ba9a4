"""One prompt through a core with levels: its answer, and where its prefix came from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from engine.api import CacheGrant, Fidelity, Finished, Request, Sampling, Started, Tokens
from engine.core.core import Core
from engine.statistics import LevelStats

PATIENCE_S = 600.0
POLL_S = 0.0005


class Answer(Struct):
    """The tokens of an answer, the seconds to the first one, and what was found of its prompt.

    `not_loaded`: why what a level had was not loaded.
    """

    name: str
    tokens: list[int] = []
    first_s: float = 0.0
    cached: int = 0
    loaded: dict[str, int] = {}
    fidelity: Fidelity = "exact"
    not_loaded: str = ""


def ask(
    core: Core,
    name: str,
    tokens: Sequence[int],
    grant: CacheGrant,
    output: int,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Answer one prompt greedily; nothing else runs. Raises TimeoutError."""
    answer, began_s, until_s = Answer(name), clock(), time.monotonic() + PATIENCE_S
    core.submit(Request(name, tuple(tokens), output, grant, Sampling(temperature=0)))
    while time.monotonic() < until_s:
        for event in core.step():
            if isinstance(event, Started):
                answer.cached, answer.loaded = event.cached_tokens, dict(event.loaded_tokens)
                answer.fidelity = event.fidelity
                answer.not_loaded = event.wait.cause if event.wait is not None else ""
            elif isinstance(event, Tokens):
                answer.first_s = answer.first_s or clock() - began_s
                answer.tokens += [token.token_id for token in event.tokens]
            elif isinstance(event, Finished):
                assert event.ending == "done", event
                return answer
        if core.is_waiting_for_levels:
            time.sleep(POLL_S)
    raise TimeoutError(f"{name}: no answer in {PATIENCE_S:g} s")


def wait_until(core: Core, holds: Callable[[], bool]) -> None:
    """Run until something holds. Raises TimeoutError."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        core.step()
        if holds():
            return
        if time.monotonic() > until_s:
            raise TimeoutError(f"{core.stats().levels}")
        time.sleep(POLL_S)


def wait_for_level(core: Core, name: str, records: int) -> LevelStats:
    """Run until a level is open and has so many records; return its statistics. Raises
    TimeoutError."""

    def found() -> LevelStats | None:
        levels = (one for one in core.stats().levels if one.name == name)
        return next((one for one in levels if one.state == "open" and one.blocks >= records), None)

    wait_until(core, lambda: found() is not None)
    level = found()
    assert level is not None
    return level
