"""Sampled miss-ratio curves against exact ones."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenancy.reuse.miss_ratio_curve import (
    DEPTH_BLOCKS_MAX,
    HASHES,
    UNIT_BLOCKS,
    ReuseSampler,
    hash_units,
)
from tests.tables import each_row


def exact(uses: list[int], size: int) -> float:
    """Return the hit ratio of an LRU cache of `size` blocks."""
    cache: dict[int, None] = {}
    hits = 0
    for block in uses:
        hits += block in cache
        cache.pop(block, None)
        cache[block] = None
        if len(cache) > size:
            del cache[next(iter(cache))]
    return hits / len(uses)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=200))
def test_full_sample_is_exact_at_bucket_edges(uses: list[int]) -> None:
    """Sizes that are powers of two are edges of the histogram."""
    sampler = ReuseSampler()
    for turn, block in enumerate(uses):
        sampler.use([block], float(turn))
        sampler.check()

    points = sampler.by_blocks([1, 2, 4, 8, 16])

    # An edge's own bucket begins at it, so distances below it are exact.
    assert points[0].hit_ratio <= exact(uses, 1) + 1e-9
    for point in points[1:]:
        assert exact(uses, int(point.at) - 1) - 1e-9 <= point.hit_ratio
        assert point.hit_ratio <= exact(uses, int(point.at)) + 1e-9
        assert point.prompts == pytest.approx(len(uses))


def test_small_sample_is_within_its_error() -> None:
    """A hundredth of the blocks, a few points of the ratio."""
    chance = random.Random(7)
    blocks = 40_000
    uses = [int(blocks * chance.random() ** 4) for _ in range(200_000)]
    names = [chance.getrandbits(60) for _ in range(blocks)]
    sampler = ReuseSampler(sample_max=1_000)

    for block in uses:
        sampler.use([names[block]], 0.0)

    sampler.check()
    assert sampler.rate < 0.05
    for size in (2_048, 8_192, 16_384):
        point = sampler.by_blocks([size])[0]
        assert abs(point.hit_ratio - exact(uses, size)) < 0.06


def test_retention_hits_by_time_between_uses() -> None:
    """Half return within ten seconds, half after a hundred."""
    sampler = ReuseSampler(spans=[256, 16])
    for turn in range(50):
        sampler.use([turn], 1_000.0 * turn)
        sampler.use([turn], 1_000.0 * turn + 7.0)
        sampler.use([turn], 1_000.0 * turn + 107.0)

    soon, late = sampler.by_seconds([16, 256])

    # The first two, or three, came before either retention was observed for its length.
    assert (soon.is_early, soon.prompts) == (False, 148)
    assert (late.is_early, late.prompts) == (False, 147)

    assert soon.hit_ratio == pytest.approx(1 / 3, rel=0.01)
    assert late.hit_ratio == pytest.approx(2 / 3)


def test_sample_is_bounded() -> None:
    """However many blocks a tenant uses."""
    chance = random.Random(3)
    sampler = ReuseSampler(sample_max=64)

    for turn in range(2_000):
        sampler.use([chance.getrandbits(60)], float(turn))

    sampler.check()
    assert sampler.sampled_blocks <= 64


PARTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=40)


@given(PARTS, st.integers(4, 40))
def test_prompt_counts_like_its_single_blocks(prompts: list[tuple[int, int]], most: int) -> None:
    """Blocks that return together are counted together; the sums are the same."""
    chance = random.Random(11)
    names = [chance.getrandbits(60) for _ in range(32)]
    spans = [1, 3, 9, 27]
    together, apart = (ReuseSampler(sample_max=most, spans=spans) for _ in range(2))

    for turn, (first, count) in enumerate(prompts):
        blocks = [*names[first : first + count], names[first]]
        sizes = [1 + block % 3 for block in blocks]
        together.use(blocks, float(turn), sizes)
        for block, size in zip(blocks, sizes, strict=True):
            apart.use([block], float(turn), [size])
        together.check()

    assert together.rate == apart.rate
    for one, other in (
        (together.by_blocks, apart.by_blocks),
        (together.by_seconds, apart.by_seconds),
    ):
        for point, expected in zip(one(spans), other(spans), strict=True):
            if point.is_early == expected.is_early:  # single blocks count as more prompts
                assert point.hit_ratio == pytest.approx(expected.hit_ratio)


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"{len(tokens)}I", *tokens)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=700), st.integers(0, 700), st.integers(0, 9))
def test_unit_hash_covers_everything_before_its_middle(
    tokens: list[int], cut: int, other: int
) -> None:
    """Two prompts share the units of their common beginning, and no more."""
    cut = min(cut, len(tokens))
    parted = [*tokens[:cut], *([] if cut == len(tokens) else [tokens[cut] ^ 1]), other, other]

    one, two = hash_units(packed(tokens)), hash_units(packed(parted))

    shared = len(hash_units(packed(tokens[:cut])))
    assert one[:shared] == two[:shared] == hash_units(packed(tokens[:cut]))
    assert not set(one[shared:]) & set(two[shared:])


def test_units_cover_a_prompt_within_a_sixteenth() -> None:
    """Exact below sixteen blocks; blocks beyond `DEPTH_BLOCKS_MAX` are ignored."""
    for blocks in (*range(300), 1_000, 3_967, 4_095, 4_096, 5_000):
        data = packed([7] * (16 * blocks))

        counted = sum(UNIT_BLOCKS[: len(hash_units(data))])

        assert abs(counted - min(blocks, DEPTH_BLOCKS_MAX)) <= (blocks / 16 if blocks > 16 else 0)


def test_growing_chats_match_an_exact_cache() -> None:
    """Long interleaved chats against a cache that counts every block."""
    chance = random.Random(5)
    chats = [[chance.randrange(50_000) for _ in range(400)] for _ in range(6)]
    sampler, uses = ReuseSampler(), []
    for turn in range(60):
        chat = chats[chance.randrange(6)]
        chat += [chance.randrange(50_000) for _ in range(150)]
        sampler.use(hash_units(packed(chat)), float(turn))
        uses += [hash(tuple(chat[: 16 * (n + 1)])) for n in range(len(chat) // 16)]
        sampler.check()

    for size in (128, 512, 2_048):
        [point] = sampler.by_blocks([size])
        assert point.error > 0
        assert abs(point.hit_ratio - exact(uses, size)) < 0.05


def test_adversarial_hashes_break_nothing() -> None:
    """All as low as possible: no threshold keeps some of them."""
    sampler = ReuseSampler(sample_max=4)

    for turn in range(20):
        sampler.use([turn * HASHES, (turn + 1) * HASHES], float(turn))
        sampler.check()

    assert sampler.rate > 0
    assert sampler.sampled_blocks <= 4
    assert 0 <= sampler.by_blocks([8])[0].hit_ratio <= 1


def prompts(count: int, chance: random.Random) -> list[list[int]]:
    """Return prompts that share 5,000 tokens of instructions and add half as many of their own."""
    instructions = [chance.getrandbits(31) for _ in range(5_000)]
    return [[*instructions, *(chance.getrandbits(31) for _ in range(2_500))] for _ in range(count)]


@each_row("seed", range(4))
def test_shared_beginning_counts_with_few_sampled_blocks(seed: int) -> None:
    """Two thirds of all tokens are reads of one block in two hundred."""
    sampler = ReuseSampler(sample_max=64, spans=[60.0])
    for turn, prompt in enumerate(prompts(400, random.Random(seed))):
        sampler.use(hash_units(packed(prompt)), float(turn))

    [kept], [room] = sampler.by_seconds([60.0]), sampler.by_blocks([8_192])

    assert sampler.rate < 0.05
    for point in (kept, room):
        assert abs(point.hit_ratio - 2 / 3) < 2 * point.error < 0.25


@pytest.mark.parametrize(("gap_s", "ratio"), [(299.0, 1.0), (300.0, 1.0), (301.0, 0.0)])
def test_retention_is_exact_to_the_second(gap_s: float, ratio: float) -> None:
    """A job every five minutes depends on it."""
    sampler = ReuseSampler(spans=[300.0])
    for turn in range(100):
        sampler.use(list(range(40)), gap_s * turn, [1] * 40)

    [five] = sampler.by_seconds([300.0])

    assert five.hit_ratio == ratio
    assert not five.is_early


def test_briefly_observed_retention_is_a_lower_bound() -> None:
    """Chats return after ten minutes, half an hour after the start: the first uses may be returns
    too."""
    sampler = ReuseSampler(spans=[600.0, 3_600.0])
    for turn in range(180):
        sampler.use([turn % 60, turn % 60 + 60], 10.0 * turn, [1] * 2)

    minutes, hour = sampler.by_seconds([600.0, 3_600.0])

    assert (minutes.hit_ratio, minutes.is_early) == (1.0, False)
    assert hour.hit_ratio == pytest.approx(2 / 3)
    assert hour.is_early


@pytest.mark.parametrize(("length", "error"), [(100, 0.15), (6_400, 0.05)])
def test_partial_block_is_within_the_error(length: int, error: float) -> None:
    """The cache finds the tokens before a divergence within a block; the sample does not. For short
    prompts that is a large part."""
    chance = random.Random(8)
    shared = [chance.getrandbits(31) for _ in range(3 * length // 4)]
    sampler = ReuseSampler(spans=[1.0])
    for turn in range(400):
        own = [chance.getrandbits(31) for _ in range(length // 4)]
        sampler.use(hash_units(packed([*shared, *own])), float(turn))

    [point] = sampler.by_seconds([1.0])

    assert abs(point.hit_ratio - 0.75) < point.error < error


def test_few_long_prompts_count_as_few() -> None:
    """They decide a ratio by tokens, however many short prompts there are."""
    sampler = ReuseSampler()
    for turn in range(1_000):
        sampler.use([turn], float(turn), [1])
    for turn in range(4):
        sampler.use([0], float(turn), [100_000])

    [point] = sampler.by_blocks([64])

    assert point.prompts == pytest.approx(4, rel=0.05)
    assert point.error > 0.15


def test_difference_has_a_smaller_error_than_either_ratio() -> None:
    """Three fifths of the tokens hit in any cache, a quarter only in the larger one."""
    chance = random.Random(2)
    instructions, again = [1] * 3_200, [chance.getrandbits(31) for _ in range(80)]
    sampler = ReuseSampler(sample_max=1_024)
    for turn in range(800):
        own = [chance.getrandbits(31) for _ in range(1_280)]
        tail = [again[turn % 80]] * 1_920 if turn % 3 else own
        sampler.use(hash_units(packed([*instructions, *tail])), float(turn))

    small, large = sampler.by_blocks([4_096, 32_768])
    change = sampler.between(4_096, 32_768)

    assert change.hit_ratio == pytest.approx(large.hit_ratio - small.hit_ratio)
    assert 0 < change.error < small.error
    assert sampler.between(32_768, 4_096).hit_ratio == -change.hit_ratio
    assert sampler.between(4_096, 4_096).hit_ratio == 0
    assert ReuseSampler().between(1, 2).error == 0
