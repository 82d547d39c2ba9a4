"""The decoders, in torch and in C, against a dense computation and against each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from engine.attention.batch import make_batch
from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import AttentionBackend, attention_spec
from engine.attention.torch_backend import TorchAttention
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture, Layer, Moe, Rope
from engine.models.cpu_decoder import CpuDecoder, Kernels, load_kernels
from engine.models.decoder import DecoderModel
from engine.models.gpu_layers import SPLIT_ROWS, columns_in_full_waves, split_linear
from engine.models.interface import Model
from engine.models.layers import TorchOps
from engine.models.packing import cpu_form
from engine.plan import Row, StepPlan
from engine.weights import Tensors, Weights
from kernels.cpu import build as cpu
from kernels.reference_weights import Packed, Weight, as_dense, to_mxfp4
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
    kernels = load_kernels(SHAPES["MHA"], threads=2)
    if kernels is None:
        pytest.skip("no C compiler")
    yield kernels
    kernels.close()


@pytest.fixture(params=["torch", "c"])
def path(request: pytest.FixtureRequest) -> Kernels | None:
    """Return the C kernels, or None: then the model runs in torch."""
    return request.getfixturevalue("kernels") if request.param == "c" else None


def tokens_of(config: Architecture) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(config.vocab, (150,), generator=generator).tolist()


def logits_of(
    config: Architecture, weights: Weights, kernels: Kernels | None, slices: tuple[int, ...],
    kv_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # fmt: skip
    """Return the logits of every position of a prompt computed in slices, in blocks out of
    order."""
    tokens = tokens_of(config)
    layout = kv_format(config, kv_dtype, BLOCK, "slots" if kernels is None else "panels")
    kv = KvStorage(layout, 12, CPU)
    blocks = [11, 0, 10, 1, 9, 2, 8, 3, 7, 4]
    start, found = 0, []
    model, attention = build(config, weights, kernels, kv)
    for count in slices:
        row = Row(0, start, count, blocks, 0, tokens[start : start + count])
        plan = StepPlan(step=0, rows=(row,))
        batch = make_batch(plan, BLOCK, lambda _: 0)
        attention.begin(plan, batch)
        found.append(model.logits(model.forward(batch.token_ids, attention)))
        start += count
    return torch.cat(found)


def build(
    config: Architecture, weights: Weights, kernels: Kernels | None, kv: KvStorage
) -> tuple[Model[Any], AttentionBackend]:
    """Return a model and its attention backend, in C with `kernels`, else in torch."""
    if kernels is None:
        return DecoderModel(config, weights, TorchOps()), TorchAttention(config, kv, CONTEXT)
    attention = CpuAttention(attention_spec(config))
    return CpuDecoder(config, weights, kernels, kv, CONTEXT), attention


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of a logit, in standard deviations of the logits."""
    return float((got - expected).abs().max() / expected.std())


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_dense_computation(shape: str, path: Kernels | None) -> None:
    """In fp32 both models differ from fp64 by rounding of sums only."""
    config, weights = SHAPES[shape], tiny_weights(SHAPES[shape])
    expected = dense_logits(config, weights, tokens_of(config))

    for slices in SLICES:
        got = logits_of(config, dict(weights), path, slices)

        assert error(got, expected) < 4e-5, slices


def test_output_rows_equal_rows_of_whole_result(path: Kernels | None) -> None:
    """Only rows after the last attention are skipped; the KV of every row is written."""
    config, weights = SHAPES["GQA"], tiny_weights(SHAPES["GQA"])
    layout = kv_format(config, torch.float32, BLOCK, "slots" if path is None else "panels")
    kv = KvStorage(layout, 12, CPU)
    model, attention = build(config, weights, path, kv)
    tokens = tokens_of(config)[:40]
    plan = StepPlan(step=0, rows=(Row(0, 0, 40, [3, 1, 2, 0], 0, tokens),))
    batch = make_batch(plan, BLOCK, lambda _: 0)
    attention.begin(plan, batch)
    whole = model.forward(batch.token_ids, attention).clone()
    written = kv.data.clone()
    kv.data.zero_()

    rows = model.forward(batch.token_ids, attention, torch.tensor([39, 7]))

    torch.testing.assert_close(rows, whole[[39, 7]], rtol=0, atol=1e-5)
    torch.testing.assert_close(kv.data, written, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [(28_672, 16_896), (6_144, 0), (16_896, 0), (33_792, 0), (17_000, 0), (33_000, 0)],
)
def test_product_is_split_where_last_wave_is_half_empty(columns: int, expected: int) -> None:
    """On 132 multiprocessors: after whole waves, where the rest is between a quarter and three
    quarters of a wave."""
    assert columns_in_full_waves(columns, 132) == expected


@pytest.mark.parametrize("rows", [SPLIT_ROWS, 3])
def test_split_product_equals_product(rows: int) -> None:
    """Every column is computed once, for any number of tokens."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(rows, 24, generator=generator)
    weight = torch.randn(40, 24, generator=generator)

    got = split_linear(x, weight, 16)

    torch.testing.assert_close(got, x @ weight.T)


@pytest.mark.parametrize("shape", SHAPES)
def test_slices_change_no_bit_in_c(shape: str, kernels: Kernels) -> None:
    """Cached results equal uncached results because of this; see ADR 0010."""
    config = SHAPES[shape]
    for dtype in (torch.float32, torch.bfloat16):
        weights = {n: t.to(dtype) for n, t in tiny_weights(config).items()}
        whole = logits_of(config, dict(weights), kernels, SLICES[0], dtype)

        for slices in SLICES[1:]:
            assert torch.equal(logits_of(config, dict(weights), kernels, slices, dtype), whole)


EXTENDED: dict[str, dict[str, Any]] = {
    "biases": {"qkv_bias": True},
    "norms of heads": {"qk_norm": "head"},
    "partial rotation": {"ropes": {"full": Rope(10_000.0, 16)}},
    "layers without rotation": {"layers": (Layer(), Layer(rope=""))},
    "another scale": {"score_scale": 0.3},
    "windows": {"layers": (Layer(window=70), Layer(window=20))},
    "a window of one key": {"layers": (Layer(window=1), Layer())},
    "norms on both sides": {"place": "sandwich"},
    "gelu": {"activation": "gelu_tanh"},
    "multipliers": {"embed_scale": 8.0, "logit_scale": 0.5, "logit_cap": 3.0},
    "Gemma 3": {
        "layers": (Layer(window=40, rope="local"), Layer()), "place": "sandwich",
        "qk_norm": "head", "activation": "gelu_tanh", "embed_scale": 19.6, "score_scale": 0.1,
        "ropes": {"full": Rope(1e6, 64), "local": Rope(1e4, 64)},
    },
    "biases of outputs": {"output_bias": True},
    "biases of the MLP": {"mlp_bias": True, "intermediate": 48},
    "norms of whole projections": {"qk_norm": "whole"},
    "norms after blocks": {"place": "post"},
    "a norm beside both blocks": {"place": "parallel"},
    "norms that take the mean off": {"norm": "mean"},
    "a scaled residual": {"residual_scale": 0.3},
    "caps of scores": {"score_cap": 2.0},
    "sinks": {"sinks": True},
    "queries that grow": {"query_growth": (0.4, 20)},
    "OLMo 3": {
        "place": "post", "qk_norm": "whole",
        "layers": (Layer(window=40, rope="local"), Layer()),
        "ropes": {"full": Rope(1e6, 64), "local": Rope(1e4, 64)},
    },
    "Granite": {
        "embed_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.125, "score_scale": 0.0156,
        "output_bias": True, "mlp_bias": True,
    },
    "Cohere 2": {
        "place": "parallel", "norm": "mean", "logit_scale": 0.25,
        "layers": (Layer(window=40), Layer(rope="")),
    },
    "Gemma 2": {
        "layers": (Layer(window=40), Layer()), "place": "sandwich", "activation": "gelu_tanh",
        "embed_scale": 19.6, "score_cap": 5.0, "logit_cap": 3.0,
    },
    "attention of gpt-oss": {
        "layers": (Layer(window=40), Layer()), "sinks": True, "qkv_bias": True,
        "output_bias": True,
    },
    "experts": {
        "layers": (Layer(ffn="moe"), Layer()), "moe": Moe(experts=6, top_k=2, intermediate=48)},
    "Qwen 2 MoE": {
        "layers": (Layer(ffn="moe"),) * 2, "qkv_bias": True,
        "moe": Moe(experts=8, top_k=4, intermediate=32, renormalise=False, shared="gated",
                   shared_intermediate=48)},
    "Qwen 3 MoE": {
        "layers": (Layer(ffn="moe"),) * 2, "qk_norm": "head",
        "moe": Moe(experts=33, top_k=8, intermediate=32)},
    "GLM-4 MoE": {
        "layers": (Layer(), Layer(ffn="moe")), "qk_norm": "head", "qkv_bias": True,
        "moe": Moe(experts=12, top_k=3, intermediate=32, score="sigmoid", choose_by_bias=True,
                   scale=2.5, groups=4, groups_kept=2, shared="add", shared_intermediate=32)},
    "gpt-oss": {
        "layers": (Layer(window=40, ffn="moe"), Layer(ffn="moe")), "sinks": True,
        "qkv_bias": True, "output_bias": True,
        "moe": Moe(experts=5, top_k=2, intermediate=48, score="chosen_softmax",
                   expert="clamped")},
    "experts after norms on both sides": {
        "layers": (Layer(ffn="moe"),) * 2, "place": "sandwich", "activation": "gelu_tanh",
        "residual_scale": 0.5,
        "moe": Moe(experts=8, top_k=2, intermediate=32, groups=2, groups_kept=1)},
    "all": {
        "qkv_bias": True, "qk_norm": "whole", "score_scale": 0.2, "sinks": True, "score_cap": 4.0,
        "layers": (Layer(rope="", window=30), Layer()), "place": "sandwich", "norm": "mean",
        "residual_scale": 0.5, "output_bias": True, "mlp_bias": True, "query_growth": (0.1, 50),
    },
}  # fmt: skip


def weights_with_biases(config: Architecture) -> Tensors:
    """Return a model's weights; biases and sinks, which are zeros in these, are random too."""
    weights = tiny_weights(config)
    for name, tensor in weights.items():
        if name.endswith(("bias", "sinks")):
            tensor.normal_(generator=torch.Generator().manual_seed(len(name)))
    return weights


@pytest.mark.parametrize("change", EXTENDED.values(), ids=EXTENDED.keys())
def test_c_computes_what_torch_computes_beyond_llama(
    change: dict[str, Any], kernels: Kernels
) -> None:
    """Torch is compared with transformers; no slice changes a bit in C."""
    config = msgspec.structs.replace(SHAPES["GQA"], **change)
    weights = weights_with_biases(config)
    expected = logits_of(config, dict(weights), None, SLICES[0])

    whole = logits_of(config, dict(weights), kernels, SLICES[0])

    assert config.fits_c_kernels
    assert error(whole, expected) < 4e-5
    for slices in SLICES[1:]:
        assert torch.equal(logits_of(config, dict(weights), kernels, slices), whole)


def test_every_feature_of_an_architecture_is_compared() -> None:
    """C computes each but latents. A new one needs a case above, or a refusal in `fits_c_kernels`;
    recurrent layers and gates behind attention are compared with transformers."""
    sizes = {"family", "hidden", "heads", "kv_heads", "head_dim", "vocab", "context", "norm_eps"}
    sizes.add("conv_channels")  # of a lane, which is on a GPU
    undone_by_the_loader = {"interleaved", "norms_less_one", "values_in_turns"}
    features = set(Architecture.__struct_fields__) - sizes - undone_by_the_loader

    rules = {"conv_width", "conv_bias", "delta", "mamba"}
    elsewhere = {"latent", "tie_embeddings", "output_gate", *rules}
    assert features == elsewhere.union(*EXTENDED.values())


OVERLOOKED: dict[str, Any] = {
    "score_cap": 0.0, "sinks": False, "query_growth": None, "residual_scale": 1.0, "norm": "rms",
    "output_bias": False, "mlp_bias": False,
}  # fmt: skip
"""Features of the case "all", and their values in a model that lacks them."""


@pytest.mark.parametrize("field", OVERLOOKED)
def test_an_overlooked_feature_is_seen(field: str, kernels: Kernels) -> None:
    """The comparison above can fail: without any one of these the logits are others."""
    config = msgspec.structs.replace(SHAPES["GQA"], **EXTENDED["all"])
    weights = weights_with_biases(config)
    expected = logits_of(config, dict(weights), None, SLICES[0])
    lacking = msgspec.structs.replace(config, **{field: OVERLOOKED[field]})
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if not (field == "output_bias" and name.endswith("o_proj.bias"))
        and not (field == "mlp_bias" and ".mlp." in name and name.endswith("bias"))
    }

    assert error(logits_of(lacking, kept, kernels, SLICES[0]), expected) > 1e-3


WRONG_EXPERTS: dict[str, dict[str, Any]] = {
    "groups": {"groups": 1, "groups_kept": 1}, "scale": {"scale": 1.0},
    "renormalised": {"renormalise": False}, "softmax": {"score": "softmax"},
    "one expert fewer": {"top_k": 2},
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG_EXPERTS.values(), ids=WRONG_EXPERTS.keys())
def test_wrong_experts_are_seen(change: dict[str, Any], kernels: Kernels) -> None:
    """Each of these rules of the choice shows in the logits."""
    config = msgspec.structs.replace(SHAPES["GQA"], **EXTENDED["GLM-4 MoE"])
    assert config.moe is not None
    weights = tiny_weights(config)
    expected = logits_of(config, dict(weights), None, SLICES[0])
    wrong = msgspec.structs.replace(config, moe=msgspec.structs.replace(config.moe, **change))

    assert error(logits_of(wrong, dict(weights), kernels, SLICES[0]), expected) > 1e-3


@pytest.mark.parametrize("name", ["gpt-oss", "GLM-4 MoE", "Cohere 2", "all"])
def test_bf16_logits_beyond_llama_are_the_same_in_slices(name: str, kernels: Kernels) -> None:
    """A token takes another expert where bf16 turns the order of two scores, so that single rows
    may be far from fp32; the middle row is near."""
    config = msgspec.structs.replace(SHAPES["GQA"], **EXTENDED[name])
    weights = {n: t.bfloat16() for n, t in tiny_weights(config).items()}
    wide = {n: t.float() for n, t in weights.items()}
    expected = logits_of(config, wide, kernels, SLICES[0])

    whole = logits_of(config, dict(weights), kernels, SLICES[0], torch.bfloat16)

    distance = (whole - expected).abs().amax(-1).median() / expected.std()
    assert float(distance) < 0.2
    for slices in SLICES[1:]:
        in_slices = logits_of(config, dict(weights), kernels, slices, torch.bfloat16)
        assert torch.equal(in_slices, whole)


def test_experts_published_in_mxfp4_stay_so(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a quarter of the memory, with the same bits in the logits."""
    moe = Moe(experts=5, top_k=2, intermediate=64, score="chosen_softmax", expert="clamped")
    config = msgspec.structs.replace(SHAPES["GQA"], **{**EXTENDED["gpt-oss"], "moe": moe})
    plain = {n: t.bfloat16() for n, t in tiny_weights(config).items()}
    packed: dict[str, Weight] = {**plain}
    for name, tensor in plain.items():
        if ".experts." in name and name.endswith("weight"):
            packed[name] = to_mxfp4(tensor)
    plain = {n: as_dense(weight, torch.bfloat16) for n, weight in packed.items()}
    expected = logits_of(config, plain, kernels, SLICES[2], torch.bfloat16)
    wide: list[tuple[int, ...]] = []
    pack = Kernels.pack

    def recorded(self: Kernels, weight: torch.Tensor, *given: Any) -> torch.Tensor:
        wide.append(tuple(weight.shape))
        return pack(self, weight, *given)

    monkeypatch.setattr(Kernels, "pack", recorded)
    small = logits_of(config, packed, kernels, SLICES[2], torch.bfloat16)

    assert wide
    assert not {(2 * moe.intermediate, config.hidden), (config.hidden, moe.intermediate)} & {*wide}
    assert torch.equal(small, expected)


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_codes_are_multiplied_as_they_are(moe: bool, is_tied: bool, kernels: Kernels) -> None:
    """In a third to a half of the memory: in any slices with the same bits, and near the weights of
    the file, of which only activations are rounded. Values have smaller groups than queries and
    keys, which they are joined with; the head and the embeddings have 8 bits."""
    if not kernels.has_codes:
        pytest.skip("codes are multiplied where the CPU multiplies pairs of bf16, or has AVX2")
    change = EXTENDED["Qwen 3 MoE"] if moe else {}
    config = msgspec.structs.replace(SHAPES["GQA"], tie_embeddings=is_tied, **change)
    form = cpu_form(torch.bfloat16, kernels)
    whole = {n: as_codes(n, t) for n, t in tiny_weights(config).items()}
    packed = {n: form(n, weight) for n, weight in whole.items()}
    exact = {n: as_dense(weight, torch.float32) for n, weight in whole.items()}
    expected = logits_of(config, exact, kernels, SLICES[0])

    found = logits_of(config, {**packed}, kernels, SLICES[0], torch.bfloat16)

    coded = [name for name, weight in packed.items() if isinstance(weight, Packed)]
    assert len(coded) == 7 * len(config.layers) + 2 - is_tied
    assert float((found - expected).abs().median() / expected.std()) < 0.05
    for slices in SLICES[1:]:
        again = logits_of(config, {**packed}, kernels, slices, torch.bfloat16)
        assert torch.equal(again, found)


def as_codes(name: str, weight: torch.Tensor) -> Weight:
    """Return a linear map, the head or the embeddings rounded to codes, others as they are."""
    is_byte = name in ("lm_head.weight", "model.embed_tokens.weight") or "v_proj" in name
    if not is_byte and not name.endswith("_proj.weight"):
        return weight.bfloat16()
    group, most = (16 if "v_proj" in name else 32), (255 if is_byte else 15)
    groups = weight.reshape(*weight.shape[:-1], -1, group)
    minima = groups.amin(-1).half().float()
    scales = ((groups.amax(-1) - minima) / most).half().float()
    codes = ((groups - minima[..., None]) / scales[..., None]).round().clamp(0, most).flatten(-2)
    if is_byte:
        minima = (minima + 128 * scales).half().float()
        return Packed("int8", (codes - 128).to(torch.int8), scales, group, minima)
    pairs = codes.to(torch.uint8)
    return Packed("int4", pairs[..., 0::2] | pairs[..., 1::2] << 4, scales, group, minima)


def test_bf16_weights_and_kv_stay_near_dense_computation(kernels: Kernels) -> None:
    """Without bf16 products on the CPU only the KV is rounded, at 2^-9; with them the activations
    are rounded too. Swapped halves of a bf16 pair would be off by a whole deviation."""
    config = SHAPES["GQA"]
    weights = {n: t.bfloat16() for n, t in tiny_weights(config).items()}
    expected = dense_logits(config, weights, tokens_of(config))

    got = logits_of(config, dict(weights), kernels, SLICES[3], torch.bfloat16)

    assert error(got, expected) < (0.2 if kernels.bf16_kind != cpu.PAIRS else 0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_kv_stays_near_dense_computation(shape: str, path: Kernels | None) -> None:
    """A value of KV is off by up to 1 / 254 of its token's largest. A scale of another token or a
    channel of another word would be off by a whole deviation."""
    config, weights = SHAPES[shape], tiny_weights(SHAPES[shape])
    expected = dense_logits(config, weights, tokens_of(config))

    got = logits_of(config, dict(weights), path, SLICES[3], torch.int8)

    assert 1e-3 < error(got, expected) < 0.12


@pytest.mark.parametrize("name", ["GQA", "Gemma 3", "gpt-oss", "Cohere 2", "all"])
def test_int8_kv_in_c_and_torch_are_one_computation(name: str, kernels: Kernels) -> None:
    """Where rounding of sums turns a value of KV to its neighbour, logits differ by that; slices
    change no bit in C."""
    config = msgspec.structs.replace(SHAPES["GQA"], **EXTENDED.get(name, {}))
    weights = tiny_weights(config)
    expected = logits_of(config, dict(weights), None, SLICES[0], torch.int8)

    whole = logits_of(config, dict(weights), kernels, SLICES[0], torch.int8)

    assert error(whole, expected) < 0.02
    for slices in SLICES[1:]:
        in_slices = logits_of(config, dict(weights), kernels, slices, torch.int8)
        assert torch.equal(in_slices, whole)


def test_kernels_are_not_loaded_for_unsupported_shape() -> None:
    """Torch computes heads of 20 channels; C would compute them wrongly."""
    assert load_kernels(tiny_config(head_dim=20), threads=1) is None
