"""Linear maps of packed weights on a GPU against their twins, in the interpreter or on one."""

from __future__ import annotations

import pytest
import torch

from engine.config import WeightsKind
from engine.models.gpu_layers import GpuOps, gpu_form
from engine.models.layers import Mlp, TensorSource
from kernels.reference_weights import (
    Packed,
    Weight,
    fp8_product,
    round_rows,
    stack,
    to_fp8,
    to_int4,
    to_mxfp4,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found.float() - expected).norm() / expected.norm()) <= 1e-2


@pytest.mark.parametrize("tokens", [1, 17, 40, 80])
@pytest.mark.parametrize("group", [128, 256])
def test_a_map_rounds_rows_that_nothing_else_rounded(tokens: int, group: int) -> None:
    """At each size of tile, with a scale a row and one for each 128 columns; with the bias."""
    weight, x, bias = rand(96, 256, seed=1), rand(tokens, 256).to(HALF), rand(96, seed=2)
    packed = Packed("fp8", *round_rows(weight, group), group)

    found = GpuOps().linear(packed, bias.bfloat16())(x)

    assert near(found, fp8_product(x, packed) + bias.bfloat16())


def test_an_mlp_hands_its_maps_rows_in_fp8() -> None:
    """The norm and the activation round what the next map alone reads."""
    weights: dict[str, Weight] = {
        f"mlp.{name}_proj.weight": to_fp8(rand(*shape, seed=seed))
        for seed, (name, shape) in enumerate(
            {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items()
        )
    }
    gate, up, down = (w for w in weights.values() if isinstance(w, Packed))
    ops, x, norm = GpuOps(), rand(3, 64).bfloat16(), torch.ones(64, device=DEVICE).bfloat16()
    mlp = Mlp(TensorSource({**weights}, ""), ops, "silu", "mlp")

    normed, _ = ops.norm(x, None, norm, 1e-5, mlp.reader)
    found = mlp(normed)

    plain, _ = ops.norm(x, None, norm, 1e-5)
    hidden = torch.nn.functional.silu(fp8_product(plain, gate).bfloat16().float())
    hidden = hidden * fp8_product(plain, up).bfloat16().float()
    assert not isinstance(normed, torch.Tensor)
    expected = fp8_product(hidden, down)
    assert float((found.float() - expected).norm() / expected.norm()) <= 5e-2


@pytest.mark.parametrize("tokens", [1, 17, 40, 300])
def test_a_map_of_4_bits_is_multiplied_at_each_number_of_rows(tokens: int) -> None:
    """By each tile, and unpacked for many rows; with the bias."""
    packed, x = to_int4(rand(96, 256, seed=1), 128), rand(tokens, 256).to(HALF)
    bias = rand(96, seed=2).to(HALF)
    ops = GpuOps()
    linear, wider = ops.linear(packed, bias), ops.linear(to_int4(rand(96, 512), 32), None)

    found = linear(x)

    expected = x.float() @ packed.dense(torch.float32).T + bias.float()
    assert near(found, expected)
    assert wider(rand(tokens, 512).to(HALF)).shape == (tokens, 96)  # of the same scratch


def int4_of_stack(weight: torch.Tensor) -> Packed:
    if weight.dim() == 2:
        return to_int4(weight, 128)
    return stack([to_int4(one, 128) for one in weight])


MAP, HEAD = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"
FORMS: dict[str, tuple[WeightsKind, str, str, bool]] = {
    "bf16 as it is": ("auto", MAP, "bf16", False),
    "bf16 on request in fp8": ("fp8", MAP, "bf16", True),
    "the head is not": ("fp8", HEAD, "bf16", False),
    "nor the router": ("fp8", "model.layers.0.mlp.gate.weight", "bf16", False),
    "nor what is multiplied by head": (
        "fp8", "model.layers.0.self_attn.k_b_proj.weight", "bf16", False,
    ),
    "fp8 of a file": ("auto", MAP, "fp8", True),
    "of the head too": ("auto", HEAD, "fp8", True),
    "not on request": ("bf16", MAP, "fp8", False),
    "MXFP4 of experts": ("auto", "model.layers.0.mlp.experts.up_proj.weight", "mxfp4", True),
    "of no other map": ("auto", MAP, "mxfp4", False),
    "4 bits of a file": ("auto", MAP, "int4", True),
    "those too on request": ("bf16", MAP, "int4", False),
    "not of experts": ("auto", "model.layers.0.mlp.experts.up_proj.weight", "int4", False),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "given", "packed"), FORMS.values(), ids=FORMS.keys())
def test_weights_are_packed_where_the_kernels_take_them(
    kind: WeightsKind, name: str, given: str, packed: bool
) -> None:
    """And unpacked elsewhere, without losing what the file has."""
    weight = rand(2, 32, 128) if ".experts." in name else rand(32, 128)
    pack = {"fp8": to_fp8, "mxfp4": to_mxfp4, "int4": int4_of_stack}
    whole: Weight = pack[given](weight) if given in pack else weight.bfloat16()

    found = gpu_form(kind)(name, whole)

    assert isinstance(found, Packed) == packed
    if not packed and isinstance(whole, Packed):
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, whole.dense(torch.bfloat16))


def test_sizes_that_the_library_does_not_take_stay_as_they_are() -> None:
    """Its products want rows and columns in sixteens."""
    form = gpu_form("fp8")

    assert isinstance(form(MAP, rand(32, 40).bfloat16()), torch.Tensor)
    assert isinstance(form(MAP, rand(40, 32).bfloat16()), torch.Tensor)
    assert isinstance(form(MAP, rand(32, 48).bfloat16()), Packed)
