"""The memory of an NVIDIA device, as its driver's program tells it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from msgspec.structs import replace

from engine.config import WeightsKind
from engine.model_store import prepare
from engine.model_store.architecture import Moe, Packing, Quantisation
from gateway.engines.device_memory import DeviceMemory, device_weights_mib, read_device_memory
from gateway.levels.model_cost import weights_of
from tests.models import prepared, tiny_config, write_gguf
from tests.tables import each_row


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


@each_row("said", ["", "No devices were found\n", "[N/A], [N/A]\n", "7\n"])
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


@pytest.mark.parametrize(
    ("layout", "kind", "has_experts", "is_packed"),
    [
        ("awq", "auto", False, True),
        ("mxfp4", "auto", True, True),
        ("awq", "auto", True, False),
        ("int8", "auto", False, False),
        ("awq", "bf16", False, False),
    ],
)
def test_weights_that_stay_packed_take_their_files_size(
    tmp_path: Path, layout: Packing, kind: WeightsKind, *, has_experts: bool, is_packed: bool
) -> None:
    """Others are bf16 on the device, whatever the files hold."""
    card = prepared(tmp_path)
    shape = replace(card.config, hidden=4_096, moe=Moe(8, 2, 64) if has_experts else None)
    card = replace(card, config=shape, quantisation=Quantisation(layout))

    expected = 5 if is_packed else weights_of(shape) * 2 // 2**20
    assert device_weights_mib(card, kind, 5) == expected


def test_matrices_of_four_bits_in_a_gguf_file_stay_packed(tmp_path: Path) -> None:
    """The embedding is bf16 on the device, and so are matrices of other bits."""
    shape = tiny_config(heads=16, head_dim=64, layers=4)
    mib = {}
    for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0):
        folder = tmp_path / kind.name
        folder.mkdir()
        card = prepare("tiny", write_gguf(folder / "m.gguf", shape, kind=kind), folder)
        mib[kind.name] = device_weights_mib(card, "auto", 1)
    dense = weights_of(shape) * 2 // 2**20

    assert mib["Q8_0"] == dense
    assert mib["Q4_0"] == pytest.approx(dense * 5 / 16, abs=1)


def test_experts_in_mxfp4_of_a_gguf_file_stay_packed(tmp_path: Path) -> None:
    """Else a plan for gpt-oss-20b would have 42 GB where 14 are taken."""
    shape = replace(tiny_config(heads=16, head_dim=64, layers=1), moe=Moe(8, 2, 1_024))
    experts = 8 * 1_024 * shape.hidden
    path, kind = tmp_path / "m.gguf", GGMLQuantizationType.MXFP4
    writer = GGUFWriter(path, "gpt-oss")
    codes = np.zeros((8, 1_024, shape.hidden // 32 * 17), np.uint8)
    writer.add_tensor("blk.0.ffn_up_exps.weight", codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    card = replace(prepared(tmp_path), config=shape, source=str(path))

    saved = (weights_of(shape) * 2 - experts * (2 - 17 / 32)) / 2**20
    assert device_weights_mib(card, "auto", 1) == pytest.approx(saved, abs=1)
