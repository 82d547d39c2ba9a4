"""What a retention class or a quota would be worth: curves and prices to one number each.

For each class, a million prompt tokens are either read again in time or written anew, and held
until then or to the class's end; for each size of cache, they hit or miss. The saving is against no
caching at all, in pico-dollars, with the standard error that the curve has. Below `PROMPTS_MIN`
prompts there is no verdict, nor is a class said to lose that has not been watched for as long as it
keeps. Pure; `gateway.analytics.aggregates` calls it.
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
"""Standard errors beyond which a saving is called one."""

Verdict = Literal["pays", "loses", "unclear", "too_few"]


class ClassTerms(Struct, frozen=True):
    """For how many seconds a class keeps what is not used, and as which class that is paid."""

    seconds: float
    held_as: str


class ClassAdvice(Struct, frozen=True):
    """A retention class, had all prompts been kept in it. `error`: one standard error of the ratio;
    `saving_pico` and `error_pico`: per million prompt tokens, against paying each as input.
    `is_early`: it keeps for longer than has been watched, so that both are the least they can
    be."""

    retention: str
    seconds: float
    hit_ratio: float
    error: float
    saving_pico: int
    error_pico: int
    verdict: Verdict
    is_early: bool


class SizeAdvice(Struct, frozen=True):
    """A cache of `blocks`; `saving_pico` and `error_pico`: per million prompt tokens.

    `more_pico` and `more_error_pico`: the same against the cache that there is.
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
    """One answer per class, the shortest first. `classes`: by name; the sampler's spans."""
    order = sorted(classes.items(), key=lambda pair: pair[1].seconds)
    points = sampler.by_seconds([kept.seconds for _, kept in order])
    return [
        _advise_class(name, kept.held_as, point, card)
        for (name, kept), point in zip(order, points, strict=True)
    ]


def advise_sizes(
    sampler: ReuseSampler, sizes: Sequence[int], present: int, card: RateCard
) -> list[SizeAdvice]:
    """What each size would have hit and saved, and how much more than the present one."""
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
