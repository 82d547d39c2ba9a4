"""The memory of an NVIDIA device, as its driver's program tells it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from gateway.engines.device_memory import DeviceMemory, read_device_memory


def test_the_device_that_engines_see_is_asked() -> None:
    """CUDA_VISIBLE_DEVICES begins with it; without, it may be any, so the freest counts: a check
    that refuses a start must be sure."""
    asked: list[Sequence[str]] = []

    def ask(command: Sequence[str]) -> str:
        asked.append(command)
        return "1200, 81559\n" if "-i" in command else "1200, 81559\n80994, 81559\n"

    chosen = read_device_memory({"CUDA_VISIBLE_DEVICES": "GPU-5fe1,1"}, ask)
    freest = read_device_memory({}, ask)

    assert (chosen, freest) == (DeviceMemory(1_200, 81_559), DeviceMemory(80_994, 81_559))
    assert [command[1] for command in asked] == ["-i", "--query-gpu=memory.free,memory.total"]
    assert asked[0][2] == "GPU-5fe1"


@pytest.mark.parametrize("said", ["", "No devices were found\n", "[N/A], [N/A]\n", "7\n"])
def test_an_answer_without_numbers_checks_nothing(said: str) -> None:
    """Devices whose memory is the host's say [N/A]."""
    assert read_device_memory({}, lambda _: said) is None


@pytest.mark.parametrize(
    "error", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10)]
)
def test_a_machine_without_the_program_checks_nothing(error: Exception) -> None:
    """A container may have the device and not the program; the engine then says what lacks."""

    def fail(_: Sequence[str]) -> str:
        raise error

    assert read_device_memory({}, fail) is None
