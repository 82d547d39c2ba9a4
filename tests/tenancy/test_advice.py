"""Advice in money: which retention pays, and what more room would save."""

from __future__ import annotations

import pytest

from tenancy.advice import PROMPTS_MIN, ClassAdvice, advise_classes, advise_sizes
from tenancy.pricing import RateCard
from tenancy.reuse import ReuseSampler

CARD = RateCard("c", input=1_000, cache_read=100, cache_write={"5m": 1_250, "1h": 2_000})
CLASSES = {"1h": 3_600.0, "5m": 300.0}


def used(gap_s: float, times: int) -> ReuseSampler:
    """A hundred blocks, each used this often, this far apart."""
    sampler = ReuseSampler()
    for turn in range(times):
        sampler.use(list(range(100)), gap_s * turn, [1] * 100)
    return sampler


def classes(gap_s: float, times: int, card: RateCard = CARD) -> list[ClassAdvice]:
    """Advice from as many prompts."""
    return advise_classes(used(gap_s, times), times, CLASSES, card)


def test_the_shorter_class_pays_for_quick_returns_and_the_longer_one_costs_more() -> None:
    """Most uses are reads: both save, the cheaper write saves more."""
    five, hour = classes(10.0, 100)

    assert (five.retention, five.hit_ratio) == ("5m", 0.99)
    assert five.saving_pico == 900 * 990_000 - 250 * 10_000
    assert hour.saving_pico == 900 * 990_000 - 1_000 * 10_000
    assert five.verdict == hour.verdict == "pays"


def test_a_class_that_is_too_short_loses_money() -> None:
    """Half an hour between uses: five minutes writes each time, an hour reads."""
    five, hour = classes(1_800.0, 100)

    assert (five.hit_ratio, five.verdict) == (0.0, "loses")
    assert five.saving_pico == -250 * 1_000_000
    assert hour.verdict == "pays"


@pytest.mark.parametrize(
    ("prompts", "verdict"), [(2, "too_few"), (PROMPTS_MIN - 1, "too_few"), (PROMPTS_MIN, "pays")]
)
def test_a_handful_of_prompts_has_no_verdict(prompts: int, verdict: str) -> None:
    """The number is there, with an error as large as it has to be."""
    five, _ = classes(10.0, prompts)

    assert five.hit_ratio == pytest.approx(1 - 1 / prompts)
    assert five.verdict == verdict


def test_the_error_is_that_of_the_prompts_and_falls_with_their_number() -> None:
    """All blocks are followed here: the error is not of the sample but of the few prompts. That all
    were alike so far is no certainty."""
    errors = [classes(10.0, times)[0].error for times in (2, 10, 100, 1_000)]
    never, _ = classes(1_800.0, 100)

    assert errors == sorted(errors, reverse=True)
    assert errors[0] == 0.25
    assert 0.005 < errors[2] < 0.02
    assert 0.005 < never.error < 0.02
    assert never.error_pico == round(never.error * 1_150 * 1_000_000)


def test_what_lies_within_its_error_is_unclear() -> None:
    """Returns that are just about worth their writes."""
    card = RateCard("c", input=1_000, cache_read=100, cache_write={"5m": 9_000, "1h": 9_000})
    sampler = ReuseSampler()
    for turn in range(400):
        sampler.use([turn // 9], 1.0 * turn)

    five, _ = advise_classes(sampler, 400, CLASSES, card)

    assert 0.88 < five.hit_ratio < 0.9
    assert abs(five.saving_pico) < 2 * five.error_pico
    assert five.verdict == "unclear"


def test_more_room_saves_until_everything_fits() -> None:
    """A hundred blocks in turn: a cache of 64 holds none of them when they come back."""
    small, large = advise_sizes(used(1.0, 100), 100, [64, 256], CARD)

    assert small.saving_pico == 0
    assert large.hit_ratio == 0.99
    assert large.saving_pico == 900 * 990_000
    assert small.error_pico == round(small.error * 900 * 1_000_000) > 0


def test_without_prices_nothing_is_called_a_saving() -> None:
    """Free tokens save nothing: the advice says so."""
    five, _ = classes(10.0, 100, RateCard("free"))

    assert (five.saving_pico, five.verdict) == (0, "unclear")
