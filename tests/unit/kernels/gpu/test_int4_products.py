"""Products with weights of 4 bits against the values that their files have."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import int4_products
from kernels.gpu.int4_products import fits_int4, int4_of
from kernels.gpu.products import ProductTile
from kernels.reference_weights import Packed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
ERROR_MAX = 4e-3 if DEVICE.type == "cuda" else 1e-5
"""Largest distance from the reference, over its length; the result is rounded on a GPU."""

TILE = ProductTile(16, 32, 128, 2, 4)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weight_of(rows: int, columns: int, group: int, zeros: str) -> Packed:
    """Return random codes with scales, and minima as files have them: of the middle code, of a
    code for each group, or any number."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, columns // group, generator=generator) * 0.02 + 0.001
    points = torch.randint(16, scales.shape, generator=generator).float()
    minima = {
        "middle": scales * -8, "codes": scales * -points, "any": scales * -points + 0.003,
        "none": None,
    }[zeros]  # fmt: skip
    return Packed("int4", codes, scales, group, minima).each(lambda part: part.to(DEVICE))


def tickets() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.int32, device=DEVICE)


def run(
    x: torch.Tensor, weight: Packed, split: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return int4_products.int4_linear(x.to(HALF), int4_of(weight), bias, tickets(), TILE, split)


@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros", "split"),
    [
        (96, 256, 128, "codes", 1), (80, 384, 32, "any", 3), (40, 256, 64, "middle", 1),
        (64, 512, 512, "none", 3), (40, 256, 64, "any", 1), (32, 256, 32, "codes", 1),
    ],
)  # fmt: skip
def test_products_are_those_of_the_unpacked_weights(
    rows: int, columns: int, group: int, zeros: str, split: int
) -> None:
    """Each size of a group, whole and in parts of K, with rows that fill tiles and do not."""
    weight, bias = weight_of(rows, columns, group, zeros), rand(rows, seed=3)
    x = rand(21, columns).to(HALF)
    expected = x.float() @ weight.dense(torch.float32).T + bias

    found = run(x, weight, split, bias.to(HALF)).float()

    assert float((found - expected).norm() / expected.norm()) <= ERROR_MAX


@pytest.mark.parametrize("zeros", ["middle", "any"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_matrix_is_unpacked_as_its_file_has_it(group: int, zeros: str) -> None:
    """To within one rounding: for steps of more rows, which the library multiplies."""
    weight = weight_of(80, 256, group, zeros)
    out = torch.empty(80, 256, dtype=HALF, device=DEVICE)

    int4_products.unpack(int4_of(weight), out)

    expected = weight.dense(torch.float32)
    assert float((out.float() - expected).abs().max()) <= float(expected.abs().max()) * 4e-3


def test_weights_whose_codes_stand_for_zero_have_no_shifts() -> None:
    """AWQ, GPTQ, compressed-tensors and GGUF's Q4_0: a product more for each group is spared."""
    assert int4_of(weight_of(32, 128, 32, "middle")).shifts is None
    assert int4_of(weight_of(32, 128, 32, "codes")).shifts is None
    assert int4_of(weight_of(32, 128, 32, "any")).shifts is not None


@pytest.mark.parametrize("split", [1, 3])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(split: int) -> None:
    """Within one tile; parts are added in the order of K, whichever program ends last."""
    weight, x = weight_of(96, 512, 128, "any"), rand(5, 512)

    together = run(x, weight, split)

    assert torch.equal(torch.cat([run(x[i : i + 1], weight, split) for i in range(5)]), together)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_of_nan_stays_in_its_row() -> None:
    """One sequence's broken numbers end that sequence alone."""
    weight, x = weight_of(96, 512, 128, "any"), rand(4, 512)
    whole = run(x, weight, 2)
    x[1] = float("nan")

    broken = run(x, weight, 2)

    assert bool(broken[1].isnan().all())
    assert torch.equal(broken[[0, 2, 3]], whole[[0, 2, 3]])


@pytest.mark.parametrize(
    ("columns", "group", "fits"),
    [(256, 128, True), (96, 32, False), (128, 32, True), (192, 64, False), (256, 48, False),
     (512, 512, True), (384, 256, False)],
)  # fmt: skip
def test_what_lies_in_no_panel_is_not_packed(columns: int, group: int, fits: bool) -> None:
    """Its matrix is unpacked when it is loaded, as before."""
    codes = torch.zeros(16, columns // 2, dtype=torch.uint8)
    packed = Packed("int4", codes, torch.ones(16, -(-columns // group)), group)

    assert fits_int4(packed) == fits
    assert not fits_int4(packed.dense(torch.float32))
