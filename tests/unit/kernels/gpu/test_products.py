"""Products in fp8 against `kernels.reference_weights`, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import fused_ops, products
from kernels.gpu.products import Fp8Rows, ProductTile, fp8_of
from kernels.reference_weights import Packed, fp8_product, round_rows, to_fp8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
ERROR_MAX = 1e-2 if DEVICE.type == "cuda" else 1e-5
"""Largest distance from the reference, over its length; the result is rounded on a GPU."""

TILE = ProductTile(16, 32, 128, 2, 4)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weight_of(rows: int, columns: int, group: int) -> Packed:
    codes, scales = round_rows(rand(rows, columns, seed=1), group)
    return Packed("fp8", codes, scales, group)


def tickets() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.int32, device=DEVICE)


def run(
    x: torch.Tensor, weight: Packed, split: int, bias: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    rows = Fp8Rows(*round_rows(x, min(weight.group, x.shape[1])))
    counts = tickets() if counts is None else counts
    return products.fp8_linear(rows, fp8_of(weight), bias, counts, HALF, TILE, split)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("rows", "columns", "group"), [(96, 256, 256), (80, 400, 400),
                                                       (96, 512, 128)])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 16, 21])
def test_products_are_the_reference_s(
    tokens: int, rows: int, columns: int, group: int, split: int
) -> None:
    """Sizes that fill tiles and do not, a scale a row and one for each 128 columns, whole and in
    parts."""
    weight, x, bias = weight_of(rows, columns, group), rand(tokens, columns), rand(rows, seed=3)
    expected = fp8_product(x, weight) + bias

    found = run(x, weight, split, bias.to(HALF)).float()

    assert float((found - expected).norm() / expected.norm()) <= ERROR_MAX


@pytest.mark.parametrize("split", [1, 3])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(split: int) -> None:
    """Within one tile; parts are added in the order of K, whichever program ends last."""
    weight, x = weight_of(96, 512, 512), rand(5, 512)

    together = run(x, weight, split)

    assert torch.equal(torch.cat([run(x[i : i + 1], weight, split) for i in range(5)]), together)


def test_tickets_are_left_as_they_were() -> None:
    """The next product counts from zero."""
    weight, counts = weight_of(96, 512, 512), tickets()

    first = run(rand(5, 512), weight, 3, counts=counts)

    assert not counts.any()
    assert torch.equal(run(rand(5, 512), weight, 3, counts=counts), first)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("group", [512, 128])
def test_a_row_of_nan_stays_in_its_row(group: int) -> None:
    """One sequence's broken numbers end that sequence alone."""
    weight, x = weight_of(96, 512, group), rand(4, 512)
    whole = run(x, weight, 2)
    x[1] = float("nan")

    broken = run(x, weight, 2)

    assert bool(broken[1].isnan().all())
    assert torch.equal(broken[[0, 2, 3]], whole[[0, 2, 3]])


@pytest.mark.parametrize(("columns", "groups"), [(96, 1), (256, 2), (1280, 10)])
def test_rows_are_rounded_by_their_groups(columns: int, groups: int) -> None:
    """The largest value of each becomes the largest of e4m3."""
    x = rand(5, columns).to(HALF)

    x[0, :4] *= 1e-4  # below the smallest normal number
    # On the CPU: torch on a GPU divides by a number as it multiplies by its inverse.
    codes, scales = round_rows(x.cpu(), columns // groups)

    found = products.round_rows(x, groups)

    assert torch.equal(found.codes.float().cpu(), codes.float())
    assert torch.equal(found.scales.cpu(), scales)


@pytest.mark.parametrize(("columns", "groups"), [(96, 1), (256, 2), (384, 3)])
@pytest.mark.parametrize("adds", [False, True])
def test_the_norm_rounds_what_it_would_write(adds: bool, columns: int, groups: int) -> None:
    """Not the sums before they are rounded: the same bits as by a launch of its own."""
    x, weight = rand(3, columns).to(HALF), rand(columns, seed=2).to(HALF)
    residual = rand(3, columns, seed=4).to(HALF) if adds else None
    plain, total = torch.empty_like(x), None if residual is None else residual.clone()
    fused_ops.residual_rms_norm(x, total, weight, plain, 1e-5)
    found = products.empty_rows(x, columns, groups)

    fused_ops.residual_rms_norm(x, residual, weight, found.codes, 1e-5, found.scales)

    expected = products.round_rows(plain, groups)
    assert torch.equal(found.codes.float(), expected.codes.float())
    assert torch.equal(found.scales, expected.scales)
    assert total is None or (residual is not None and torch.equal(residual, total))


@pytest.mark.parametrize(("columns", "groups"), [(96, 1), (256, 2), (1408, 11)])
@pytest.mark.parametrize("gelu", [False, True])
def test_the_activation_rounds_what_it_would_write(gelu: bool, columns: int, groups: int) -> None:
    """The same bits as by a launch of its own."""
    x = rand(3, 2 * columns).to(HALF)
    plain = x.new_empty(3, columns)
    fused_ops.gated_mul(x, plain, gelu=gelu)
    found = products.empty_rows(x, columns, groups)

    fused_ops.gated_mul(x, found.codes, gelu=gelu, scales=found.scales)

    expected = products.round_rows(plain, groups)
    assert torch.equal(found.codes.float(), expected.codes.float())
    assert torch.equal(found.scales, expected.scales)


def test_weights_in_fp8_have_a_scale_for_each_row() -> None:
    """What `engine.weights` makes of a matrix in bf16."""
    weight = to_fp8(rand(32, 64))

    assert weight.scales.shape == (32, 1)
    assert fp8_of(weight).scales.shape == (1, 32)
