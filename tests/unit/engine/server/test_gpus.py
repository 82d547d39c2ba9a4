"""Which GPUs an engine sees: those of `engine.gpus`, and numbers that there are none of."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.runner.gpu_build import lane_devices
from engine.server.composition import show_gpus
from tests.tables import each_row


@each_row(
    ("seen", "gpus", "shown"),
    [
        (None, [2, 0], "2,0"),
        ("4,6,7", [2, 0], "7,4"),
        ("GPU-a, GPU-b", [1], "GPU-b"),
        (None, [], None),
        ("3", [], "3"),
    ],
)
def test_an_engine_sees_only_its_gpus_in_their_order(
    seen: str | None, gpus: list[int], shown: str | None
) -> None:
    """Numbers are those among what the operator lets it see."""
    environment = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}

    show_gpus(gpus, environment)

    assert environment.get("CUDA_VISIBLE_DEVICES") == shown
    assert ("CUDA_DEVICE_ORDER" in environment) == bool(gpus)


def test_a_number_that_is_not_visible_is_refused() -> None:
    with pytest.raises(ModelError, match=r"names GPU 2; CUDA_VISIBLE_DEVICES has 2"):
        show_gpus([0, 2], {"CUDA_VISIBLE_DEVICES": "5,6"})


def test_fewer_gpus_than_named_are_refused() -> None:
    assert [one.index for one in lane_devices(2, 4)] == [0, 1]
    assert len(lane_devices(0, 4)) == 1
    with pytest.raises(ModelError, match=r"engine.gpus names 4 GPUs; CUDA finds 2"):
        lane_devices(4, 2)


def test_a_gpu_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gpus names GPU 1 twice: \[0, 1, 1\]"):
        EngineConfig(gpus=(0, 1, 1))


def test_gpus_beside_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match='gpus is set, and device is "cpu"'):
        EngineConfig(gpus=(0,), device="cpu")
