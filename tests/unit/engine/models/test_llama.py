"""Both ways through a Llama, in torch and in C, against a dense reading of the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.attention.batch import make_batch
from engine.attention.cpu_backend import CpuAttention
from engine.attention.torch_backend import TorchAttention
from engine.kv.storage import KvStorage, kv_format
from engine.model_store import ModelConfig
from engine.models.cpu_llama import CpuLlama, Kernels, load_kernels
from engine.models.gpu_layers import CUT_ROWS, in_two, whole_waves
from engine.models.layers import TorchOps
from engine.models.registry import build_model
from engine.plan import Row, StepPlan
from engine.runner.cpu_runner import StepModel
from engine.weights import Weights
from tests.models import LLAMA3_SCALING, tiny_config, tiny_weights
from tests.unit.engine.models.dense_llama import dense_logits

BLOCK, CONTEXT = 16, 256
CPU = torch.device("cpu")

SHAPES = {
    "MHA": tiny_config(head_dim=32, heads=3, kv_heads=3),
    "GQA": tiny_config(head_dim=64, heads=6, kv_heads=2),
    "MQA": tiny_config(head_dim=32, heads=4, kv_heads=1),
    "untied": tiny_config(head_dim=32, tie_embeddings=False),
    "llama3": tiny_config(head_dim=32, rope_scaling=LLAMA3_SCALING),
    "one layer": tiny_config(head_dim=128, layers=1),
}

SLICES = ((150,), (1,) * 20 + (130,), (64, 1, 63, 22), (15, 2, 100, 1, 32))


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    made = load_kernels(SHAPES["MHA"], threads=2)
    if made is None:
        pytest.skip("no C compiler here")
    yield made
    made.close()


def tokens_of(config: ModelConfig) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(config.vocab, (150,), generator=generator).tolist()


def through(
    config: ModelConfig, weights: Weights, kernels: Kernels | None, slices: tuple[int, ...],
    kv_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # fmt: skip
    """Logits of every position of a prompt computed in slices, in blocks out of order."""
    tokens = tokens_of(config)
    layout = kv_format(config, kv_dtype, BLOCK, "slots" if kernels is None else "panels")
    kv = KvStorage(layout, 12, kv_dtype, CPU)
    blocks = [11, 0, 10, 1, 9, 2, 8, 3, 7, 4]
    start, found = 0, []
    model, attention = path_of(config, weights, kernels, kv)
    for count in slices:
        row = Row(0, start, count, blocks, 0, tokens[start : start + count])
        plan = StepPlan(step=0, rows=(row,))
        batch = make_batch(plan, BLOCK, lambda _: 0)
        attention.begin(plan, batch)
        found.append(model.logits(model.forward(batch.token_ids, attention)))
        start += count
    return torch.cat(found)


def path_of(
    config: ModelConfig, weights: Weights, kernels: Kernels | None, kv: KvStorage
) -> tuple[StepModel, TorchAttention | CpuAttention]:
    if kernels is None:
        return build_model(config, weights, TorchOps()), TorchAttention(config, kv, CONTEXT)
    attention = CpuAttention(config.heads // config.kv_heads)
    return CpuLlama(config, weights, kernels, kv, CONTEXT), attention


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst logit, in units of the logits' deviation."""
    return float((got - expected).abs().max() / expected.std())


@pytest.mark.parametrize("path", ["torch", "c"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_the_dense_ones(shape: str, path: str, request: pytest.FixtureRequest) -> None:
    """In fp32 both differ from fp64 by the rounding of sums alone."""
    config, weights = SHAPES[shape], tiny_weights(SHAPES[shape])
    expected = dense_logits(config, weights, tokens_of(config))
    kernels = request.getfixturevalue("kernels") if path == "c" else None

    for slices in SLICES:
        got = through(config, dict(weights), kernels, slices)

        assert error(got, expected) < 2e-5, slices


def test_rows_that_nobody_wants_change_nothing_for_those_that_are_wanted() -> None:
    """After the last attention a prompt's other rows are left out; their KV is not."""
    config, weights = SHAPES["GQA"], tiny_weights(SHAPES["GQA"])
    kv = KvStorage(kv_format(config, torch.float32, BLOCK), 12, torch.float32, CPU)
    model, attention = build_model(config, weights, TorchOps()), TorchAttention(config, kv, CONTEXT)
    tokens = tokens_of(config)[:40]
    plan = StepPlan(step=0, rows=(Row(0, 0, 40, [3, 1, 2, 0], 0, tokens),))
    batch = make_batch(plan, BLOCK, lambda _: 0)
    attention.begin(plan, batch)
    whole = model.forward(batch.token_ids, attention)
    written = kv.data.clone()
    kv.data.zero_()

    some = model.forward(batch.token_ids, attention, torch.tensor([39, 7]))

    torch.testing.assert_close(some, whole[[39, 7]], rtol=0, atol=1e-5)
    torch.testing.assert_close(kv.data, written, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [(28_672, 16_896), (6_144, 0), (16_896, 0), (33_792, 0), (17_000, 0), (33_000, 0)],
)
def test_products_are_cut_where_the_last_wave_is_half_empty(columns: int, expected: int) -> None:
    """On 132 multiprocessors: after whole waves, and only where the rest is neither little nor
    nearly a wave."""
    assert whole_waves(columns, 132) == expected


@pytest.mark.parametrize("rows", [CUT_ROWS, 3])
def test_a_product_in_two_is_the_product(rows: int) -> None:
    """Every column is computed once, whatever the number of tokens."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(rows, 24, generator=generator)
    weight = torch.randn(40, 24, generator=generator)

    got = in_two(x, weight, 16)

    torch.testing.assert_close(got, x @ weight.T)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_c_slices_change_no_bit(shape: str, kernels: Kernels) -> None:
    """The promise that makes cached equal uncached; see ADR 0010."""
    config = SHAPES[shape]
    for dtype in (torch.float32, torch.bfloat16):
        weights = {n: t.to(dtype) for n, t in tiny_weights(config).items()}
        whole = through(config, dict(weights), kernels, SLICES[0], dtype)

        for slices in SLICES[1:]:
            assert torch.equal(through(config, dict(weights), kernels, slices, dtype), whole)


def test_bf16_weights_and_kv_stay_near_the_dense_reading_of_them(kernels: Kernels) -> None:
    """Where the CPU has no bf16 products only the KV is rounded, at 2^-9; where it has them, the
    activations are too. Wrong halves of a pair would be off by the deviation itself."""
    config = SHAPES["GQA"]
    weights = {n: t.bfloat16() for n, t in tiny_weights(config).items()}
    expected = dense_logits(config, weights, tokens_of(config))

    got = through(config, dict(weights), kernels, SLICES[3], torch.bfloat16)

    assert error(got, expected) < (0.2 if kernels.prefers_dot else 0.05)


def test_shapes_that_the_kernels_do_not_fit_are_left_to_torch() -> None:
    """A bias or a head of 20 channels must not be computed wrongly in C."""
    assert load_kernels(tiny_config(head_dim=20), threads=1) is None
