"""Mixtures of experts on a GPU: routing, sorting and the experts' products, decided on the device.

The host never learns which experts a token takes: grids follow only from the number of rows, so one
CUDA graph fits every choice. `engine.models.gpu_experts` calls `choose`, `expert_product` and
`add_experts` in this order; `kernels.reference_experts` specifies them. T tokens, E experts of I
channels, C hidden channels, k experts a token, P = T * k pairs.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.dependent_launch import dependent_options, gdc_wait
from kernels.gpu.fused_ops import DEPENDENT_ROWS_MAX
from kernels.gpu.products import Fp8, Fp8Rows, can_inline_ptx, product
from kernels.reference_experts import ExpertActivation, Routing
from kernels.reference_weights import Mxfp4

CHUNK = 128
"""Pairs that one program counts or places."""

PAIRS_OF_ONE_PROGRAM = 128
"""Most pairs that one program sorts; more take two launches, which are faster from there on."""

SHORT_TOKENS_MAX = 512
"""Most tokens of a step whose routing and sorting leave most multiprocessors idle."""

SCORES = {"softmax": 0, "sigmoid": 1, "chosen_softmax": 2}
SHARED = {"": 0, "add": 1, "gated": 2}
ACTIVATIONS: dict[str, int] = {"": 0, "silu": 1, "clamped": 2, "gelu_tanh": 3}


class ExpertMatrix(NamedTuple):
    """One matrix [N, K] of each expert: values [E, N, K], or packed, and biases [E, N]."""

    values: torch.Tensor | Mxfp4 | Fp8
    rows: int
    columns: int
    bias: torch.Tensor | None = None

    @property
    def kind(self) -> int:
        """The kind of the values; see `kernels.gpu.products`."""
        return 1 if isinstance(self.values, Mxfp4) else 2 if isinstance(self.values, Fp8) else 0


class Tile(NamedTuple):
    """A tile of a product: BT pairs by BN rows of the weights, BK columns at a time."""

    pairs: int
    rows: int
    columns: int
    stages: int
    warps: int


SIZES = (8, 64, 512)
"""Most tokens of a step by the class of its tile; the last class has more."""

TILES = (
    (Tile(16, 64, 128, 4, 4), Tile(16, 64, 128, 4, 4), Tile(32, 128, 64, 5, 4),
     Tile(128, 256, 64, 3, 8)),
    (Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 4), Tile(64, 128, 128, 4, 8),
     Tile(128, 128, 128, 4, 8)),
    (Tile(16, 64, 128, 4, 4), Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 5, 4),
     Tile(64, 128, 128, 4, 8)),
)  # fmt: skip
"""The fastest of those that `tests.bench.gpu_experts` times, by the kind of the weights and the
class."""


def tile_of(tokens: int, kind: int) -> Tile:
    """Return the tile of a step's products: a function of only its padded number of tokens, so that
    a token's bits depend on no other token of a step of that size."""
    return TILES[kind][bisect_left(SIZES, tokens)]


# --- routing --------------------------------------------------------------------------------------


@triton.jit
def _best(scores, is_taken, e, NONE: tl.constexpr):
    """Return the best score that is not taken, and its index, the first of equals. NaN is the
    least."""
    left = tl.where(is_taken | (scores != scores), float("-inf"), scores)
    top = tl.max(left, 0)
    return top, tl.min(tl.where((left == top) & (is_taken == 0), e, NONE), 0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _scaled(weights, scale, SCORE: tl.constexpr, RENORMALISE: tl.constexpr):
    if SCORE == 2:
        weights = tl.exp(weights - tl.max(weights, 0))
        return weights / tl.sum(weights, 0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    return weights * scale


@triton.jit
def _write_pair(order, blocks, place, expert, mask):
    """Write a block of one pair of an only token."""
    tl.store(order + place, place, mask=mask)
    tl.store(blocks + 1 + place * 3, expert, mask=mask)
    tl.store(blocks + 1 + place * 3 + 1, place, mask=mask)
    tl.store(blocks + 1 + place * 3 + 2, place + 1, mask=mask)


@triton.jit
def _write_pairs(
    order, blocks, ranks, ids, mask, E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr
):
    """Write the pairs of an only token, each of which is a block; expert E is the shared one."""
    tl.store(blocks, TOP_K + (SHARED > 0))
    _write_pair(order, blocks, ranks, ids, mask)
    if SHARED:
        _write_pair(order, blocks, TOP_K, E, True)


@triton.jit
def route_kernel(
    logits, router_bias, choice_bias, ids_out, weights_out, order, blocks, stride, scale,
    E: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr,
    KEPT: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr, BY_BIAS: tl.constexpr, RENORMALISE: tl.constexpr, SHARED: tl.constexpr,
    ALONE: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One token a program. Experts lie in GROUPS_P x SIZE_P places, groups of E / GROUPS each.
    SHARED: 1: one more expert has a weight of 1, 2: the sigmoid of one more logit. ALONE: an only
    token's experts are in order as they are, so their pairs and blocks are written too."""
    if WAITS:
        gdc_wait()
    row = tl.program_id(0)
    PLACES: tl.constexpr = GROUPS_P * SIZE_P
    SIZE: tl.constexpr = E // GROUPS
    place = tl.arange(0, PLACES)
    group, member = place // SIZE_P, place % SIZE_P
    live = (group < GROUPS) & (member < SIZE)
    e = group * SIZE + member
    COLUMNS: tl.constexpr = TOP_K + (SHARED > 0)
    logits += row * stride
    x = tl.load(logits + e, mask=live, other=float("-inf"))
    if HAS_BIAS:
        x += tl.load(router_bias + e, mask=live, other=0.0).to(tl.float32)
    if SCORE == 0:
        shifted = tl.exp(x - tl.max(x, 0))
        scores = shifted / tl.sum(shifted, 0)
    elif SCORE == 1:
        scores = _sigmoid(x)
    else:
        scores = x
    choice = scores
    if BY_BIAS:
        choice += tl.load(choice_bias + e, mask=live, other=0.0)
    choice = tl.where(live, choice, float("-inf"))
    if GROUPS > 1:
        table = tl.reshape(choice, [GROUPS_P, SIZE_P])
        column = tl.arange(0, SIZE_P)[None, :]
        best = tl.max(table, 1)
        if BY_BIAS:
            first = tl.min(tl.where(table == best[:, None], column, SIZE_P), 1)
            second = tl.max(tl.where(column == first[:, None], float("-inf"), table), 1)
            best += second
        g = tl.arange(0, GROUPS_P)
        is_kept = g < 0
        for _ in tl.static_range(KEPT):
            _, at = _best(best, is_kept | (g >= GROUPS), g, GROUPS_P)
            is_kept = is_kept | (g == at)
        table = tl.where(is_kept[:, None], table, float("-inf"))
        choice = tl.reshape(table, [PLACES])
    j = tl.arange(0, TOP_P)
    ids = tl.full([TOP_P], E, tl.int32)
    weights = tl.full([TOP_P], float("-inf") if SCORE == 2 else 0.0, tl.float32)
    is_taken = live == 0
    for i in tl.static_range(TOP_K):
        _, at = _best(choice, is_taken, e, E)
        mine = (e == at) & live
        is_taken = is_taken | mine
        ids = tl.where(j == i, at, ids)
        weights = tl.where(j == i, tl.sum(tl.where(mine, scores, 0.0), 0), weights)
    weights = _scaled(weights, scale, SCORE, RENORMALISE)
    rank = tl.sum((ids[None, :] < ids[:, None]).to(tl.int32), 1)
    tl.store(ids_out + row * COLUMNS + rank, ids, mask=j < TOP_K)
    tl.store(weights_out + row * COLUMNS + rank, weights, mask=j < TOP_K)
    if SHARED:
        own = 1.0 if SHARED == 1 else _sigmoid(tl.load(logits + E))
        tl.store(ids_out + row * COLUMNS + TOP_K, E)
        tl.store(weights_out + row * COLUMNS + TOP_K, own)
    if ALONE:
        _write_pairs(order, blocks, rank, ids, j < TOP_K, E, TOP_K, SHARED)


def route(
    logits: torch.Tensor, routing: Routing, router_bias: torch.Tensor | None,
    choice_bias: torch.Tensor | None, pairs: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return each token's experts in ascending order, int32, and their weights, fp32: both
    [T, choices]. `pairs`: of an only token, where to write what `sort_pairs` returns.

    logits [T, E] fp32, or one more, rows of any stride, without the router's bias [E]; choice_bias
    [E] fp32. A NaN is the least of all scores, so that a token of NaN has experts too, and its
    weights are NaN.
    """
    tokens, experts = len(logits), logits.shape[1] - (routing.shared == "gated")
    ids = torch.empty(tokens, routing.choices, dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(ids, dtype=torch.float32)
    if tokens:
        pdl = _after_short(logits, tokens)
        route_kernel[(tokens,)](
            logits, logits if router_bias is None else router_bias,
            logits if choice_bias is None else choice_bias, ids, weights,
            *(pairs or (ids, ids)), logits.stride(0), routing.scale,
            E=experts, GROUPS=routing.groups, GROUPS_P=triton.next_power_of_2(routing.groups),
            SIZE_P=triton.next_power_of_2(experts // routing.groups), KEPT=routing.groups_kept,
            TOP_K=routing.top_k, TOP_P=triton.next_power_of_2(routing.top_k),
            SCORE=SCORES[routing.score], HAS_BIAS=router_bias is not None,
            BY_BIAS=choice_bias is not None, RENORMALISE=routing.renormalise,
            SHARED=SHARED[routing.shared], ALONE=pairs is not None, WAITS=bool(pdl),
            num_warps=1 if experts <= 128 else 4, **pdl,
        )  # fmt: skip
    return ids, weights


# --- sorting --------------------------------------------------------------------------------------


@triton.jit
def _write_blocks(counts, e, blocks, BT: tl.constexpr):
    """Write the list of blocks of experts' counts: its length, then (expert, first, end) each."""
    ends = tl.cumsum(counts, 0)
    number = (counts + BT - 1) // BT
    last = tl.cumsum(number, 0)
    tl.store(blocks, tl.sum(number, 0))
    for i in range(tl.max(number, 0)):
        at = blocks + 1 + (last - number + i) * 3
        first = ends - counts + i * BT
        tl.store(at, e, mask=i < number)
        tl.store(at + 1, first, mask=i < number)
        tl.store(at + 2, tl.minimum(first + BT, ends), mask=i < number)


@triton.jit
def sort_few_kernel(
    ids, order, blocks, pairs,
    EP: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr, BT: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Sort up to P pairs by expert, stably, in one program."""
    if WAITS:
        gdc_wait()
    q = tl.arange(0, P)
    e = tl.arange(0, EP)
    all_ids = tl.load(ids + q, mask=q < pairs, other=EP)
    counts = tl.zeros([EP], tl.int32)
    for start in range(0, pairs, STEP):
        p = start + tl.arange(0, STEP)
        mine = tl.load(ids + p, mask=p < pairs, other=EP)
        is_before = (all_ids[None, :] < mine[:, None]) | (
            (all_ids[None, :] == mine[:, None]) & (q[None, :] < p[:, None])
        )
        tl.store(order + tl.sum(is_before.to(tl.int32), 1), p, mask=p < pairs)
        counts += tl.sum((mine[None, :] == e[:, None]).to(tl.int32), 1)
    _write_blocks(counts, e, blocks, BT)


@triton.jit
def count_kernel(ids, counts, pairs, EP: tl.constexpr, CHUNK: tl.constexpr, WAITS: tl.constexpr):
    """Count each expert's pairs of a chunk. Grid: chunks."""
    if WAITS:
        gdc_wait()
    p = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    e = tl.arange(0, EP)
    mine = tl.load(ids + p, mask=p < pairs, other=EP)
    found = tl.sum((mine[None, :] == e[:, None]).to(tl.int32), 1)
    tl.store(counts + tl.program_id(0) * EP + e, found)


@triton.jit
def place_kernel(
    ids, counts, order, blocks, pairs, chunks,
    EP: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, BT: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Write each pair of a chunk to its place; the first program lists the blocks. Grid: chunks.

    Each program adds up all counts again: a launch more would take longer.
    """
    if WAITS:
        gdc_wait()
    chunk = tl.program_id(0)
    e = tl.arange(0, EP)
    c = tl.arange(0, STEP)
    total = tl.zeros([EP], tl.int32)
    before = tl.zeros([EP], tl.int32)
    for start in range(0, chunks, STEP):
        at = counts + (start + c)[:, None] * EP + e[None, :]
        found = tl.load(at, mask=(start + c < chunks)[:, None], other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((start + c < chunk)[:, None], found, 0), 0)
    first = tl.cumsum(total, 0) - total + before
    i = tl.arange(0, CHUNK)
    p = chunk * CHUNK + i
    mine = tl.load(ids + p, mask=p < pairs, other=0)
    rank = tl.sum(((mine[None, :] == mine[:, None]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    tl.store(order + tl.gather(first, mine, 0) + rank, p, mask=p < pairs)
    if chunk == 0:
        _write_blocks(total, e, blocks, BT)


def blocks_max(pairs: int, experts: int, block_size: int) -> int:
    """Return the most blocks that a choice of experts can make of so many pairs."""
    return min(pairs, min(experts, pairs) + pairs // block_size)


def sort_pairs(
    ids: torch.Tensor, experts: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs by expert, then by token, [P] int32, and the list of their blocks.

    ids [T, k] int32. The list: its length, then (expert, first, end) of each block, int32; places
    behind its length are undefined. `block_size`: most pairs of a block.
    """
    tokens, pairs = len(ids), ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    blocks = ids.new_empty(1 + 3 * blocks_max(pairs, experts, block_size))
    pdl = _after_short(ids, tokens)
    common: dict[str, Any] = {"EP": triton.next_power_of_2(experts), "WAITS": bool(pdl), **pdl}
    if pairs <= PAIRS_OF_ONE_PROGRAM:
        sort_few_kernel[(1,)](
            ids, order, blocks, pairs, P=max(16, triton.next_power_of_2(pairs)), STEP=16,
            BT=block_size, num_warps=8, **common,
        )  # fmt: skip
        return order, blocks
    chunks = triton.cdiv(pairs, CHUNK)
    counts = ids.new_empty(chunks * common["EP"])
    count_kernel[(chunks,)](ids, counts, pairs, CHUNK=CHUNK, num_warps=8, **common)
    place_kernel[(chunks,)](
        ids, counts, order, blocks, pairs, chunks, CHUNK=CHUNK, STEP=16, BT=block_size, num_warps=8,
        **common,
    )  # fmt: skip
    return order, blocks


def choose(
    logits: torch.Tensor, routing: Routing, router_bias: torch.Tensor | None,
    choice_bias: torch.Tensor | None, experts: int, block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the weights of `route`, and the pairs and blocks of `sort_pairs`; `experts`: all that
    there are, shared ones too. One launch for one token, else two or three."""
    if len(logits) == 1:
        order = torch.empty(routing.choices, dtype=torch.int32, device=logits.device)
        pairs = order, order.new_empty(1 + 3 * routing.choices)
        _, weights = route(logits, routing, router_bias, choice_bias, pairs)
        return weights, *pairs
    ids, weights = route(logits, routing, router_bias, choice_bias)
    return weights, *sort_pairs(ids, experts, block_size)


# --- products -------------------------------------------------------------------------------------


@triton.jit
def _activated(gate, up, ACT: tl.constexpr):
    if ACT == 2:
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    at = gate
    if ACT == 3:  # GELU by tanh is a sigmoid, as in `fused_ops`
        at = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-at)) * up


@triton.jit
def expert_product_kernel(
    x, x_scales, w, scales, bias, out, order, blocks, N, K, matrix, scale_matrix,
    KIND: tl.constexpr, GROUPS: tl.constexpr, ACT: tl.constexpr, GATHER: tl.constexpr,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """One block of pairs by one tile of rows of its expert's matrix. Grid: (blocks at most, tiles).

    GATHER: x has a row for each token, and out one for each place in `order`; otherwise x has a row
    for each place, and out one for each pair. ACT: rows 2i and 2i + 1 of the matrix are gate and up
    of channel i, and out has N / 2 columns. `matrix`, `scale_matrix`: elements of one expert's.
    """
    if WAITS:
        gdc_wait()
    b = tl.program_id(0)
    if b >= tl.load(blocks):
        return
    expert = tl.load(blocks + 1 + b * 3).to(tl.int64)
    place = tl.load(blocks + 1 + b * 3 + 1) + tl.arange(0, BT)
    live = place < tl.load(blocks + 1 + b * 3 + 2)
    pair = tl.load(order + place, mask=live, other=0)
    row = pair // TOP_K if GATHER else place
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    there = n < N
    row = row.to(tl.int64)
    acc = product(
        x + row * K, x_scales + row * GROUPS, live, w + expert * matrix,
        scales + expert * scale_matrix, n, there, 0, K, N, K, KIND, GROUPS, BT, BN, BK, EVEN, PTX,
        STAGES,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + expert * N + n, mask=there, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    if ACT == 0:
        target = (place if GATHER else pair).to(tl.int64)
        at = out + target[:, None] * N + n[None, :]
        tl.store(at, tl.trans(acc).to(kind), mask=live[:, None] & there[None, :])
    else:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BN // 2, 2, BT]), [0, 2, 1]))
        value = tl.trans(_activated(gate, up, ACT)).to(kind)
        column = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
        at = out + place.to(tl.int64)[:, None] * (N // 2) + column[None, :]
        tl.store(at, value, mask=live[:, None] & (column < N // 2)[None, :])


def expert_product(
    x: torch.Tensor | Fp8Rows, matrix: ExpertMatrix, order: torch.Tensor, blocks: torch.Tensor,
    top_k: int, tile: Tile, *, activation: ExpertActivation | Literal[""] = "",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return each pair's row times its expert's matrix, in `dtype`, else x's.

    With `activation`: x [T, K] has a row a token; gate and up rows alternate in the matrix, and the
    result [P, N / 2] is in the pairs' sorted order. Without: x [P, K] is in that order, and the
    result [P, N] has a row a pair. x is in fp8 where the matrix is. `order`, `blocks`: of
    `sort_pairs` with tile.pairs.
    """
    pairs, width = len(order), matrix.rows // 2 if activation else matrix.rows
    x, x_scales = x if isinstance(x, Fp8Rows) else (x, order)
    out = x.new_empty(pairs, width, dtype=dtype or x.dtype)
    values, scales, scale_matrix, groups = matrix.values, order, 0, 1
    if not isinstance(values, torch.Tensor):
        groups = values.scales.shape[1] if isinstance(values, Fp8) else 1
        values, scales = values
        scale_matrix = scales[0].numel()
    pdl = (_after_short if activation else _dependent)(x, pairs // top_k)
    grid = (blocks_max(pairs, len(values), tile.pairs), triton.cdiv(matrix.rows, tile.rows))
    expert_product_kernel[grid](
        x, x_scales, values, scales, order if matrix.bias is None else matrix.bias, out, order,
        blocks, matrix.rows, matrix.columns, values[0].numel(), scale_matrix,
        KIND=matrix.kind, GROUPS=groups, ACT=ACTIVATIONS[activation], GATHER=bool(activation),
        TOP_K=top_k, HAS_BIAS=matrix.bias is not None,
        BT=tile.pairs, BN=tile.rows, BK=tile.columns, EVEN=matrix.columns % tile.columns == 0,
        PTX=can_inline_ptx(x), STAGES=tile.stages, WAITS=bool(pdl), num_warps=tile.warps, **pdl,
    )  # fmt: skip
    return out


@triton.jit
def add_experts_kernel(
    found, weights, shared, out, C: tl.constexpr, TOP_K: tl.constexpr, STEP: tl.constexpr,
    HAS_SHARED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    if WAITS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = c < C
    kind = out.dtype.element_ty
    total = tl.zeros([STEP], tl.float32)
    for i in tl.static_range(TOP_K):
        weight = tl.load(weights + row * TOP_K + i)
        value = tl.load(found + (row * TOP_K + i) * C + c, mask=inside, other=0.0)
        total += weight * value.to(tl.float32)
    if HAS_SHARED:  # rounded first, as in the reference
        more = tl.load(shared + row * C + c, mask=inside, other=0.0).to(tl.float32)
        total = total.to(kind).to(tl.float32) + more
    tl.store(out + row * C + c, total.to(kind), mask=inside)


def add_experts(
    found: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """Return the weighted sum of each token's rows, in ascending order of experts and in fp32, and
    `shared` added: [T, C].

    found [P, C], a row a pair; weights [T, k] fp32; shared [T, C].
    """
    tokens, top_k = weights.shape
    channels = found.shape[1]
    out = found.new_empty(tokens, channels)
    step = min(1024, triton.next_power_of_2(channels))
    pdl = _dependent(found, tokens)
    add_experts_kernel[(tokens, triton.cdiv(channels, step))](
        found, weights, found if shared is None else shared, out, C=channels, TOP_K=top_k,
        STEP=step, HAS_SHARED=shared is not None, WAITS=bool(pdl), num_warps=4, **pdl,
    )  # fmt: skip
    return out


def _dependent(tensor: torch.Tensor, tokens: int) -> dict[str, Any]:
    return dependent_options(tensor) if tokens <= DEPENDENT_ROWS_MAX else {}


def _after_short(tensor: torch.Tensor, tokens: int) -> dict[str, Any]:
    """Return the options of a launch after one that fills few multiprocessors."""
    return dependent_options(tensor) if tokens <= SHORT_TOKENS_MAX else {}
