"""Advice in money: which retention pays, and what more room would save."""

from __future__ import annotations

from tenancy.advice import advise_classes, advise_sizes
from tenancy.pricing import RateCard
from tenancy.reuse import ReuseSampler

CARD = RateCard("c", input=1_000, cache_read=100, cache_write={"5m": 1_250, "1h": 2_000})
CLASSES = {"1h": 3_600.0, "5m": 300.0}


def used(gap_s: float, times: int) -> ReuseSampler:
    """A hundred blocks, each used this often, this far apart."""
    sampler = ReuseSampler()
    for turn in range(times):
        sampler.use(range(100), gap_s * turn)
    return sampler


def test_the_shorter_class_pays_for_quick_returns_and_the_longer_one_costs_more() -> None:
    """Nine of ten uses are reads: both save, the cheaper write saves more."""
    five, hour = advise_classes(used(10.0, 10), CLASSES, CARD)

    assert (five.retention, five.hit_ratio) == ("5m", 0.9)
    assert five.saving_pico == 900 * 900_000 - 250 * 100_000
    assert hour.saving_pico == 900 * 900_000 - 1_000 * 100_000
    assert five.verdict == hour.verdict == "pays"


def test_a_class_that_is_too_short_loses_money() -> None:
    """Half an hour between uses: five minutes writes each time, an hour reads."""
    five, hour = advise_classes(used(1_800.0, 10), CLASSES, CARD)

    assert (five.hit_ratio, five.verdict) == (0.0, "loses")
    assert five.saving_pico == -250 * 1_000_000
    assert hour.verdict == "pays"


def test_more_room_saves_until_everything_fits() -> None:
    """A hundred blocks in turn: a cache of 64 holds none of them when they come back."""
    small, large = advise_sizes(used(1.0, 10), [64, 256], CARD)

    assert small.saving_pico == 0
    assert large.hit_ratio == 0.9
    assert large.saving_pico == 900 * 900_000


def test_without_prices_nothing_is_called_a_saving() -> None:
    """Free tokens save nothing: the advice says so."""
    five, _ = advise_classes(used(10.0, 10), CLASSES, RateCard("free"))

    assert (five.saving_pico, five.verdict) == (0, "unclear")
