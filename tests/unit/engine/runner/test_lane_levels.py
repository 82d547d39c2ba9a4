"""Levels below an engine over several GPUs: what comes back is what left, on every lane.

Without GPUs lanes are threads in Triton's interpreter, over devices that copy when they are waited
for.
"""

from __future__ import annotations

import pytest

from engine.api import Sampling
from engine.config import LevelsConfig
from engine.server import levels_below
from tests.unit.engine.kv.fake_device import FakeDevice
from tests.unit.engine.runner.gpu_engine import (
    DEVICE,
    FAMILIES,
    IN_INTERPRETER,
    Engine,
    config_of,
    request,
    tokens_of,
)
from tests.unit.engine.runner.test_lanes import ERROR_MAX, wide

pytestmark = [*IN_INTERPRETER, pytest.mark.nightly]

SAMPLING = Sampling(temperature=0, logprobs=0)
LEVELS = LevelsConfig(host_mib=1, host_tokens_min=1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_that_comes_back_is_answered_as_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From copies of all lanes' shards, with and without window groups: another prompt has taken
    the pool in between. Were a lane's shard another's, or lost, the answer would differ."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(levels_below, "CudaDevice", lambda _: FakeDevice())
    config = wide(FAMILIES[name] if name in FAMILIES else config_of(4, 2), 2)
    groups = 3 if name == "gemma3" else 1
    engine = Engine(2, config=config, blocks=3 * groups, lanes=2, levels=LEVELS)

    for index, seed in enumerate((1, 2, 1)):
        engine.run(request(f"{index}", tokens_of(seed, 37), SAMPLING, count=2))
        engine.settle()
    engine.core.close()

    assert dict(engine.started["2"].loaded_tokens)["host"] >= 16
    first, again = engine.drawn["0", 0], engine.drawn["2", 0]
    assert [one.token_id for one in again] == [one.token_id for one in first]
    for one, other in zip(first, again, strict=True):
        assert other.logprob == pytest.approx(one.logprob, abs=ERROR_MAX)
