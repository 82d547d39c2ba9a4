"""What a retention class or a quota would be worth: curves and prices to one number each.

For each class, a million prompt tokens are either read again in time or written anew; for each
size of cache, they hit or miss. The saving is against no caching at all, in pico-dollars. Its error
has two parts: only some blocks are followed, and the prompts that came are a sample themselves, of
those that will come. Blocks of one prompt go together, so that the prompts are counted there, and
below `PROMPTS_MIN` of them there is no verdict. Pure; `gateway.analytics` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from tenancy.pricing import RateCard
from tenancy.reuse import Point, ReuseSampler

MILLION = 1_000_000
SURE = 2.0
"""Standard errors beyond which a saving is called one."""

PROMPTS_MIN = 30
"""Fewer say nothing yet: of so many, a ratio's error is still up to 9 points."""

Verdict = Literal["pays", "loses", "unclear", "too_few"]


class ClassAdvice(Struct, frozen=True):
    """A retention class, had all prompts been kept in it. `error`: one standard error of the ratio;
    `saving_pico` and `error_pico`: per million prompt tokens, against paying each as input."""

    retention: str
    seconds: float
    hit_ratio: float
    error: float
    saving_pico: int
    error_pico: int
    verdict: Verdict


class SizeAdvice(Struct, frozen=True):
    """A cache of `blocks`; `saving_pico` and `error_pico`: per million prompt tokens."""

    blocks: int
    hit_ratio: float
    error: float
    saving_pico: int
    error_pico: int


def advise_classes(
    sampler: ReuseSampler, prompts: int, classes: Mapping[str, float], card: RateCard
) -> list[ClassAdvice]:
    """One answer per class, the shortest first. `prompts`: that the sampler has seen; `classes`:
    seconds by name."""
    order = sorted(classes.items(), key=lambda pair: pair[1])
    points = sampler.by_seconds([seconds for _, seconds in order])
    pairs = zip(order, points, strict=True)
    return [_class(name, point, prompts, card) for (name, _), point in pairs]


def advise_sizes(
    sampler: ReuseSampler, prompts: int, sizes: Sequence[int], card: RateCard
) -> list[SizeAdvice]:
    """What each size would have hit, and saved."""
    gain = (card.input - card.cache_read) * MILLION
    advice = []
    for point in sampler.by_blocks(sizes):
        error, saving = _error(point, prompts), round(point.hit_ratio * gain)
        size = int(point.at)
        advice.append(SizeAdvice(size, point.hit_ratio, error, saving, abs(round(error * gain))))
    return advice


def _class(name: str, point: Point, prompts: int, card: RateCard) -> ClassAdvice:
    write = card.write_price(name)
    saving = point.hit_ratio * (card.input - card.cache_read) * MILLION
    saving += (1 - point.hit_ratio) * (card.input - write) * MILLION
    error = _error(point, prompts)
    error_pico = abs(error * (write - card.cache_read) * MILLION)
    verdict: Verdict = "unclear"
    if prompts < PROMPTS_MIN:
        verdict = "too_few"
    elif abs(saving) > SURE * error_pico and saving != 0:
        verdict = "pays" if saving > 0 else "loses"
    return ClassAdvice(
        name, point.at, point.hit_ratio, error, round(saving), round(error_pico), verdict
    )


def _error(point: Point, prompts: int) -> float:
    """Of both samples. As if one prompt more had hit and one more missed, so that a few that were
    all alike are no certainty (Agresti and Coull, "Approximate is better than exact", 1998)."""
    likely = (point.hit_ratio * prompts + 1) / (prompts + 2)
    return math.hypot(point.error, math.sqrt(likely * (1 - likely) / (prompts + 2)))
