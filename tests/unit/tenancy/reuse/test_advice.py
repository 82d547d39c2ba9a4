"""Advice: which retention pays, and what a larger cache would save."""

from __future__ import annotations

import msgspec
import pytest

from tenancy.pricing.charges import RateCard
from tenancy.reuse.advice import ClassAdvice, ClassTerms, advise_classes, advise_sizes
from tenancy.reuse.miss_ratio_curve import ReuseSampler
from tenancy.reuse.reuse_intervals import PROMPTS_MIN

CARD = RateCard("c", input=1_000, cache_read=100, cache_write={"5m": 1_250, "1h": 2_000})
CLASSES = {"1h": ClassTerms(3_600.0, "1h"), "5m": ClassTerms(300.0, "5m")}
SPANS = [kept.seconds for kept in CLASSES.values()]


def used(gap_s: float, times: int) -> ReuseSampler:
    """Return a sampler with a hundred blocks, each used `times` times, `gap_s` apart."""
    sampler = ReuseSampler(spans=SPANS)
    sampler.use([1_000], -2 * 3_600.0, [1])  # observed for long enough
    for turn in range(times):
        sampler.use(list(range(100)), gap_s * turn, [1] * 100)
    return sampler


def classes(gap_s: float, times: int, card: RateCard = CARD) -> list[ClassAdvice]:
    """Return advice for these uses."""
    return advise_classes(used(gap_s, times), CLASSES, card)


def test_shorter_class_saves_more_for_quick_returns() -> None:
    """Most uses are reads: both save, and the cheaper write saves more."""
    five, hour = classes(10.0, 100)

    assert (five.retention, five.hit_ratio) == ("5m", 0.99)
    assert five.saving_pico == 900 * 990_000 - 250 * 10_000
    assert hour.saving_pico == 900 * 990_000 - 1_000 * 10_000
    assert five.verdict == hour.verdict == "pays"


def test_too_short_class_loses() -> None:
    """Half an hour between uses: five minutes write each time, an hour reads."""
    five, hour = classes(1_800.0, 100)

    assert (five.hit_ratio, five.verdict) == (0.0, "loses")
    assert five.saving_pico == -250 * 1_000_000
    assert hour.verdict == "pays"


@pytest.mark.parametrize(
    ("prompts", "verdict"), [(2, "too_few"), (PROMPTS_MIN - 1, "too_few"), (PROMPTS_MIN, "pays")]
)
def test_few_prompts_have_no_verdict(prompts: int, verdict: str) -> None:
    """The number is there, with a large error."""
    five, _ = classes(10.0, prompts)

    assert five.hit_ratio == pytest.approx(1 - 1 / prompts, rel=0.01)
    assert five.verdict == verdict


def test_error_falls_with_the_number_of_prompts() -> None:
    """All blocks are sampled, so the error comes from the few prompts. Equal prompts are no
    certainty."""
    errors = [classes(10.0, times)[0].error for times in (2, 10, 100, 1_000)]
    never, _ = classes(1_800.0, 100)

    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(0.25, rel=0.01)
    assert 0.005 < errors[2] < 0.02
    assert 0.005 < never.error < 0.02
    assert never.error_pico == round(never.error * 1_150 * 1_000_000)


def test_class_observed_too_briefly_never_loses() -> None:
    """Half an hour after the start, chats may still return. A class that pays already would only
    pay more."""
    rare, often = ReuseSampler(spans=SPANS), ReuseSampler(spans=SPANS)
    for turn in range(180):
        rare.use(list(range(20 * turn, 20 * turn + 20)), 10.0 * turn, [1] * 20)
        often.use(list(range(100)), 10.0 * turn, [1] * 100)

    five, hour = advise_classes(rare, CLASSES, CARD)
    _, paying = advise_classes(often, CLASSES, CARD)

    assert (five.verdict, five.is_early) == ("loses", False)
    assert (hour.verdict, hour.is_early) == ("too_few", True)
    assert (paying.verdict, paying.is_early) == ("pays", True)


def test_holding_costs_the_cards_storage_price() -> None:
    """A hundred blocks every ten seconds are held ten seconds per use, and after the last one to
    the end of the class. Unpromised blocks are held as best effort."""
    card = msgspec.structs.replace(CARD, storage={"1h": 36_000, "best_effort": 3_600_000})
    classes_ = {**CLASSES, "day": ClassTerms(300.0, "best_effort")}
    sampler = used(10.0, 1_000)

    five, day, hour = advise_classes(sampler, classes_, card)
    free = {one.retention: one for one in advise_classes(sampler, classes_, CARD)}

    assert five == free["5m"]
    held_s = 0.999 * 10 + 0.001 * 3_600
    assert hour.saving_pico == pytest.approx(free["1h"].saving_pico - held_s * 10 * 1e6, rel=1e-3)
    assert hour.error_pico > free["1h"].error_pico
    assert free["day"].verdict == "pays"
    assert day.verdict == "loses"


def test_saving_within_its_error_is_unclear() -> None:
    card = RateCard("c", input=1_000, cache_read=100, cache_write={"5m": 9_000, "1h": 9_000})
    sampler = ReuseSampler(spans=SPANS)
    for turn in range(800):
        first = 40 * (turn // 9)
        sampler.use(list(range(first, first + 40)), 1.0 * turn, [1] * 40)

    five, _ = advise_classes(sampler, CLASSES, card)

    assert 0.88 < five.hit_ratio < 0.9
    assert abs(five.saving_pico) < 2 * five.error_pico
    assert five.verdict == "unclear"


def test_larger_cache_saves_until_everything_fits() -> None:
    """A hundred blocks in turn: a cache of 64 holds none of them when they return."""
    small, large = advise_sizes(used(1.0, 100), [64, 256], 64, CARD)

    assert small.saving_pico == 0
    assert large.hit_ratio == pytest.approx(0.99, rel=0.001)
    assert large.saving_pico == round(large.hit_ratio * 900 * 1_000_000)
    assert small.error_pico == round(small.error * 900 * 1_000_000) > 0
    assert (small.more_pico, small.more_error_pico) == (0, 0)
    assert large.more_pico == large.saving_pico
    assert large.more_error_pico > 0


def test_free_tokens_save_nothing() -> None:
    five, _ = classes(10.0, 100, RateCard("free"))

    assert (five.saving_pico, five.verdict) == (0, "unclear")
