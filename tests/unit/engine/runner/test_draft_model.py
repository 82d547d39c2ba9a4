"""A real draft model beside a real model: the tokens are those without it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.api import CacheGrant, Finished, Request, Sampling
from engine.config import DRAFT_PLACE_TOKENS, EngineConfig
from engine.drafts.drafter import Drafter
from engine.drafts.model import ModelSource
from engine.errors import ModelError
from engine.model_store import ModelCard
from engine.models.cpu_decoder import Kernels
from engine.runner.cpu_runner import build_runner
from engine.runner.draft_model import build_draft_model
from engine.runner.loaded_model import LoadedModel
from tests.checkers import FREE_DRAFTS
from tests.models import prepared, prepared_with_windows, tiny_config
from tests.unit.engine.runner.cpu_engine import CpuEngine

BLOCKS = 160
CONFIG = EngineConfig(sequences_max=6, threads=1)


@pytest.fixture(scope="module", params=["smaller", "windows"])
def draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Return the card of a model with the same tokens: of one layer, or with KV groups."""
    folder = tmp_path_factory.mktemp("draft")
    if request.param == "windows":
        return prepared_with_windows(folder, 32, context=2048)
    shape = tiny_config(layers=1, head_dim=32, heads=2, kv_heads=2, context=1024)
    return prepared(folder, shape, seed=8)


def requests() -> list[Request]:
    """Return requests of several lengths, one longer than what a draft model reads."""
    chance = random.Random(2)
    samplings = [Sampling(temperature=0), Sampling(seed=4), Sampling(seed=5, top_p=0.8)]
    return [
        Request(
            f"{length}", tuple(chance.randrange(250) for _ in range(length)), max_tokens=48,
            grant=CacheGrant(b"n"), sampling=samplings[place % 3], samples=1 + place % 2,
        )
        for place, length in enumerate((3, 40, 300, 17))
    ]  # fmt: skip


def drafted(engine: CpuEngine, source: ModelSource | None) -> CpuEngine:
    """Run the requests with drafts of a model alone, or without drafts."""
    if source is not None:
        engine.core.drafts.drafter = Drafter(FREE_DRAFTS, [], model=source)
    for request in requests():
        engine.core.submit(request)
    engine.settle()
    engine.core.check()
    return engine


def test_tokens_are_those_without_it(
    card: ModelCard, draft: ModelCard, path: Kernels | None
) -> None:
    """With the C kernels and in torch; the pool of places has room for five of six sequences."""
    source = build_draft_model(card, draft, replace(CONFIG, sequences_max=5), build_runner)
    plain = drafted(CpuEngine(card, CONFIG, BLOCKS, path), None)
    found = drafted(CpuEngine(card, CONFIG, BLOCKS, path), source)

    assert source.spent_s > 0
    assert {key: [t.token_id for t in tokens] for key, tokens in found.output.items()} == {
        key: [t.token_id for t in tokens] for key, tokens in plain.output.items()
    }


def test_a_model_drafts_for_itself_what_it_then_writes(card: ModelCard) -> None:
    """What it read of the text, in slices and behind accepted drafts, is in place."""
    source = build_draft_model(card, card, CONFIG, build_runner)
    engine = CpuEngine(card, CONFIG, BLOCKS, None)
    engine.core.drafts.drafter = Drafter(FREE_DRAFTS, [], model=source)
    prompt = tuple(range(2, 90))
    engine.core.submit(Request("r", prompt, 200, CacheGrant(b"n"), Sampling(temperature=0)))
    steps, ended = 0, list[Finished]()
    while engine.core.has_work():
        ended += [event for event in engine.core.step() if isinstance(event, Finished)]
        steps += 1
    (count,) = ended[0].usage.drafts

    assert count.accepted >= 0.95 * count.drafted
    assert steps < 40


@pytest.mark.parametrize(
    ("config", "draft_context", "message"),
    [
        (CONFIG, 256, "has a context of 256 tokens; expected at least 512"),
        (replace(CONFIG, gpus=(0, 1)), 1024, "engine.gpus names 2 GPUs; expected one"),
    ],
)
def test_pairs_that_cannot_draft_are_refused_by_name(
    card: ModelCard, tmp_path: Path, config: EngineConfig, draft_context: int, message: str
) -> None:
    """In one line, before anything is loaded."""
    shape = replace(card.config, context=draft_context)
    draft = replace(card, name="small", config=shape)

    with pytest.raises(ModelError, match=message) as refused:
        build_draft_model(card, draft, config, build_runner)

    assert refused.value.message.startswith("engine.draft_model: ")
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(("sequences", "places"), [(3, 3), (500, 32)])
def test_its_pool_has_a_place_for_each_sequence(
    card: ModelCard, sequences: int, places: int
) -> None:
    """32 at most: the pool does not grow with the engine."""
    taken: list[int] = []

    def build(card: ModelCard, config: EngineConfig) -> LoadedModel:
        taken.append(config.kv_blocks)
        return build_runner(card, config)

    build_draft_model(card, card, replace(CONFIG, sequences_max=sequences), build)

    assert taken == [places * DRAFT_PLACE_TOKENS // 16]
