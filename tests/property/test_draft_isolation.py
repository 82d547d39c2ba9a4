"""How many steps an answer takes tells nothing of what other namespaces were answered.

Acceptance of drafts can be measured from outside: an answer that was guessed comes faster. An
observer asks what others may have asked, and counts its own steps.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from engine.api import CacheGrant, Sampling
from engine.core.core import Core
from tests.checkers import FREE_DRAFTS, World
from tests.unit.engine.tiny_engines import CONFIG, ask, run

RUNS = 24
AUC_MAX = 0.55


def _core(*arguments: object, **settings: object) -> Core:
    return Core(*arguments, **settings, draft_step_s=FREE_DRAFTS)  # type: ignore[arg-type]


def _steps_of_observer(seed: int, *, others: bytes | None) -> int:
    """Return the steps of an observer's request in namespace `own`, after the same one of a
    namespace `others`; None: after none."""
    world = World(
        CONFIG,
        blocks=64,
        block_size=4,
        vocab_size=50,
        context_tokens=64,
        make_core=_core,
    )
    chance = random.Random(seed)
    prompt = tuple(chance.randrange(50) for _ in range(12))
    wanted = ask("own", prompt, max_tokens=24, sampling=Sampling(seed=seed))
    if others is not None:
        run(world, replace(wanted, request_id="other", grant=CacheGrant(others)))
    before = world.runner.steps
    run(world, replace(wanted, grant=CacheGrant(b"own")))
    return world.runner.steps - before


def _auc(without: list[int], after: list[int]) -> float:
    """Return how often an answer after others' took fewer steps: 0.5 tells nothing."""
    wins = sum((a < b) + (a == b) / 2 for a in after for b in without)
    return wins / (len(without) * len(after))


def test_steps_do_not_tell_what_another_namespace_was_answered() -> None:
    """The same question gets the same answer, which the other namespace's index has whole."""
    without = [_steps_of_observer(seed, others=None) for seed in range(RUNS)]
    foreign = [_steps_of_observer(seed, others=b"foreign") for seed in range(RUNS)]

    assert _auc(without, foreign) <= AUC_MAX
    assert foreign == without


def test_steps_tell_what_the_own_namespace_was_answered() -> None:
    """The control: where the index may be read, an observer sees it at once."""
    without = [_steps_of_observer(seed, others=None) for seed in range(RUNS)]
    own = [_steps_of_observer(seed, others=b"own") for seed in range(RUNS)]

    assert _auc(without, own) > 0.95
