"""Attention windows through the whole engine, in torch and in C, against the model with a mask.

The reference reads a whole sequence at once in plain torch and hides from each token the keys
between its sinks and its window. What the engine sampled is read by it again: each logprob must be
the same, however the engine cut, shared, preempted and resumed the request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from engine.api import (
    AttentionWindow,
    CacheGrant,
    Request,
    SampledToken,
    Sampling,
)
from engine.attention.interface import lacks_attention_windows
from engine.cache import BlockTable, PrefixCache
from engine.config import EngineConfig
from engine.kv.format import kv_format
from engine.model_store import Architecture, ModelCard
from engine.models.cpu_decoder import Kernels
from engine.weights import load_weights
from tests.models import prepared, prepared_with_windows, tiny_config
from tests.unit.engine.runner.cpu_engine import BLOCK, CpuEngine
from tests.unit.engine.runner.masked_model import masked_logprobs

CONTEXT, OWN_WINDOW = 512, 24
TOLERANCE = 2e-4
SLICES = EngineConfig(
    dtype="fp32", kv_dtype="fp32", sequences_max=8, step_tokens_max=96, prefill_chunk_tokens_max=37,
    attention_policies=("window",),
)  # fmt: skip
WINDOWS = (AttentionWindow(64, 16), AttentionWindow(32, 0), AttentionWindow(48, 32))


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    shape = tiny_config(layers=2, context=CONTEXT, head_dim=32)
    return prepared(tmp_path_factory.mktemp("model"), shape)


@pytest.fixture(scope="module")
def sliding(card: ModelCard, tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Return a model of which each fourth layer has no sliding window of its own."""
    folder = tmp_path_factory.mktemp("sliding")
    return prepared_with_windows(folder, OWN_WINDOW, context=CONTEXT)


def run(engine: CpuEngine, asked: Sequence[Request], seed: int, steps_max: int = 9) -> None:
    """Run requests that come by chance, up to `steps_max` steps apart."""
    chance = random.Random(seed)
    for request in asked:
        engine.core.submit(request)
        for _ in range(chance.randint(0, steps_max)):
            engine.step()
    engine.settle()


def requests(seed: int, count: int = 8, outputs_max: int = 40) -> list[Request]:
    """Return requests that share a beginning, of which two in three have a window."""
    chance = random.Random(seed)
    system = [chance.randrange(3, 60) for _ in range(120)]
    found: list[Request] = []
    for number in range(count):
        own = [chance.randrange(3, 60) for _ in range(chance.randint(1, 160))]
        start = system[: chance.choice([0, 70, 120, 120])]
        attention = chance.choice(WINDOWS) if number % 3 else None
        found.append(
            Request(
                request_id=f"r{number}",
                tokens=(*start, *own),
                max_tokens=chance.randint(1, outputs_max),
                grant=CacheGrant(b"n"),
                sampling=Sampling(temperature=1.0, seed=number, logprobs=0),
                samples=chance.choice([1, 1, 2]),
                priority=chance.choice([0, 0, 1]),
                attention=attention,
            )
        )
    return found


def logprobs_of(card: ModelCard, request: Request, output: Sequence[SampledToken]) -> list[float]:
    """Return what the model with a mask says of an output's tokens."""
    weights = load_weights(card, torch.float32, torch.device("cpu"))
    tokens = [*request.tokens, *(token.token_id for token in output)]
    found = masked_logprobs(card.config, weights, tokens, request.attention, BLOCK)
    first = len(request.tokens) - 1
    return [float(found[first + i, token.token_id]) for i, token in enumerate(output)]


def far_from_reference(card: ModelCard, engine: CpuEngine, asked: Sequence[Request]) -> float:
    """Return the largest difference of a logprob from the reference's."""
    named = {request.request_id: request for request in asked}
    worst = 0.0
    for (name, _), output in engine.output.items():
        expected = logprobs_of(card, named[name], output)
        for token, other in zip(output, expected, strict=True):
            assert token.logprob is not None
            worst = max(worst, abs(token.logprob - other))
    return worst


@pytest.mark.parametrize(("seed", "blocks"), [(0, 200), (1, 200), (2, 34)])
def test_each_token_reads_its_sinks_and_its_window(
    card: ModelCard, seed: int, blocks: int, path: Kernels | None
) -> None:
    """Slices, hits, forks and preemptions change no key that a token sees. In a pool of 34 blocks
    requests preempt each other."""
    asked = requests(seed)
    engine = CpuEngine(card, SLICES, blocks, path)
    run(engine, asked, seed)

    assert engine.endings == ["done"] * len(asked)
    assert far_from_reference(card, engine, asked) < TOLERANCE
    if blocks == 200:
        assert any(engine.cached[r.request_id] for r in asked if r.attention is not None)
    else:
        assert engine.core.scheduler.preemptions > 0


def test_the_reference_tells_one_key_more_or_less(card: ModelCard) -> None:
    """A block more in the window is far outside the tolerance, so the test above can fail."""
    asked = [replace(request, samples=1) for request in requests(3, 3)]
    engine = CpuEngine(card, SLICES, 200)
    run(engine, asked, 3)
    wider = [
        replace(request, attention=replace(request.attention, tokens=request.attention.tokens + 16))
        for request in asked
        if request.attention is not None and len(request.tokens) > 150
    ]
    kept = {request.request_id for request in wider}
    engine.output = {key: out for key, out in engine.output.items() if key[0] in kept}

    assert wider
    assert far_from_reference(card, engine, wider) > 10 * TOLERANCE


def exact_tokens(
    engine: CpuEngine, asked: Sequence[Request]
) -> dict[tuple[str, int], list[tuple[int, float | None]]]:
    """Return the tokens and logprobs of some requests, to the bit."""
    names = {request.request_id for request in asked}
    return {
        key: [(token.token_id, token.logprob) for token in output]
        for key, output in engine.output.items()
        if key[0] in names
    }


SCHEDULES = 10
"""Schedules of one set of requests: what it is compared with is computed once."""
FAST_SETS, SLOW_SETS = 6, 100
"""Sets in the fast tests, and beside them in those of the night: a thousand schedules."""


def contaminated(
    card: ModelCard, kernels: Kernels, seed: int, schedules: int
) -> list[tuple[int, str, int]]:
    """Run a set of requests under so many schedules: another order, other arrivals, another size of
    the pool. Return the schedule, request and sample of each output that is not, to the bit, that
    of the requests without a window alone, or of one with a window by itself.
    """
    asked = requests(seed, 7, outputs_max=8)
    plain = [request for request in asked if request.attention is None]
    alone = CpuEngine(card, SLICES, 200, kernels)
    run(alone, plain, seed)
    expected = exact_tokens(alone, plain)
    own = CpuEngine(card, SLICES, 200, kernels)
    for request in asked:
        if request.attention is not None:
            run(own, [replace(request, grant=CacheGrant(b"n", read=False, write=False))], seed)
    expected |= exact_tokens(own, asked)
    expected |= {(f"{name} again", i): out for (name, i), out in exact_tokens(alone, plain).items()}
    again = [replace(request, request_id=f"{request.request_id} again") for request in plain]
    found = []
    for schedule in range(schedules):
        chance = random.Random(f"{seed}/{schedule}")
        engine = CpuEngine(card, SLICES, chance.choice([24, 24, 200]), kernels, is_recounted=False)
        run(engine, chance.sample(asked, len(asked)), chance.getrandbits(32), steps_max=3)
        run(engine, again, chance.getrandbits(32), steps_max=0)
        outputs = exact_tokens(engine, [*asked, *again])
        assert outputs.keys() == expected.keys()
        engine.cache.check()
        found += [(schedule, *key) for key in outputs if outputs[key] != expected[key]]
    return found


@pytest.mark.parametrize(
    "seed",
    [
        *range(FAST_SETS),
        *(pytest.param(FAST_SETS + n, marks=pytest.mark.nightly) for n in range(SLOW_SETS)),
    ],
)
def test_other_requests_are_the_same_bit_for_bit(
    card: ModelCard, kernels: Kernels, seed: int
) -> None:
    """What a request without a window gets does not depend on those with one beside it, before it
    and after it, though they share its prefix; nor does theirs on the schedule."""
    assert contaminated(card, kernels, seed, SCHEDULES) == []


def test_what_was_computed_under_a_window_would_be_seen(
    card: ModelCard, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it committed like any other, the test above would fail."""
    commit = PrefixCache.commit

    def leaked(
        self: PrefixCache, table: BlockTable, tokens: Sequence[int], kv_tokens: int, now_s: float
    ) -> None:
        table.attention, kept = None, table.attention
        commit(self, table, tokens, kv_tokens, now_s)
        table.attention = kept

    monkeypatch.setattr(PrefixCache, "commit", leaked)
    monkeypatch.setattr(PrefixCache, "check", lambda self: None)

    assert contaminated(card, kernels, 0, 3) != []


def test_a_long_sequence_holds_its_window_alone(card: ModelCard, path: Kernels | None) -> None:
    """A pool of 24 blocks, 384 tokens, computes 500 tokens under a window of 64."""
    engine = CpuEngine(card, SLICES, 24, path)
    prompt = tuple(random.Random(5).randrange(3, 60) for _ in range(440))
    asked = Request(
        "long", prompt, 60, CacheGrant(b"n"), Sampling(temperature=1.0, seed=1, logprobs=0),
        attention=AttentionWindow(64, 16),
    )  # fmt: skip
    run(engine, [asked, replace(asked, request_id="whole", attention=None)], 0)

    assert sorted(engine.endings) == ["done", "refusedkv_exceeded"]
    assert far_from_reference(card, engine, [asked]) < TOLERANCE


@pytest.mark.parametrize(("seed", "blocks"), [(0, 600), (1, 120)])
def test_layers_with_windows_of_their_own_keep_them(
    sliding: ModelCard, seed: int, blocks: int, path: Kernels | None
) -> None:
    """The request's window is that of the layers that read everything; the blocks of the others
    are let go by their own."""
    asked = requests(seed)
    engine = CpuEngine(sliding, SLICES, blocks, path)
    run(engine, asked, seed)

    assert engine.runner.kv.format.windows == (OWN_WINDOW,) * 3
    assert engine.endings == ["done"] * len(asked)
    assert far_from_reference(sliding, engine, asked) < TOLERANCE


def test_windows_that_share_blocks_with_other_layers_are_told(
    card: ModelCard, sliding: ModelCard
) -> None:
    """Where groups do not pay, windows are masks over group 0, whose blocks are let go."""
    masked = replace(sliding.config, layers=sliding.config.layers[2:])

    def lacks(config: Architecture, *, has_groups: bool) -> str:
        form = kv_format(config, torch.float32, BLOCK, has_groups=has_groups)
        return lacks_attention_windows(config, form)

    assert lacks(card.config, has_groups=True) == ""
    assert lacks(sliding.config, has_groups=True) == ""
    assert "share the blocks" in lacks(masked, has_groups=False)


def test_a_window_narrower_than_the_models_own_is_refused(sliding: ModelCard) -> None:
    """Its blocks would be let go before those of the window groups beside them."""
    engine = CpuEngine(sliding, SLICES, 100)
    grant, narrow = CacheGrant(b"n"), AttentionWindow(16, 0)
    run(engine, [Request("narrow", (3, 4, 5), 1, grant, attention=narrow)], 0)

    assert engine.endings == ["refusedattention_invalid"]
