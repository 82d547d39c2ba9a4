"""Models with recurrent layers through the whole engine, against themselves alone, uncached.

In the tiny models three of four layers keep a state instead of KV. LFM2's runs six cached tokens
again before the first that is new; with the delta rule and Mamba-2 a hit begins from a state that
was kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from engine.api import CacheGrant, Request, SampledToken, Sampling
from engine.config import EngineConfig
from engine.drafts.drafter import Drafter
from engine.errors import ModelError
from engine.model_store import ModelCard, prepare
from engine.models.cpu_decoder import Kernels, load_kernels
from tests.checkers import FREE_DRAFTS
from tests.draft_oracle import OracleSource
from tests.families import RECURRENT, make, save_folder, sizes_in_c
from tests.unit.engine.runner.cpu_engine import CpuEngine

TOLERANCE = 1e-3
"""In torch: these rules and their norms enlarge what another order of sums in fp32 leaves (2e-4 was
seen). In C every bit is the same."""
FP32 = EngineConfig(dtype="fp32", kv_dtype="fp32", sequences_max=8)
BF16 = EngineConfig(dtype="bf16", sequences_max=8)
SLICES = EngineConfig(
    dtype="fp32", kv_dtype="fp32", sequences_max=8, step_tokens_max=48, prefill_chunk_tokens_max=21
)
Output = dict[tuple[str, int], list[SampledToken]]


@pytest.fixture(scope="module", params=RECURRENT)
def card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Return a tiny model with recurrent layers, of sizes that the C kernels take."""
    folder, name = tmp_path_factory.mktemp("model"), request.param
    return prepare("tiny", save_folder(make(name, **sizes_in_c(name)), folder / "files"), folder)


@pytest.fixture(scope="module", params=["torch", "c"])
def kernels(request: pytest.FixtureRequest, card: ModelCard) -> Iterator[Kernels | None]:
    """Return the C kernels, or None: then the model runs in torch."""
    if request.param == "torch":
        yield None
        return
    if (found := load_kernels(card.config, threads=2)) is None:
        pytest.skip("no C compiler")
    yield found
    found.close()


def requests(seed: int) -> list[Request]:
    """Return the requests of a few conversations that part from each other anywhere."""
    chance = random.Random(seed)
    system = [chance.randrange(3, 60) for _ in range(37)]
    found: list[Request] = []
    for number in range(9):
        own = [chance.randrange(3, 60) for _ in range(chance.randint(1, 60))]
        start = system[: chance.choice([0, 3, 20, 37, 37])]
        if found and chance.random() < 0.5:
            before = list(chance.choice(found).tokens)
            start = before[: len(before) - chance.choice([0, 0, 5, 30])]
        found.append(
            Request(
                request_id=f"r{number}",
                tokens=tuple([*start, *own][:200]),
                max_tokens=chance.randint(1, 24),
                grant=CacheGrant(b"n"),
                sampling=Sampling(temperature=1.0, seed=number, logprobs=0),
                samples=chance.choice([1, 1, 2]),
                priority=chance.choice([0, 0, 1]),
            )
        )
    return found


_alone: dict[tuple[str, int, bool], Output] = {}


def alone(card: ModelCard, seed: int, kernels: Kernels | None) -> Output:
    """Return the output of each request of a seed without a cache and without others, computed
    once."""
    key = card.folder, seed, kernels is None
    if (found := _alone.get(key)) is not None:
        return found
    engine = CpuEngine(card, FP32, 64, kernels)
    for request in requests(seed):
        engine.core.submit(replace(request, grant=CacheGrant(b"n", read=False, write=False)))
        engine.settle()
    return _alone.setdefault(key, engine.output)


def side_by_side(
    card: ModelCard, seed: int, blocks: int, kernels: Kernels | None, run_up: int | None = None,
    drafter: Drafter | None = None,
) -> tuple[CpuEngine, Output]:  # fmt: skip
    """Return an engine after all requests of a seed, twice, and its output."""
    asked, chance = requests(seed), random.Random(seed)
    busy = CpuEngine(card, SLICES, blocks, kernels, run_up=run_up)
    busy.core.drafts.drafter = drafter
    for each in [*asked, *(replace(r, request_id=f"{r.request_id} again") for r in asked)]:
        busy.core.submit(each)
        for _ in range(chance.randint(0, 12)):
            busy.step()
    busy.settle()
    assert busy.endings == ["done"] * 18
    return busy, busy.output


def differs(output: Output, expected: Output, tolerance: float = TOLERANCE) -> bool:
    """Return whether a token or its logprob differs."""
    for (name, index), tokens in output.items():
        other = expected[name.removesuffix(" again"), index]
        if [t.token_id for t in tokens] != [t.token_id for t in other]:
            return True
        if any(
            t.logprob != pytest.approx(o.logprob, rel=0, abs=tolerance)
            for t, o in zip(tokens, other, strict=True)
        ):
            return True
    return False


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.nightly) for s in (1, 2))])
@pytest.mark.parametrize(
    ("kernels", "is_crowded"),
    [
        ("c", False),
        ("c", True),
        ("torch", True),
        pytest.param("torch", False, marks=pytest.mark.nightly),
    ],
    indirect=["kernels"],
)
def test_hits_change_no_token_of_a_model_with_states(
    card: ModelCard, kernels: Kernels | None, seed: int, is_crowded: bool
) -> None:
    """Slices, hits at any token, forks and preemptions: each begins from the right states.

    A crowded pool holds one long sequence and little more, a few states where these are kept.
    """
    crowded = 16 if card.config.run_up else 44
    busy, output = side_by_side(card, seed, crowded if is_crowded else 400, kernels)

    stats = busy.core.stats()
    assert stats.cached_tokens_total
    assert stats.evicted_blocks_total or not is_crowded
    tolerance = TOLERANCE if kernels is None else 0.0
    assert not differs(output, alone(card, seed, kernels), tolerance)


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "kernels", ["c", pytest.param("torch", marks=pytest.mark.nightly)], indirect=True
)
def test_drafts_change_no_token_of_a_model_with_states(
    card: ModelCard, kernels: Kernels | None, right: float
) -> None:
    """A state is left before a row's drafts, and takes in those that were accepted; among slices,
    forks and preemptions, and hits on what was kept at the end of an answer."""
    plain = alone(card, 0, kernels)

    def answer(request_id: str, index: int) -> list[int]:
        return [token.token_id for token in plain[request_id.removesuffix(" again"), index]]

    source = OracleSource(answer, right, card.config.vocab, seed=1)
    busy, output = side_by_side(card, 0, 44, kernels, drafter=Drafter(FREE_DRAFTS, [source]))

    assert not differs(output, plain, TOLERANCE if kernels is None else 0.0)
    assert busy.core.stats().cached_tokens_total
    assert sum(busy.accepted.values()) > 20 or not right


def test_a_shorter_run_up_is_noticed(card: ModelCard, kernels: Kernels | None) -> None:
    """The control: half of the run-up leaves states of zeros in the way, and tokens differ."""
    if not card.config.run_up:
        pytest.skip("its states are kept")
    _, output = side_by_side(card, 0, 200, kernels, run_up=card.config.run_up // 2)

    assert differs(output, alone(card, 0, kernels))


@pytest.mark.parametrize("right", [0.7, pytest.param(None, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "kernels", ["c", pytest.param("torch", marks=pytest.mark.nightly)], indirect=True
)
def test_a_block_that_held_a_state_is_read_as_kv_without_it(
    card: ModelCard, kernels: Kernels | None, right: float | None
) -> None:
    """Half of a state's word may be no number in bf16, the type of KV by default: neither slots
    that a sequence has not written nor those behind what was copied may have it."""
    plain = CpuEngine(card, BF16, 400, kernels)
    for request in requests(0):
        plain.core.submit(replace(request, grant=CacheGrant(b"n", read=False, write=False)))
        plain.settle()

    def answer(request_id: str, index: int) -> list[int]:
        tokens = plain.output[request_id.rpartition(" ")[2], index]
        return [token.token_id for token in tokens]

    busy = CpuEngine(card, BF16, 120, kernels)
    if right is not None:
        source = OracleSource(answer, right, card.config.vocab, seed=1)
        busy.core.drafts.drafter = Drafter(FREE_DRAFTS, [source])
    for turn in range(4):
        for request in requests(0):
            busy.core.submit(replace(request, request_id=f"{turn} {request.request_id}"))
            busy.settle()

    assert set(busy.endings) == {"done"}
    assert busy.core.stats().cached_tokens_total
    for (name, index), tokens in busy.output.items() if kernels is not None else ():
        assert tokens == plain.output[name.rpartition(" ")[2], index]


def test_states_of_ended_sequences_are_reused(card: ModelCard, kernels: Kernels | None) -> None:
    """Memory for states grows with the sequences at once, not with all there ever were."""
    engine = CpuEngine(card, FP32, 64, kernels)
    for number in range(16):
        tokens = tuple(random.Random(number).randrange(3, 60) for _ in range(20))
        engine.core.submit(Request(f"r{number}", tokens, 2, CacheGrant(b"n"), Sampling()))
        engine.settle()

    assert engine.runner.states is not None
    assert engine.runner.states.places <= 8


def test_windows_by_request_are_refused_for_a_model_with_states(card: ModelCard) -> None:
    """What a run-up reads may be what a window has let go."""
    from engine.attention.interface import lacks_attention_windows

    form = CpuEngine(card, FP32, 16).runner.kv.format

    assert "recurrent layers" in lacks_attention_windows(card.config, form)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_L_cache": 1}, "conv_L_cache: 1; expected 2 to 64"),
        ({"layer_types": ["conv"] * 4}, "no layer has attention"),
        ({"layer_types": ["conv", "full_attention", "mamba", "conv"]}, "unsupported layer type"),
    ],
)
def test_unknown_recurrence_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    """A folder that mixes layers in a way that nothing computes names the field."""
    from engine.model_store.architecture import check_architecture
    from engine.model_store.families import architecture_of

    config = {
        "model_type": "lfm2", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "layer_types": ["conv", "full_attention", "conv", "conv"],
        **changes,
    }  # fmt: skip

    with pytest.raises(ModelError, match=message):
        check_architecture(architecture_of(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 4}, "no layer has attention"),
        ({"layer_types": ["mamba", "attention", "conv", "mamba"]}, "layer type: 'conv'"),
        ({"mamba_n_groups": 3}, "mamba_n_heads: 8; expected a multiple of mamba_n_groups, 3"),
        ({"mamba_d_head": 8}, "mamba_n_heads: 8 of 8 channels; expected 128 channels together"),
        ({"mamba_d_conv": 1}, "mamba_d_conv: 1; expected 2 to 64"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias: True; expected maps without biases"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit: \[0.0, 0.1\]; expected no limit"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: 'gelu_pytorch_tanh'; expected silu"),
        ({"position_embedding_type": "alibi"}, "'alibi'; expected rope or nope"),
    ],
)
def test_other_layers_of_mamba_2_are_refused_by_name(
    changes: dict[str, object], message: str
) -> None:
    """What would be computed otherwise than the model was trained names the field."""
    from engine.model_store.architecture import check_architecture
    from engine.model_store.families import architecture_of
    from tests.families import BASE, TINY

    kind, own = TINY["granite hybrid"]

    with pytest.raises(ModelError, match=message):
        check_architecture(architecture_of({**BASE, "model_type": kind, **own, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": None, "hybrid_override_pattern": "M-E*M-"}, "layer type: 'moe'"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu'; expected relu2"),
        ({"use_bias": True}, "use_bias: True; expected maps without biases"),
        ({"layers_block_type": ["mamba", "mlp"] * 3}, "no layer has attention"),
        ({"num_hidden_layers": 7}, "6 layer types; expected 7"),
        ({"n_groups": 3}, "expected a multiple of mamba_n_groups, 3"),
    ],
)
def test_other_layers_of_nemotron_h_are_refused_by_name(
    changes: dict[str, object], message: str
) -> None:
    """Published patterns of letters and lists of names say the same."""
    from engine.model_store.architecture import check_architecture
    from engine.model_store.families import architecture_of
    from tests.families import BASE, TINY

    kind, own = TINY["nemotron h"]
    config = {**BASE, "model_type": kind, **own}
    letters = {**config, "layers_block_type": None, "hybrid_override_pattern": "M-M*-M"}

    assert check_architecture(architecture_of(letters)) == architecture_of(config)
    with pytest.raises(ModelError, match=message):
        check_architecture(architecture_of({**config, **changes}))
