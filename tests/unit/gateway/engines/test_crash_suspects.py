"""`CrashSuspects`: two deaths make a suspect, a death alone is proof, a finished try clears."""

from __future__ import annotations

import msgspec
import pytest

from engine.api import CacheGrant, Request
from engine.client.client import LostRequest
from engine.errors import RequestRefused
from gateway.engines.crash_suspects import REMEMBER_S, REQUESTS_MAX, TRY_TOKENS, CrashSuspects


def request(name: str, token: int = 1, samples: int = 1) -> Request:
    return Request(name, (token, 2, 3), 100, CacheGrant(b"n"), samples=samples)


def lost(name: str, token: int, output_tokens: int = 0, samples: int = 1) -> LostRequest:
    return LostRequest(request(name, token, samples), output_tokens)


class Deaths:
    """Suspects with a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.suspects = CrashSuspects(lambda: self.now_s)

    def isolated(self, token: int) -> int:
        return self.suspects.isolate(request("again", token)).isolated_tokens

    def suspect(self, token: int, output_tokens: int = 0) -> None:
        """Make a request a suspect, beside a different one at each death."""
        for beside in (1_000, 2_000):
            self.suspects.record_death([lost("a", token, output_tokens), lost("b", beside)])

    def die_alone(self, token: int) -> list[str]:
        """Let the engine die while it tries a request alone."""
        tried = self.suspects.isolate(request("alone", token))
        return self.suspects.record_death([LostRequest(tried, 0)])


def test_a_request_in_a_step_at_two_deaths_is_tried_alone() -> None:
    """The requests beside it are not suspected."""
    deaths = Deaths()
    deaths.suspect(7, 5)

    assert deaths.isolated(7) == TRY_TOKENS
    assert [deaths.isolated(token) for token in (1_000, 2_000, 8)] == [0, 0, 0]


def test_a_try_alone_is_longer_after_each_death() -> None:
    """A batch that was long under way at two deaths shall not be alone, one by one, as long."""
    deaths = Deaths()
    deaths.suspect(7, 200)
    tries = [deaths.isolated(7)]
    for _ in range(3):
        deaths.suspects.record_death([lost("a", 7, 190), lost("b", 1)])
        tries.append(deaths.isolated(7))

    assert tries == [16, 64, 101, 101]


def test_one_death_makes_no_suspect() -> None:
    """Nor two with a death between them at which other requests ran."""
    deaths = Deaths()
    deaths.suspects.record_death([lost("a", 7)])
    once = deaths.isolated(7)
    deaths.suspects.record_death([lost("b", 8)])
    deaths.suspects.record_death([lost("a", 7)])

    assert (once, deaths.isolated(7)) == (0, 0)


def test_a_death_without_a_step_says_nothing() -> None:
    deaths = Deaths()
    deaths.suspects.record_death([lost("a", 7)])
    deaths.suspects.record_death([])
    deaths.suspects.record_death([lost("a", 7)])

    assert deaths.isolated(7) > 0


def test_a_death_alone_is_proof_for_ten_minutes() -> None:
    deaths = Deaths()
    deaths.suspect(7)

    assert deaths.die_alone(7) == ["alone"]

    with pytest.raises(RequestRefused) as refused:
        deaths.isolated(7)
    assert refused.value.code == "poison_request"
    deaths.now_s = REMEMBER_S
    assert deaths.isolated(7) == 0


def test_a_death_beside_others_is_no_proof() -> None:
    """The isolated request waited, or was past its isolated tokens."""
    deaths = Deaths()
    deaths.suspect(7, 5)
    tried = deaths.suspects.isolate(request("tried", 7))

    assert deaths.suspects.record_death([lost("other", 8)]) == []
    assert deaths.suspects.record_death([LostRequest(tried, TRY_TOKENS)]) == []
    assert deaths.isolated(7) > 0


def test_a_finished_try_clears() -> None:
    """It takes two further deaths to suspect the request again."""
    deaths = Deaths()
    deaths.suspect(7)

    deaths.suspects.clear([request("tried", 7)])
    cleared = deaths.isolated(7)
    deaths.suspects.record_death([lost("a", 7), lost("b", 1)])

    assert (cleared, deaths.isolated(7)) == (0, 0)


def test_a_suspicion_ends_by_itself() -> None:
    deaths = Deaths()
    deaths.suspect(7)
    deaths.now_s = REMEMBER_S

    assert deaths.isolated(7) == 0


def test_output_counts_for_each_sample() -> None:
    """Sixteen samples reach a token together: after a first token of each, the step is no longer
    their own.
    """
    deaths = Deaths()
    deaths.suspect(7)
    tried = msgspec.structs.replace(deaths.suspects.isolate(request("tried", 7)), samples=16)

    assert deaths.suspects.record_death([LostRequest(tried, 16 * TRY_TOKENS)]) == []
    assert deaths.suspects.record_death([LostRequest(tried, 16 * TRY_TOKENS - 1)]) == ["tried"]


def test_the_memory_of_suspects_is_bounded() -> None:
    """A batch of thousands was in a step at two deaths: the oldest are forgotten."""
    deaths = Deaths()
    batch = [lost(str(token), token) for token in range(REQUESTS_MAX + 10)]
    deaths.suspects.record_death(batch)
    deaths.suspects.record_death(batch)

    assert deaths.isolated(0) == 0
    assert deaths.isolated(REQUESTS_MAX + 9) > 0
