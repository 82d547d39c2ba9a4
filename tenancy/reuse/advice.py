"""Advice: what a retention class or a cache size would save, from curves and prices.

For each class, a prompt token is either read again in time or written anew, and held until its next
use or the end of the class; for each cache size, it hits or misses. Savings are against no caching,
in pico-dollars per million prompt tokens, with the curve's standard error. Below `PROMPTS_MIN`
prompts there is no verdict, and a class that was not observed for as long as it keeps is never said
to lose. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from tenancy.pricing.charges import SECONDS_PER_HOUR, RateCard
from tenancy.reuse.miss_ratio_curve import CurvePoint, ReuseSampler
from tenancy.reuse.reuse_intervals import PROMPTS_MIN

MILLION = 1_000_000
SIGNIFICANCE_ERRORS = 2.0
"""Standard errors beyond which a saving or a loss counts as significant."""

Verdict = Literal["pays", "loses", "unclear", "too_few"]


class ClassTerms(Struct, frozen=True):
    """How many seconds a class keeps unused tokens, and the class whose storage price applies."""

    seconds: float
    held_as: str


class ClassAdvice(Struct, frozen=True):
    """A retention class, as if all prompts had used it.

    `saving_pico` and `error_pico`: per million prompt tokens, against plain input.
    """

    retention: str
    seconds: float
    hit_ratio: float
    error: float
    """One standard error of the ratio."""
    saving_pico: int
    error_pico: int
    verdict: Verdict
    is_early: bool
    """The class keeps for longer than was observed, so ratio and saving are lower bounds."""


class SizeAdvice(Struct, frozen=True):
    """A cache of `blocks`. `saving_pico` and `error_pico` are per million prompt tokens.

    `more_pico` and `more_error_pico`: the same against the present cache.
    """

    blocks: int
    hit_ratio: float
    error: float
    saving_pico: int
    error_pico: int
    more_pico: int
    more_error_pico: int


def advise_classes(
    sampler: ReuseSampler, classes: Mapping[str, ClassTerms], card: RateCard
) -> list[ClassAdvice]:
    """Return advice per class, shortest first. `classes`: by name, with spans of the sampler."""
    order = sorted(classes.items(), key=lambda pair: pair[1].seconds)
    points = sampler.by_seconds([kept.seconds for _, kept in order])
    return [
        _advise_class(name, kept.held_as, point, card)
        for (name, kept), point in zip(order, points, strict=True)
    ]


def advise_sizes(
    sampler: ReuseSampler, sizes: Sequence[int], present: int, card: RateCard
) -> list[SizeAdvice]:
    """Return what each size would have hit and saved, and how much more than the present one."""
    gain = (card.input - card.cache_read) * MILLION
    advice = []
    for size, point in zip(sizes, sampler.by_blocks(sizes), strict=True):
        money = [point.hit_ratio * gain, abs(point.error * gain)]
        if size == present:
            money += [0, 0]
        else:
            more = sampler.between(present, size)
            money += [more.hit_ratio * gain, abs(more.error * gain)]
        advice.append(SizeAdvice(size, point.hit_ratio, point.error, *map(round, money)))
    return advice


def _advise_class(name: str, held_as: str, point: CurvePoint, card: RateCard) -> ClassAdvice:
    write = card.write_price(name)
    saving = point.hit_ratio * (card.input - card.cache_read) * MILLION
    saving += (1 - point.hit_ratio) * (card.input - write) * MILLION
    hold = card.storage_price(held_as) / SECONDS_PER_HOUR
    saving -= point.held_s * hold * MILLION
    error_pico = point.error * (abs(write - card.cache_read) + point.at * hold) * MILLION
    verdict: Verdict = "unclear"
    if point.prompts < PROMPTS_MIN:
        verdict = "too_few"
    elif saving > SIGNIFICANCE_ERRORS * error_pico:
        verdict = "pays"
    elif point.is_early:
        verdict = "too_few"
    elif -saving > SIGNIFICANCE_ERRORS * error_pico:
        verdict = "loses"
    return ClassAdvice(
        name,
        point.at,
        point.hit_ratio,
        point.error,
        round(saving),
        round(error_pico),
        verdict,
        point.is_early,
    )
