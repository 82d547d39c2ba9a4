"""One model over two GPUs: tokens and logprobs are those of one, under graphs and without them.

Needs two GPUs of one host that can address each other; a tiny random model, so none on disk.
"""

from __future__ import annotations

import pytest
import torch

from engine.config import LevelsConfig
from engine.runner import gpu_runner
from tests.unit.engine.runner.gpu_engine import FAMILIES, Engine, config_of
from tests.unit.engine.runner.test_lanes import BLOCKS, check_alike, run, wide

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

SEEDS = {"qwen3_next": 3}
"""Of the requests. With 2, a row has two experts whose scores are equal to a GPU's rounding: one
GPU and two choose unlike ones, and the reference agrees with neither."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} GPUs here; a model over several needs two"),
]


@pytest.fixture(autouse=True)
def every_step_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lanes draw the same tokens in each step."""
    monkeypatch.setattr(gpu_runner, "COMPARED_STEPS", 1)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "qwen3_moe", "lfm2", "qwen3_next", "granite hybrid"]
)
def test_two_gpus_give_what_one_gives(name: str) -> None:
    """Random requests with forks, masks, penalties, hits and preemption, with captured graphs."""
    config = wide(FAMILIES[name] if name in FAMILIES else config_of(4, 2), 2)
    engines = [Engine(2, config=config, blocks=BLOCKS, lanes=lanes) for lanes in (1, 2)]
    for engine in engines:
        with torch.inference_mode():
            engine.runner.warm_up(engine.limits)

    steps = [run(engine, seed=SEEDS.get(name, 2), count=24) for engine in engines]

    assert steps[0] == steps[1]
    assert engines[1].runner.graph_count == engines[0].runner.graph_count > 0
    check_alike(*engines)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_levels_below_two_gpus_change_no_answer(name: str) -> None:
    """Random requests twice over a small pool, whose blocks leave for host memory and come back,
    under graphs."""
    config = wide(FAMILIES[name] if name in FAMILIES else config_of(4, 2), 2)
    levels = LevelsConfig(host_mib=4, host_tokens_min=1)
    engines = [
        Engine(2, config=config, blocks=BLOCKS, lanes=2, levels=below) for below in (None, levels)
    ]

    loaded = 0
    for engine in engines:
        with torch.inference_mode():
            engine.runner.warm_up(engine.limits)
        for _ in range(2):
            run(engine, seed=2, count=24)
            loaded += sum(dict(one.loaded_tokens).get("host", 0) for one in engine.started.values())
            engine.settle()
        engine.core.close()

    assert loaded > 0
    check_alike(*engines)


def test_a_second_run_of_graphs_gives_the_same_bits() -> None:
    """A flag that a peer raised too early or too late would show as other tokens."""
    engine = Engine(2, config=wide(config_of(4, 2), 2), blocks=BLOCKS, lanes=2)
    with torch.inference_mode():
        engine.runner.warm_up(engine.limits)

    found = []
    for _ in range(3):
        engine.drawn.clear()
        run(engine, seed=5, count=16)
        found.append({key: list(tokens) for key, tokens in engine.drawn.items()})

    assert found[0].keys() == found[1].keys() == found[2].keys()
    for key, tokens in found[0].items():
        assert [t.token_id for t in tokens] == [t.token_id for t in found[2][key]]
