"""Sampling tokens on a GPU: one row of a table says how a row of logits is sampled.

    draw             logits -> token: argmax, or a draw by temperature, top-k, top-p and min-p
    adjust           logits -> adjusted logits, for rows with a mask, a bias or penalties
    draw_adjusted    the same draw from these
    report           logits -> logprobs of the drawn token and of the 20 likeliest

`draw` is for every step, and can be part of a CUDA graph. The others are for steps with rows that
ask for more. Programs of rows that do not need a launch return at once, and nothing waits.

`draw` adds weights in vocabulary order where only the temperature applies. Under filters it adds
them by falling logit, ties by rising id, as the filters do. It does not sort: it narrows a range of
logits, by passes over the row with three thresholds at a time, until the candidates in the range
fit registers. The plain twin and specification is `engine.sampling.sampler`;
`engine.sampling.gpu_sampler` launches the kernels and fills the table.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

COLUMNS: Final = 20
"""int32 columns of the table; `Column` names them."""

FLAGS = tl.constexpr(0)
SOURCE = tl.constexpr(1)
SLOT = tl.constexpr(2)
POSITION = tl.constexpr(3)
INVERSE_TEMPERATURE = tl.constexpr(4)
TOP_K = tl.constexpr(5)
TOP_P_LOW = tl.constexpr(6)
TOP_P_HIGH = tl.constexpr(7)
FLOOR_KEY = tl.constexpr(8)
SEED_LOW = tl.constexpr(9)
SEED_HIGH = tl.constexpr(10)
SAMPLE_INDEX = tl.constexpr(11)
REPETITION = tl.constexpr(12)
PRESENCE = tl.constexpr(13)
FREQUENCY = tl.constexpr(14)
BIAS_COUNT = tl.constexpr(15)
MASK_ROW = tl.constexpr(16)
REPORT_ROW = tl.constexpr(17)
ADJUSTED_ROW = tl.constexpr(18)
"""Columns: flags; the row of logits; the sequence's slot; the output position; the reciprocal
temperature (fp32 bits); k; p (fp64 bits, two words); the key of min-p's limit; the seed, two words;
the sample's index; three penalties (fp32 bits); the number of biased tokens; the rows of the masks,
of the reports and of the adjusted logits."""

ACTIVE = tl.constexpr(1)
DRAWS = tl.constexpr(2)
FILTERS = tl.constexpr(4)
MASKED = tl.constexpr(8)
PENALISED = tl.constexpr(16)
BIASED = tl.constexpr(32)
ADJUSTED = tl.constexpr(8 | 16 | 32)
REPORTS = tl.constexpr(64)
"""Flags. A row of zeros is not active: its programs return at once."""

PEAK_MAX = tl.constexpr(3e38)
"""Nearly the largest fp32: an infinite best logit is taken to be this."""

WEIGHT_MIN = tl.constexpr(2e-35)
"""Smaller weights are 0 in a draw without filters, as in the twin."""

NO_LOGIT = tl.constexpr(-1)
NONE_ALLOWED = tl.constexpr(-2)
"""Ids of rows without a token, as in the twin."""

ALLOWED_MIN = tl.constexpr(-1e30)
"""Lower logits of allowed tokens become this, as in `engine.sampling.token_masks`."""

KEY_2 = tl.constexpr(0x40000000)
KEY_8 = tl.constexpr(0x41000000)
KEY_100 = tl.constexpr(0x42C80000)
KEY_FINITE = tl.constexpr(0x7F7FFFFF)
"""Keys of 2, 8 and 100 nats below the best token, and of every finite logit. A key is the bit
pattern of the distance from the best logit over the temperature: likelier tokens have lower
keys."""

NO_KEY = tl.constexpr(0x7FFFFFFF)

BY_COUNT = tl.constexpr(0)
BY_MASS = tl.constexpr(1)
TO_DRAW = tl.constexpr(2)
"""Phases of a draw under filters: top-k, top-p and min-p, the draw itself."""

LINEAR_PASSES = tl.constexpr(12)
"""Passes that cut the range of keys by nats; later ones cut bit patterns, so that they end."""

CANDIDATES: Final = 2048
"""Keys that a search finishes in registers."""

TOP: Final = 20
"""Alternatives in a report."""

REPORT_COLUMNS: Final = 1 + 2 * TOP
"""A report: the drawn token's logprob, those of the likeliest (fp32 bits), and their ids."""

ADJUST_STEP: Final = 4096
DRAW_STEP: Final = 4096
REPORT_STEP: Final = 8192
"""Tokens per program of `adjust` and `report`, and per iteration of `draw`. Fixed, because sums in
fp32 depend on it."""


# -- adjust -----------------------------------------------------------------------------------


@triton.jit
def _float_at(entry, COLUMN: tl.constexpr):
    return tl.load(entry + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _changed(x, bias, token, present, entry, masks, counts, V: tl.constexpr, WORDS: tl.constexpr):
    """Return logits x of tokens after bias, penalties and mask; a NaN stays, and none is made."""
    flags = tl.load(entry)
    y = x + bias
    slot = tl.load(entry + SLOT).to(tl.int64)
    wanted = present & (token < tl.where((flags & PENALISED) != 0, V, 0))
    count = tl.load(counts + slot * V + token, mask=wanted, other=0).to(tl.int32)
    times = (count >> 1).to(tl.float32)
    repetition = _float_at(entry, REPETITION)
    repeated = tl.where(y > 0, tl.div_rn(y, tl.zeros_like(y) + repetition), y * repetition)
    y = tl.where(count > 0, repeated, y)
    y = tl.where(count > 1, y - _float_at(entry, FREQUENCY) * times, y)
    y = tl.where(count > 1, y - _float_at(entry, PRESENCE), y)
    finite = tl.minimum(tl.maximum(y, -PEAK_MAX), PEAK_MAX)
    y = tl.where((count > 0) & (x > float("-inf")), finite, x + bias)
    mask_row = tl.load(entry + MASK_ROW).to(tl.int64)
    masked = (flags & MASKED) != 0
    wanted = present & (token < tl.where(masked, V, 0))
    word = tl.load(masks + mask_row * WORDS + token // 32, mask=wanted, other=-1)
    bounded = tl.minimum(tl.maximum(y, ALLOWED_MIN), PEAK_MAX)
    bounded = tl.where(((word >> (token % 32)) & 1) == 1, bounded, float("-inf"))
    y = tl.where(masked, bounded, y)
    return tl.where(x != x, x, y)


@triton.jit
def _adjust(
    logits, table, masks, counts, bias_ids, bias_values, adjusted, alive, first,
    COLUMNS: tl.constexpr, V: tl.constexpr, WORDS: tl.constexpr, BIAS_MAX: tl.constexpr,
    STEP: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BIAS_STEP: tl.constexpr,
):  # fmt: skip
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    split = tl.program_id(1)
    flags = tl.load(entry)
    place = tl.load(entry + ADJUSTED_ROW).to(tl.int64) - first
    if ((flags & ADJUSTED) != 0) & (place >= 0) & (place < ROWS):
        given = logits + tl.load(entry + SOURCE).to(tl.int64) * V
        token = split * STEP + tl.arange(0, STEP)
        present = token < V
        x = tl.load(given + token, mask=present, other=float("-inf")).to(tl.float32)
        y = _changed(x, 0.0, token, present, entry, masks, counts, V, WORDS)
        tl.store(adjusted + place * V + token, y, mask=present)
        has_logit = tl.max((x > float("-inf")).to(tl.int32), 0)
        tl.store(alive + place * SPLITS + split, has_logit)
        biased = tl.load(entry + BIAS_COUNT)
        biases = tl.load(entry + SLOT).to(tl.int64) * BIAS_MAX
        tl.debug_barrier()  # biased tokens are computed again, and stored over
        for start in range(0, biased, BIAS_STEP):
            i = start + tl.arange(0, BIAS_STEP)
            some = tl.load(bias_ids + biases + i, mask=i < biased, other=-1)
            here = (some >= split * STEP) & (some < split * STEP + STEP)
            given_x = tl.load(given + some, mask=here, other=0.0).to(tl.float32)
            bias = tl.load(bias_values + biases + i, mask=here, other=0.0)
            biased_y = _changed(given_x, bias, some, here, entry, masks, counts, V, WORDS)
            tl.store(adjusted + place * V + some, biased_y, mask=here)


# -- draw -------------------------------------------------------------------------------------


@triton.jit
def _scaled(logits, v, peak, inverse, V: tl.constexpr):
    """Return logits over temperature, shifted so that the best is 0; infinity is 0 too."""
    x = tl.load(logits + v, mask=v < V, other=float("-inf")).to(tl.float32)
    return tl.minimum(x - peak, 0.0) * inverse


@triton.jit
def _key(scaled):
    return scaled.to(tl.int32, bitcast=True) & NO_KEY


@triton.jit
def _best(logits, V: tl.constexpr, STEP: tl.constexpr):
    """Return (best logit, its lowest token, number of NaNs seen)."""
    best = tl.full([STEP], float("-inf"), tl.float32)
    best_id = tl.zeros([STEP], tl.int32)
    for start in range(0, V, STEP):
        v = start + tl.arange(0, STEP)
        x = tl.load(logits + v, mask=v < V, other=float("-inf")).to(tl.float32)
        better = (x > best) | (x != x)  # a NaN stays, because no comparison with it is true
        best = tl.where(better, x, best)
        best_id = tl.where(better, v, best_id)
    # Whether a maximum propagates NaN depends on the hardware, so NaNs are counted.
    nan_count = tl.sum((best != best).to(tl.int32), 0)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_id, V), 0), nan_count


@triton.jit
def _uniform(entry):
    """Return the uniform number of the draw: `engine.sampling.rng.uniform`."""
    low = tl.load(entry + SEED_LOW).to(tl.int64) & 0xFFFFFFFF
    seed = (tl.load(entry + SEED_HIGH).to(tl.int64) << 32) | low
    position = tl.load(entry + POSITION)
    index = tl.load(entry + SAMPLE_INDEX)
    zero = position * 0
    high, low, _c, _d = tl.philox(seed, position, zero, index, zero, 10)
    bits = (high.to(tl.uint32, bitcast=True).to(tl.int64) << 21) | (
        low.to(tl.uint32, bitcast=True).to(tl.int64) >> 11
    )
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _unfiltered(logits, peak, inverse, uniform, V: tl.constexpr, STEP: tl.constexpr):
    """Return the token at which the running sum of weights, in vocabulary order, passes the
    uniform number's share of the total."""
    total = tl.cast(0.0, tl.float64)
    for start in range(0, V, STEP):
        v = start + tl.arange(0, STEP)
        w = tl.exp(_scaled(logits, v, peak, inverse, V))
        total += tl.sum(tl.where(w > WEIGHT_MIN, w, 0.0).to(tl.float64), 0)
    target = uniform * total
    before = tl.cast(0.0, tl.float64)
    chosen = V
    last = 0
    for start in range(0, V, STEP):
        v = start + tl.arange(0, STEP)
        w = tl.exp(_scaled(logits, v, peak, inverse, V))
        w = tl.where(w > WEIGHT_MIN, w, 0.0).to(tl.float64)
        here = tl.sum(w, 0)
        if (chosen == V) & (here > 0):
            last = tl.max(tl.where(w > 0, v, 0), 0)
            if before + here > target:
                running = before + tl.cumsum(w, 0)
                chosen = tl.min(tl.where((running > target) & (w > 0), v, V), 0)
        before += here
    # By rounding, the target can be slightly above the last running sum.
    return tl.where(chosen < V, chosen, last)


@triton.jit
def _prefixes(logits, peak, inverse, a, b, c, V: tl.constexpr, STEP: tl.constexpr):
    """Return (count, mass) of the tokens with keys up to a, up to b and up to c."""
    counts = tl.zeros([STEP], tl.int32)  # three fields of ten bits
    mass_a = tl.zeros([STEP], tl.float32)
    mass_b = tl.zeros([STEP], tl.float32)
    mass_c = tl.zeros([STEP], tl.float32)
    for start in range(0, V, STEP):
        v = start + tl.arange(0, STEP)
        scaled = _scaled(logits, v, peak, inverse, V)
        key = _key(scaled)
        w = tl.exp(scaled)
        counts += (key <= a).to(tl.int32)
        counts += (key <= b).to(tl.int32) << 10
        counts += (key <= c).to(tl.int32) << 20
        mass_a += tl.where(key <= a, w, 0.0)
        mass_b += tl.where(key <= b, w, 0.0)
        mass_c += tl.where(key <= c, w, 0.0)
    return (
        tl.sum(counts & 1023, 0), tl.sum(mass_a.to(tl.float64), 0),
        tl.sum((counts >> 10) & 1023, 0), tl.sum(mass_b.to(tl.float64), 0),
        tl.sum((counts >> 20) & 1023, 0), tl.sum(mass_c.to(tl.float64), 0),
    )  # fmt: skip


@triton.jit
def _narrowed(at, count, mass, phase, goal, low, count_low, mass_low, high, count_high, mass_high):
    """Return the range (low, high] of keys, cut at key `at` if that lies inside.

    The prefix up to `low` misses the goal, the prefix up to `high` reaches it.
    """
    reach = tl.where(phase == BY_COUNT, count.to(tl.float64), mass)
    reached = (reach > goal) | ((reach == goal) & (phase != TO_DRAW))
    inside = (at > low) & (at < high)
    down = inside & reached
    up = inside & (reached == 0)
    return (
        tl.where(up, at, low), tl.where(up, count, count_low), tl.where(up, mass, mass_low),
        tl.where(down, at, high), tl.where(down, count, count_high),
        tl.where(down, mass, mass_high),
    )  # fmt: skip


@triton.jit
def _thresholds(low, high, linear):
    """Return three keys inside (low, high], a quarter of the range apart: by nats or by bits."""
    near = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    quarter = (high.to(tl.float32, bitcast=True) - near) * 0.25
    a = (near + quarter).to(tl.int32, bitcast=True)
    b = (near + quarter * 2).to(tl.int32, bitcast=True)
    c = (near + quarter * 3).to(tl.int32, bitcast=True)
    step = tl.maximum((high - low) // 4, 1)
    a = tl.where(linear, a, low + step)
    b = tl.where(linear, b, low + step * 2)
    c = tl.where(linear, c, low + step * 3)
    first = low + 1
    last = high - 1
    return (
        tl.minimum(tl.maximum(a, first), last), tl.minimum(tl.maximum(b, first), last),
        tl.minimum(tl.maximum(c, first), last),
    )  # fmt: skip


@triton.jit
def _gather(
    logits, peak, inverse, candidates, low, high,
    V: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Store the keys in (low, high] side by side."""
    tl.debug_barrier()
    offset = 0
    for start in range(0, V, STEP):
        v = start + tl.arange(0, STEP)
        key = _key(_scaled(logits, v, peak, inverse, V))
        inside = ((key > low) & (key <= high)).to(tl.int32)
        found = tl.sum(inside, 0)
        if found > 0:
            at = offset + tl.cumsum(inside, 0) - 1
            tl.store(candidates + at, key, mask=inside != 0)
        offset += found
    tl.debug_barrier()


@triton.jit
def _boundary(
    logits, peak, inverse, candidates, phase, goal,
    a, count_a, mass_a, b, count_b, mass_b, high, count_high, mass_high,
    gathered_low, gathered_high, gathered,
    V: tl.constexpr, STEP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Find the first key, in rising order, at which a prefix of the tokens reaches the goal.

    Known prefixes: up to a, up to b, and up to high, which reaches it. Returns the key, the tokens
    with lower keys and their mass, the tokens up to the key, and what `candidates` holds.
    """
    low = a * 0 - 1
    count_low = count_a * 0
    mass_low = mass_a * 0
    low, count_low, mass_low, high, count_high, mass_high = _narrowed(
        a, count_a, mass_a, phase, goal, low, count_low, mass_low, high, count_high, mass_high
    )
    low, count_low, mass_low, high, count_high, mass_high = _narrowed(
        b, count_b, mass_b, phase, goal, low, count_low, mass_low, high, count_high, mass_high
    )
    turn = 0
    while (high - low > 1) & (count_high - count_low > CANDIDATES):
        x, y, z = _thresholds(low, high, (turn < LINEAR_PASSES) & (high <= KEY_100))
        count_x, mass_x, count_y, mass_y, count_z, mass_z = _prefixes(
            logits, peak, inverse, x, y, z, V, STEP
        )
        low, count_low, mass_low, high, count_high, mass_high = _narrowed(
            x, count_x, mass_x, phase, goal, low, count_low, mass_low, high, count_high, mass_high
        )
        low, count_low, mass_low, high, count_high, mass_high = _narrowed(
            y, count_y, mass_y, phase, goal, low, count_low, mass_low, high, count_high, mass_high
        )
        low, count_low, mass_low, high, count_high, mass_high = _narrowed(
            z, count_z, mass_z, phase, goal, low, count_low, mass_low, high, count_high, mass_high
        )
        turn += 1
    if high - low > 1:
        if count_high <= CANDIDATES:  # the next search can use the whole prefix
            low = low * 0 - 1
            count_low = count_low * 0
            mass_low = mass_low * 0
        if (gathered_low > low) | (gathered_high < high):
            _gather(logits, peak, inverse, candidates, low, high, V, STEP)
            gathered_low = low
            gathered_high = high
            gathered = count_high - count_low
        i = tl.arange(0, CANDIDATES)
        keys = tl.load(candidates + i, mask=i < gathered, other=NO_KEY)
        keys = tl.where(keys > low, keys, NO_KEY)
        weights = tl.where(keys < NO_KEY, tl.exp(-keys.to(tl.float32, bitcast=True)), 0.0)
        weights = weights.to(tl.float64)
        count_base = count_low
        mass_base = mass_low
        while (high - low > 1) & (count_high - count_low > 1):
            at = low + (high - low) // 2
            count_at = count_base + tl.sum((keys <= at).to(tl.int32), 0)
            mass_at = mass_base + tl.sum(tl.where(keys <= at, weights, 0.0), 0)
            low, count_low, mass_low, high, count_high, mass_high = _narrowed(
                at, count_at, mass_at, phase, goal, low, count_low, mass_low, high, count_high,
                mass_high,
            )  # fmt: skip
        high = tl.max(tl.where(keys <= high, keys, -1), 0)
    return high, count_low, mass_low, count_high, gathered_low, gathered_high, gathered


@triton.jit
def _tokens_reaching(mass, weight, tokens, strictly):
    """Return how many of `tokens` tokens of one weight reach, or pass, a mass; at least one."""
    ratio = tl.minimum(mass / tl.maximum(weight, 1e-300), 1e9)
    whole = ratio.to(tl.int32)
    needed = whole + (strictly | (whole.to(tl.float64) < ratio)).to(tl.int32)
    return tl.maximum(tl.minimum(needed, tokens), 1)


@triton.jit
def _pick(
    logits, peak, inverse, wanted, rank,
    V: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the token of a rank, from 1, among those with one key, by rising id."""
    before = 0
    token = V
    for start in range(0, V, STEP):
        v = start + tl.arange(0, STEP)
        key = _key(_scaled(logits, v, peak, inverse, V))
        equal = ((key == wanted) & (v < V)).to(tl.int32)
        here = tl.sum(equal, 0)
        if (before < rank) & (before + here >= rank):
            order = before + tl.cumsum(equal, 0)
            token = tl.min(tl.where((equal != 0) & (order == rank), v, V), 0)
        before += here
    return token


@triton.jit
def _filtered(
    logits, peak, inverse, uniform, entry, candidates,
    V: tl.constexpr, STEP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the token of a draw among those that top-k, top-p and min-p keep.

    Tokens are ordered by rising key, then id; each filter keeps a prefix, the shortest applies.
    """
    k = tl.load(entry + TOP_K)
    floor = tl.load(entry + FLOOR_KEY)
    low_word = tl.load(entry + TOP_P_LOW).to(tl.int64) & 0xFFFFFFFF
    p_bits = (tl.load(entry + TOP_P_HIGH).to(tl.int64) << 32) | low_word
    p = p_bits.to(tl.float64, bitcast=True)
    b = tl.minimum(floor, tl.where(floor < KEY_FINITE, KEY_FINITE, KEY_8))
    a = tl.minimum(b, KEY_2)
    count_a, mass_a, count_b, mass_b, kept, kept_mass = _prefixes(
        logits, peak, inverse, a, b, KEY_FINITE, V, STEP
    )
    high = a * 0 + KEY_FINITE
    count_high = kept
    mass_high = kept_mass
    gathered_low = high
    gathered_high = a * 0 - 1
    gathered = a * 0
    at = high
    rank = kept
    phase = a * 0
    while phase <= TO_DRAW:  # one body for three searches: the compiler inlines each call
        goal = uniform * kept_mass
        wanted = phase == TO_DRAW
        if phase == BY_COUNT:
            goal = k.to(tl.float64)
            wanted = (k > 0) & (k < kept)
        if phase == BY_MASS:
            goal = p * kept_mass
            wanted = p < 1
        if wanted:
            at, count_low, mass_low, count_at, gathered_low, gathered_high, gathered = _boundary(
                logits, peak, inverse, candidates, phase, goal,
                a, count_a, mass_a, b, count_b, mass_b, high, count_high, mass_high,
                gathered_low, gathered_high, gathered, V, STEP, CANDIDATES,
            )  # fmt: skip
            weight = tl.exp(-at.to(tl.float32, bitcast=True)).to(tl.float64)
            tokens = tl.minimum(count_at, kept) - count_low
            rank = _tokens_reaching(goal - mass_low, weight, tokens, phase == TO_DRAW)
            rank = tl.where(phase == BY_COUNT, k - count_low, rank)
            if (phase != TO_DRAW) & (count_low + rank < kept):
                kept = count_low + rank
                kept_mass = mass_low + weight * rank.to(tl.float64)
                high = at
                count_high = count_at
                mass_high = mass_low + weight * (count_at - count_low).to(tl.float64)
        if (phase == BY_MASS) & (floor < KEY_FINITE) & (count_b < kept):
            kept = tl.maximum(count_b, 1)
            kept_mass = mass_b
            high = b
            count_high = count_b
            mass_high = mass_b
        phase += 1
    return _pick(logits, peak, inverse, at, rank, V, STEP)


@triton.jit
def _token(
    logits, flags, entry, candidates,
    V: tl.constexpr, STEP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the token of a row of logits; NO_LOGIT if one is NaN, NONE_ALLOWED if none is above
    minus infinity."""
    top, token, nan_count = _best(logits, V, STEP)
    has_token = (nan_count == 0) & (top > float("-inf"))
    if has_token & ((flags & DRAWS) != 0):
        # With an infinite best all weights would be NaN.
        peak = tl.minimum(top, PEAK_MAX)
        inverse = _float_at(entry, INVERSE_TEMPERATURE)
        uniform = _uniform(entry)
        if (flags & FILTERS) != 0:
            token = _filtered(
                logits, peak, inverse, uniform, entry, candidates, V, STEP, CANDIDATES
            )
        else:
            token = _unfiltered(logits, peak, inverse, uniform, V, STEP)
    return tl.where(has_token, token, tl.where(nan_count == 0, NONE_ALLOWED, NO_LOGIT))


@triton.jit
def _draw(
    logits, table, candidates, out,
    COLUMNS: tl.constexpr, V: tl.constexpr, STEP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = table + row * COLUMNS
    flags = tl.load(entry)
    if (flags & (ACTIVE | ADJUSTED)) == ACTIVE:
        logits += tl.load(entry + SOURCE).to(tl.int64) * V
        candidates += row * CANDIDATES
        token = _token(logits, flags, entry, candidates, V, STEP, CANDIDATES)
        tl.store(out + row, tl.maximum(token, NO_LOGIT))


@triton.jit
def _draw_adjusted(
    adjusted, table, alive, candidates, counts, out, first,
    COLUMNS: tl.constexpr, V: tl.constexpr, STEP: tl.constexpr, CANDIDATES: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = table + row * COLUMNS
    flags = tl.load(entry)
    place = tl.load(entry + ADJUSTED_ROW).to(tl.int64) - first
    if ((flags & ADJUSTED) != 0) & (place >= 0) & (place < ROWS):
        adjusted += place * V
        token = _token(adjusted, flags, entry, candidates + row * CANDIDATES, V, STEP, CANDIDATES)
        split = tl.arange(0, SPLITS_P2)
        had_logit = tl.load(alive + place * SPLITS + split, mask=split < SPLITS, other=0)
        token = tl.where(tl.max(had_logit, 0) > 0, token, NO_LOGIT)
        tl.store(out + row, token)
        if (token >= 0) & ((flags & PENALISED) != 0):
            at = counts + tl.load(entry + SLOT).to(tl.int64) * V + token
            count = tl.load(at).to(tl.int32)
            tl.store(at, tl.where(count < 32766, count + 2, count).to(tl.int16))


# -- report -----------------------------------------------------------------------------------


@triton.jit
def _report_parts(
    logits, table, best, sums,
    COLUMNS: tl.constexpr, V: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """Find the likeliest tokens of one part of the vocabulary, its best logit and its sum."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    split = tl.program_id(1)
    if (tl.load(entry) & REPORTS) != 0:
        part = tl.load(entry + REPORT_ROW).to(tl.int64) * SPLITS + split
        v = split * STEP + tl.arange(0, STEP)
        at = logits + tl.load(entry + SOURCE).to(tl.int64) * V + v
        x = tl.load(at, mask=v < V, other=float("-inf")).to(tl.float32)
        peak = tl.max(x, 0)
        total = tl.sum(tl.where(x > float("-inf"), tl.exp(x - peak), 0.0), 0)
        tl.store(sums + part * 2, peak)
        tl.store(sums + part * 2 + 1, total)
        bits = x.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - v).to(tl.int64)
        least = -0x7FFFFFFFFFFFFFFF
        key = tl.where(v < V, key, least)
        for i in range(TOP):
            top = tl.max(key, 0)
            tl.store(best + part * TOP + i, top)
            key = tl.where(key == top, least, key)


@triton.jit
def _report(
    logits, table, best, sums, drawn, reports,
    COLUMNS: tl.constexpr, V: tl.constexpr, SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr,
    PARTS: tl.constexpr, TOP: tl.constexpr, REPORT_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = table + row * COLUMNS
    if (tl.load(entry) & REPORTS) != 0:
        place = tl.load(entry + REPORT_ROW).to(tl.int64)
        split = tl.arange(0, SPLITS_P2)
        at = sums + (place * SPLITS + split) * 2
        peaks = tl.load(at, mask=split < SPLITS, other=float("-inf"))
        totals = tl.load(at + 1, mask=split < SPLITS, other=0.0)
        peak = tl.max(peaks, 0)
        total = tl.sum(tl.where(totals > 0, totals * tl.exp(peaks - peak), 0.0), 0)
        shift = tl.log(total)
        token = tl.load(drawn + row)
        x = tl.load(logits + tl.load(entry + SOURCE).to(tl.int64) * V + tl.maximum(token, 0))
        report = reports + place * REPORT_COLUMNS
        own = x.to(tl.float32) - peak - shift
        tl.store(report, own.to(tl.int32, bitcast=True))
        part = tl.arange(0, PARTS)
        least = -0x7FFFFFFFFFFFFFFF
        key = tl.load(best + place * SPLITS * TOP + part, mask=part < SPLITS * TOP, other=least)
        for i in range(TOP):
            top = tl.max(key, 0)
            ordered = (top >> 32).to(tl.int32)
            bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
            logprob = bits.to(tl.float32, bitcast=True) - peak - shift
            likely = 0x7FFFFFFF - (top & 0x7FFFFFFF).to(tl.int32)
            tl.store(report + 1 + i, logprob.to(tl.int32, bitcast=True))
            tl.store(report + 1 + TOP + i, tl.where(top == least, -1, likely))
            key = tl.where(key == top, least, key)


# -- launches ---------------------------------------------------------------------------------

KERNELS: Final = (_adjust, _draw, _draw_adjusted, _report_parts, _report)


def adjust_splits(vocab_size: int) -> int:
    """Return the number of programs per row of `adjust`."""
    return int(triton.cdiv(vocab_size, _step(ADJUST_STEP, vocab_size)))


def report_splits(vocab_size: int) -> int:
    """Return the number of programs per row of `report`."""
    return int(triton.cdiv(vocab_size, _step(REPORT_STEP, vocab_size)))


def launch_options(
    kernel: Any, vocab_size: int, adjusted_rows: int = 0, bias_max: int = 0
) -> tuple[dict[str, int], dict[str, Any]]:
    """Return a kernel's constants and compiler options for a vocabulary."""
    splits = adjust_splits(vocab_size)
    parts = report_splits(vocab_size)
    constants = {"COLUMNS": COLUMNS, "V": vocab_size}
    if kernel is _adjust:
        constants |= {
            "WORDS": -(-vocab_size // 32), "BIAS_MAX": bias_max, "BIAS_STEP": 256,
            "STEP": _step(ADJUST_STEP, vocab_size), "SPLITS": splits, "ROWS": adjusted_rows,
        }  # fmt: skip
        # Products and sums are rounded one by one, as in the twin.
        return constants, {"num_warps": 8, "enable_fp_fusion": False}
    if kernel in (_draw, _draw_adjusted):
        constants |= {"STEP": _step(DRAW_STEP, vocab_size), "CANDIDATES": CANDIDATES}
        if kernel is _draw_adjusted:
            constants |= {"SPLITS": splits, "SPLITS_P2": triton.next_power_of_2(splits)}
            constants["ROWS"] = adjusted_rows
        return constants, {"num_warps": 16}
    constants |= {"SPLITS": parts, "TOP": TOP}
    if kernel is _report_parts:
        return constants | {"STEP": _step(REPORT_STEP, vocab_size)}, {"num_warps": 8}
    constants |= {
        "SPLITS_P2": triton.next_power_of_2(parts), "PARTS": triton.next_power_of_2(parts * TOP),
        "REPORT_COLUMNS": REPORT_COLUMNS,
    }  # fmt: skip
    return constants, {"num_warps": 4}


def draw(
    logits: torch.Tensor, table: torch.Tensor, candidates: torch.Tensor, out: torch.Tensor
) -> None:
    """Write a token to out [R] int32 for each active row of the table that is not adjusted.

    logits [S, V] fp32 or bf16; table [R, COLUMNS] int32; candidates [R, CANDIDATES] int32 is
    scratch. A row that contains a NaN, or nothing above minus infinity, gives NO_LOGIT. If logits
    are plus infinity, the draw is among these tokens, equally likely. Cost: greedy rows one pass
    over V, temperature three, filters about 5 to 15, from L2.
    """
    constants, options = launch_options(_draw, logits.shape[1])
    _draw[(len(table),)](logits, table, candidates, out, **constants, **options)


def adjust(
    logits: torch.Tensor, table: torch.Tensor, masks: torch.Tensor, counts: torch.Tensor,
    bias_ids: torch.Tensor, bias_values: torch.Tensor, adjusted: torch.Tensor, alive: torch.Tensor,
    first: int,
) -> None:  # fmt: skip
    """Write the adjusted logits of the rows that have a mask, a bias or penalties.

    Adjusted rows are numbered; the launch takes those from `first` on that fit `adjusted` [most, V]
    fp32. masks [R, words] int32; counts [slots, V] int16: bit 0 is set where the prompt has the
    token, above it is the count of the output; bias_ids, bias_values [slots, most biases] int32,
    fp32; alive [most, splits] int32, written: whether a part has a logit above minus infinity; see
    `draw` for the others. Cost: one pass over V per such row, spread over the GPU.
    """
    vocab = logits.shape[1]
    constants, options = launch_options(_adjust, vocab, len(adjusted), bias_ids.shape[1])
    _adjust[(len(table), constants["SPLITS"])](
        logits, table, masks, counts, bias_ids, bias_values, adjusted, alive, first,
        **constants, **options,
    )  # fmt: skip


def draw_adjusted(
    adjusted: torch.Tensor, table: torch.Tensor, alive: torch.Tensor, candidates: torch.Tensor,
    counts: torch.Tensor, out: torch.Tensor, first: int,
) -> None:  # fmt: skip
    """Write the tokens of adjusted rows, and count them where the row has penalties.

    Arguments as of `adjust` and `draw`. A row whose unadjusted logits have a token, and whose
    adjusted ones have none, gives NONE_ALLOWED.
    """
    constants, options = launch_options(_draw_adjusted, adjusted.shape[1], len(adjusted))
    _draw_adjusted[(len(table),)](
        adjusted, table, alive, candidates, counts, out, first, **constants, **options
    )


def report(
    logits: torch.Tensor, table: torch.Tensor, best: torch.Tensor, sums: torch.Tensor,
    drawn: torch.Tensor, reports: torch.Tensor,
) -> None:  # fmt: skip
    """Write logprobs of the table's rows that report: of the drawn token and of the likeliest.

    best [R, splits, TOP] int64 and sums [R, splits, 2] fp32 are scratch; drawn [R] int32; reports
    [R, REPORT_COLUMNS] int32, written, of the given logits before `adjust`. Equal logits are
    ordered by id; id -1 fills the rest of a smaller vocabulary. Cost: one pass over V per such row,
    spread over the GPU.
    """
    vocab = logits.shape[1]
    constants, options = launch_options(_report_parts, vocab)
    _report_parts[(len(table), constants["SPLITS"])](
        logits, table, best, sums, **constants, **options
    )
    constants, options = launch_options(_report, vocab)
    _report[(len(table),)](logits, table, best, sums, drawn, reports, **constants, **options)


def _step(tokens: int, vocab_size: int) -> int:
    return min(tokens, int(triton.next_power_of_2(vocab_size)))
