"""Experts on a GPU against `kernels.reference_experts`, in the interpreter or on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from kernels import reference_experts
from kernels.gpu import experts
from kernels.gpu.experts import ExpertMatrix, Tile
from kernels.gpu.products import Fp8, Fp8Rows, fp8_of
from kernels.reference_experts import Block, ExpertActivation, Routing
from kernels.reference_weights import (
    MAGNITUDES,
    Mxfp4,
    Packed,
    Weight,
    as_dense,
    panels,
    round_rows,
    to_fp8,
    to_mxfp4,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
"""What products multiply; the interpreter multiplies bf16 as integers."""

ERROR_MAX = 1e-2 if DEVICE.type == "cuda" else 1e-5
"""Largest distance from the reference, over its length."""


FP8_ERROR_MAX = 6e-2
"""The same where rows are rounded to 3 bits of mantissa: 2^-4 at most, a quarter of it usually."""


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


ROUTINGS: dict[str, tuple[int, Routing, bool]] = {
    "Mixtral": (8, Routing(2), False),
    "Qwen2-MoE": (60, Routing(4, renormalise=False), False),
    "Qwen3-MoE": (128, Routing(8), False),
    "gpt-oss": (32, Routing(4, "chosen_softmax"), False),
    "GLM-4-MoE": (128, Routing(8, "sigmoid", scale=2.5), True),
    "DeepSeek-V2": (160, Routing(6, renormalise=False, scale=16.0, groups=8, groups_kept=3), False),
    "DeepSeek-V3": (256, Routing(8, "sigmoid", scale=2.5, groups=8, groups_kept=4), True),
    "one expert": (1, Routing(1), False),
    "Qwen3-Next": (64, Routing(10, shared="gated"), False),
    "GLM-4.5-Air": (128, Routing(8, "sigmoid", scale=2.5, shared="add"), True),
}
"""Experts, routing, and whether a bias changes the choice."""


def logits_of(tokens: int, count: int, seed: int = 0) -> torch.Tensor:
    """Return logits of few values, so that many are equal."""
    return (rand(tokens, count, seed=seed) * 4).round() / 4


@pytest.mark.parametrize("name", ROUTINGS)
def test_tokens_take_the_reference_s_experts(name: str) -> None:
    """Ties included: another expert's output would be another answer."""
    count, routing, by_bias = ROUTINGS[name]
    logits = logits_of(11, count + (routing.shared == "gated"))
    choice_bias = (rand(count, seed=1) * 4).round() / 4 if by_bias else None
    expected, expected_weights = reference_experts.route(logits, routing, choice_bias)

    ids, weights = experts.route(logits, routing, None, choice_bias)

    assert ids.tolist() == expected.tolist()
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


def test_the_router_s_bias_is_part_of_the_weight() -> None:
    """It moves the logit, unlike a bias of the choice."""
    logits, bias = logits_of(9, 32), logits_of(1, 32, seed=1)[0]
    routing = Routing(4, "chosen_softmax")
    expected, expected_weights = reference_experts.route(logits + bias, routing)

    ids, weights = experts.route(logits, routing, bias, None)

    assert ids.tolist() == expected.tolist()
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_of_nan_has_experts_of_its_own(name: str) -> None:
    """A place outside the experts would be read and written; its neighbours are as without it."""
    count, routing, by_bias = ROUTINGS[name]
    logits = logits_of(3, count + (routing.shared == "gated"))
    choice_bias = torch.zeros(count, device=DEVICE) if by_bias else None
    alone, alone_weights = experts.route(logits, routing, None, choice_bias)
    logits[1] = float("nan")

    ids, weights = experts.route(logits, routing, None, choice_bias)

    assert len(set(ids[1].tolist())) == routing.choices
    assert int(ids[1].min()) >= 0
    assert int(ids[1].max()) < count + bool(routing.shared)
    assert bool(weights[1, : routing.top_k].isnan().all())
    assert ids[::2].tolist() == alone[::2].tolist()
    torch.testing.assert_close(weights[::2], alone_weights[::2], rtol=0, atol=0)


def listed(blocks: torch.Tensor) -> list[Block]:
    count, *rest = blocks.tolist()
    return [Block(*rest[3 * i : 3 * i + 3]) for i in range(count)]


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 65, 300])
@pytest.mark.parametrize(("count", "top_k", "block_size"), [(8, 2, 16), (60, 4, 128), (128, 8, 16)])
def test_pairs_are_sorted_by_expert_and_cut_into_blocks(
    tokens: int, count: int, top_k: int, block_size: int
) -> None:
    """Stably: a token's pairs stand in one order in any batch."""
    logits = logits_of(tokens, count, seed=tokens)
    ids, _ = reference_experts.route(logits, Routing(top_k))
    order, blocks = reference_experts.sort_pairs(ids, block_size)

    found_order, found = experts.sort_pairs(ids.int(), count, block_size)

    assert found_order.tolist() == order.tolist()
    assert sorted(listed(found)) == sorted(blocks)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_are_chosen_and_sorted_together(name: str, tokens: int) -> None:
    """In one launch for an only token, whose experts are in order as they are."""
    count, routing, by_bias = ROUTINGS[name]
    logits = logits_of(tokens, count + (routing.shared == "gated"), seed=tokens)
    bias = logits_of(1, count, seed=1)[0] if by_bias else None
    ids, weights = reference_experts.route(logits, routing, bias)
    order, blocks = reference_experts.sort_pairs(ids, 16)

    found_weights, found_order, found = experts.choose(
        logits, routing, None, bias, count + bool(routing.shared), 16
    )

    torch.testing.assert_close(found_weights, weights, rtol=1e-5, atol=1e-6)
    assert found_order.tolist() == order.tolist()
    assert sorted(listed(found)) == sorted(blocks)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_all_tokens_may_take_the_same_experts(tokens: int) -> None:
    """The list of blocks has room for the most uneven choice."""
    ids = torch.tensor([[3, 7]] * tokens, dtype=torch.int32, device=DEVICE)
    order, blocks = reference_experts.sort_pairs(ids.long(), 16)

    found_order, found = experts.sort_pairs(ids, 8, 16)

    assert found_order.tolist() == order.tolist()
    assert sorted(listed(found)) == sorted(blocks)


class Layer(NamedTuple):
    """A layer's experts as the kernels take them and as the reference does."""

    gate_up: ExpertMatrix
    down: ExpertMatrix
    plain: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]


def layer_of(
    count: int, inner: int, hidden: int, *, kind: str = "", has_bias: bool = False
) -> Layer:
    gate, up = (rand(count, inner, hidden, seed=s).to(HALF) * hidden**-0.5 for s in (1, 2))
    down = rand(count, hidden, inner, seed=3).to(HALF) * inner**-0.5
    gate_up_bias, down_bias, in_turns_bias = None, None, None
    if has_bias:
        gate_up_bias = rand(count, 2 * inner, seed=4).to(HALF)
        in_turns_bias = torch.stack(gate_up_bias.chunk(2, 1), 2).flatten(1)
        down_bias = rand(count, hidden, seed=5).to(HALF)
    in_turns = stored(torch.stack([gate, up], 2).flatten(1, 2), kind)
    down_stored = stored(down, kind)
    plain = as_dense(in_turns, HALF)
    return Layer(
        ExpertMatrix(in_layout(in_turns), 2 * inner, hidden, in_turns_bias),
        ExpertMatrix(in_layout(down_stored), hidden, inner, down_bias),
        (
            torch.cat([plain[:, 0::2], plain[:, 1::2]], 1), gate_up_bias,
            as_dense(down_stored, HALF), down_bias,
        ),
    )  # fmt: skip


def stored(weights: torch.Tensor, kind: str) -> Weight:
    if kind == "fp8, groups":
        codes, scales = round_rows(weights, 128)
        return Packed("fp8", codes, scales, 128)
    if kind == "fp8":
        return to_fp8(weights)
    return to_mxfp4(weights) if kind else weights


def in_layout(weights: Weight) -> torch.Tensor | Mxfp4 | Fp8:
    if isinstance(weights, torch.Tensor):
        return weights
    return panels(weights) if weights.kind == "mxfp4" else fp8_of(weights)


def rounded(x: torch.Tensor, matrix: ExpertMatrix) -> torch.Tensor | Fp8Rows:
    """Return rows as the matrix takes them."""
    if not isinstance(matrix.values, Fp8):
        return x
    groups = matrix.values.scales.shape[1]
    return Fp8Rows(*round_rows(x, x.shape[1] // groups))


def run(
    x: torch.Tensor, layer: Layer, ids: torch.Tensor, weights: torch.Tensor, tile: Tile,
    activation: ExpertActivation = "silu", shared: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    values = layer.gate_up.values
    count = len(values if isinstance(values, torch.Tensor) else values[0])
    top_k = ids.shape[1]
    order, blocks = experts.sort_pairs(ids, count, tile.pairs)
    hidden = experts.expert_product(
        rounded(x, layer.gate_up), layer.gate_up, order, blocks, top_k, tile,
        activation=activation, dtype=HALF,
    )  # fmt: skip
    found = experts.expert_product(
        rounded(hidden, layer.down), layer.down, order, blocks, top_k, tile, dtype=HALF
    )
    return experts.add_experts(found, weights, shared)


SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": {"count": 4, "inner": 32, "hidden": 128},
    "ragged": {"count": 5, "inner": 24, "hidden": 40},
    "biases": {"count": 4, "inner": 64, "hidden": 128, "has_bias": True},
    "packed": {"count": 3, "inner": 64, "hidden": 128, "kind": "mxfp4"},
    "packed, ragged": {"count": 2, "inner": 64, "hidden": 192, "kind": "mxfp4", "has_bias": True},
    "fp8": {"count": 3, "inner": 64, "hidden": 128, "kind": "fp8"},
    "fp8, ragged": {"count": 2, "inner": 48, "hidden": 144, "kind": "fp8", "has_bias": True},
    "fp8, groups": {"count": 3, "inner": 128, "hidden": 256, "kind": "fp8, groups"},
}
TILES = {"few": Tile(16, 32, 128, 2, 4), "many": Tile(64, 64, 128, 2, 4)}

CASES: list[tuple[str, str, ExpertActivation]] = [
    *((shape, tile, "silu") for shape in SHAPES for tile in TILES),
    ("ragged", "few", "gelu_tanh"),
    ("ragged", "few", "clamped"),
    ("biases", "many", "clamped"),
]


def chosen(tokens: int, count: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = reference_experts.route(logits_of(tokens, count, seed=9), Routing(top_k))
    return ids.int(), weights


@pytest.mark.parametrize(("shape", "tile", "activation"), CASES)
def test_experts_compute_what_the_reference_does(
    shape: str, tile: str, activation: ExpertActivation
) -> None:
    """Matrices whose sizes fill tiles and do not, of both kinds, with biases and without."""
    layer = layer_of(**SHAPES[shape])
    x = rand(11, layer.gate_up.columns, seed=7).to(HALF)
    ids, weights = chosen(11, SHAPES[shape]["count"])
    expected = reference_experts.experts(x, ids.long(), weights, *layer.plain, activation)
    shared = rand(*x.shape, seed=8).to(HALF)

    found = run(x, layer, ids, weights, TILES[tile], activation, shared)

    expected = (expected + shared).float()
    limit = FP8_ERROR_MAX if "fp8" in shape else ERROR_MAX
    assert float((found.float() - expected).norm() / expected.norm()) <= limit


@pytest.mark.parametrize("shape", ["whole tiles", "packed", "fp8", "fp8, groups"])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(shape: str) -> None:
    """Within one tile: a token's products do not depend on who else takes its experts."""
    layer = layer_of(**SHAPES[shape])
    x = rand(3, layer.gate_up.columns, seed=7).to(HALF)
    ids, weights = chosen(3, SHAPES[shape]["count"])
    together = run(x, layer, ids, weights, TILES["few"])

    alone = [
        run(x[i : i + 1], layer, ids[i : i + 1], weights[i : i + 1], TILES["few"]) for i in range(3)
    ]

    assert torch.equal(torch.cat(alone), together)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", ["ragged", "packed, ragged", "fp8, ragged"])
def test_a_row_of_nan_stays_in_its_row(shape: str) -> None:
    """One sequence's broken numbers end that sequence, not those whose tokens take its experts."""
    layer = layer_of(**SHAPES[shape])
    x = rand(6, layer.gate_up.columns, seed=7).to(HALF)
    ids, weights = chosen(6, SHAPES[shape]["count"])
    whole = run(x, layer, ids, weights, TILES["few"], "clamped")
    x[2] = float("nan")

    broken = run(x, layer, ids, weights, TILES["few"], "clamped")

    assert bool(broken[2].isnan().all())
    assert torch.equal(broken[[0, 1, 3, 4, 5]], whole[[0, 1, 3, 4, 5]])


def test_each_four_bit_float_is_unpacked_exactly() -> None:
    """All values under all exponents that are usual, through products with one."""
    matrix = torch.zeros(16, 128, device=DEVICE)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=DEVICE)
    for group in range(4):
        matrix[:, group * 32 : group * 32 + 16] = torch.ldexp(
            table, torch.tensor(group * 7 - 20, device=DEVICE)
        )
    packed = to_mxfp4(matrix[None])
    stack = ExpertMatrix(panels(packed), 16, 128)
    x = torch.eye(128, device=DEVICE, dtype=HALF)
    ids = torch.zeros(128, 1, dtype=torch.int32, device=DEVICE)
    order, blocks = experts.sort_pairs(ids, 1, 16)

    found = experts.expert_product(x, stack, order, blocks, 1, Tile(16, 16, 128, 2, 4))

    assert torch.equal(found.T.float(), matrix)
    assert torch.equal(packed.dense(torch.float32)[0], matrix)
