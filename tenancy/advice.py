"""What a retention class or a quota would be worth: curves and prices to one number each.

For each class, a million prompt tokens are either read again in time or written anew; for each
size of cache, they hit or miss. The saving is against no caching at all, in pico-dollars, with the
error that the sample's error makes of it. Pure; `gateway.analytics` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from tenancy.pricing import RateCard
from tenancy.reuse import Point, ReuseSampler

MILLION = 1_000_000
SURE = 2.0
"""Standard errors beyond which a saving is called one."""


class ClassAdvice(Struct, frozen=True):
    """A retention class, had all prompts been kept in it. `saving_pico` and `error_pico`: per
    million prompt tokens, against paying each as input."""

    retention: str
    seconds: float
    hit_ratio: float
    error: float
    saving_pico: int
    error_pico: int
    verdict: Literal["pays", "loses", "unclear"]


class SizeAdvice(Struct, frozen=True):
    """A cache of `blocks`; `saving_pico`: per million prompt tokens."""

    blocks: int
    hit_ratio: float
    error: float
    saving_pico: int


def advise_classes(
    sampler: ReuseSampler, classes: Mapping[str, float], card: RateCard
) -> list[ClassAdvice]:
    """One answer per class, the shortest first. `classes`: seconds by name."""
    order = sorted(classes.items(), key=lambda pair: pair[1])
    points = sampler.by_seconds([seconds for _, seconds in order])
    return [_class(name, point, card) for (name, _), point in zip(order, points, strict=True)]


def advise_sizes(sampler: ReuseSampler, sizes: Sequence[int], card: RateCard) -> list[SizeAdvice]:
    """What each size would have hit, and saved."""
    gain = card.input - card.cache_read
    return [
        SizeAdvice(
            int(point.at), point.hit_ratio, point.error, round(point.hit_ratio * gain * MILLION)
        )
        for point in sampler.by_blocks(sizes)
    ]


def _class(name: str, point: Point, card: RateCard) -> ClassAdvice:
    write = card.write_price(name)
    saving = point.hit_ratio * (card.input - card.cache_read) * MILLION
    saving += (1 - point.hit_ratio) * (card.input - write) * MILLION
    error = point.error * (write - card.cache_read) * MILLION
    verdict: Literal["pays", "loses", "unclear"] = "unclear"
    if abs(saving) > SURE * abs(error) and saving != 0:
        verdict = "pays" if saving > 0 else "loses"
    return ClassAdvice(
        name, point.at, point.hit_ratio, point.error, round(saving), abs(round(error)), verdict
    )
