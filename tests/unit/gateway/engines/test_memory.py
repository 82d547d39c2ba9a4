"""The memory of several models: what they need together is told before they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig, LevelsConfig
from engine.model_store import CATALOGUE, DEFAULT_MODEL
from gateway.config import Config, ModelSettings, ServedModelSettings
from gateway.engines import device_memory, memory
from gateway.engines.device_memory import ENGINE_DEVICE_MIB, DeviceMemory
from gateway.engines.memory import (
    ENGINE_MIB,
    HOST_LEVEL_MIB_MIN,
    HOST_LEVEL_POOLS,
    WORK_MIB,
    available_memory_mib,
    lacking_memory,
    plan_device_memories,
    plan_memory,
    size_host_levels,
)
from tests.models import prepared, tiny_config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Two models of 3 MiB each, on a machine without an NVIDIA device."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr(device_memory, "NVIDIA_CONTROL", tmp_path / "none")
    models = (
        ServedModelSettings("big", str(folder), engine={"kv_memory_mib": 700}),
        ServedModelSettings("small", str(folder), engine={"kv_blocks": 8}),
    )
    return Config(data_dir=str(tmp_path), models=models)


def set_free(monkeypatch: pytest.MonkeyPatch, free_mib: int | None) -> None:
    monkeypatch.setattr(memory, "available_memory_mib", lambda *_: free_mib)


def test_the_sum_must_fit(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """One MiB less is an error that names each model with its numbers."""
    need = WORK_MIB + ENGINE_MIB + 3 + 700 + 3
    set_free(monkeypatch, need)
    enough = lacking_memory(config)
    set_free(monkeypatch, need - 1)
    said = lacking_memory(config)

    assert enough == ""
    assert f"{need - 1} MiB free, about {need} needed" in said
    assert "3 for big, 700 for big's KV, 3 for small, 0 for small's KV" in said


def test_host_levels_are_part_of_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has a host level of its own; a disk alone has its stage."""
    set_free(monkeypatch, 1)
    engine = EngineConfig(levels=LevelsConfig(disk_gib=1.0, stage_mib=50))
    models = (
        config.models[0],
        ServedModelSettings("small", config.models[1].path, engine={"levels": {"host_mib": 7}}),
    )
    said = lacking_memory(replace(config, engine=engine, models=models))

    assert "57 for the host levels of the cache" in said


def test_a_draft_model_is_part_of_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, and once it is prepared its pool: 512 tokens for each of at most 32 sequences."""
    card = prepared(Path(config.data_dir) / "models", tiny_config(layers=8, head_dim=64, heads=8))
    weights_mib = sum(file.stat().st_size for file in Path(card.source).rglob("*")) // 2**20
    kv_mib = 32 * 512 * (8 * 2 * 2 * 64 * 2) // 2**20
    set_free(monkeypatch, 1)
    engine = {"draft_model": card.source, "kv_memory_mib": 700}
    drafting = ServedModelSettings("big", config.models[0].path, engine=engine)
    off = ServedModelSettings("big", drafting.path, engine={**engine, "speculation": "off"})
    told = [
        lacking_memory(replace(config, models=(one, config.models[1]))) for one in (drafting, off)
    ]

    assert f"{3 + weights_mib} for big, {700 + kv_mib} for big's KV" in told[0]
    assert "3 for big, 700 for big's KV" in told[1]
    assert kv_mib > 0


def test_only_several_models_are_checked(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single model starts as before, and so do models on a machine that tells no number."""
    set_free(monkeypatch, 1)
    single = Config(data_dir=config.data_dir, models=config.models[:1])

    assert lacking_memory(config) != ""
    assert lacking_memory(single) == ""
    set_free(monkeypatch, None)
    assert lacking_memory(config) == ""


def test_a_model_that_is_fetched_at_the_start_counts_already(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is known, so `doctor` warns before the first start."""
    set_free(monkeypatch, 10_000)
    plan = plan_memory(Config(data_dir=config.data_dir))

    assert plan is not None
    assert [one.model_mib for one in plan.models] == [CATALOGUE[DEFAULT_MODEL].size // 2**20]


def set_device(monkeypatch: pytest.MonkeyPatch, free_mib: int | None) -> None:
    found = None if free_mib is None else DeviceMemory(free_mib, 81_559)
    monkeypatch.setattr(memory, "read_device_memory", lambda *_, **__: found)


def on_device(config: Config, device: str = "cuda") -> Config:
    """Return the configuration with both models on one device, 700 and 20 MiB of KV."""
    models = tuple(
        replace(one, engine={"device": device, "kv_memory_mib": kv_mib})
        for one, kv_mib in zip(config.models, (700, 20), strict=True)
    )
    return replace(config, models=models)


def test_models_on_one_device_share_its_memory(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, KV and CUDA of every engine are summed; one MiB less is an error with the numbers,
    where each engine alone would have fitted. They take none of the host's memory."""
    set_free(monkeypatch, 1)
    models = on_device(config)
    need = 2 * ENGINE_DEVICE_MIB + 3 + 700 + 3 + 20
    set_device(monkeypatch, need)
    enough = lacking_memory(models)
    set_device(monkeypatch, need - 1)
    said = lacking_memory(models)
    set_device(monkeypatch, None)

    assert enough == ""
    assert f"{need - 1} of 81559 MiB free on the NVIDIA device, about {need} needed" in said
    assert "3 for big, 700 for big's KV, 3 for small, 20 for small's KV" in said
    assert (lacking_memory(models), plan_memory(models)) == ("", None)


def test_each_memory_counts_what_lies_in_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one model on the device and one on the host, neither pays for the other's memory; a
    host level is in host memory, wherever its engine is."""
    set_free(monkeypatch, 10_000)
    set_device(monkeypatch, 10_000)
    below = {"device": "cuda", "levels": {"host_mib": 5}}
    models = replace(config, models=(config.models[0], replace(config.models[1], engine=below)))
    host, devices = plan_memory(models), plan_device_memories(models)

    assert host is not None
    assert host.need_mib == WORK_MIB + ENGINE_MIB + 3 + 700 + 5
    assert "small" not in host.describe()
    assert [[one.name for one in device.shares] for device in devices] == [["small"]]
    assert plan_device_memories(config) == []


@pytest.mark.parametrize(
    ("torch", "has_device", "is_on_device"),
    [("2.11.0", True, True), ("2.11.0+cpu", True, False), ("2.11.0", False, False)],
)
def test_auto_is_the_device_if_there_is_one_and_torch_can(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    torch: str,
    has_device: bool,
    is_on_device: bool,
) -> None:
    """`device = "auto"` takes a device exactly where an engine would."""
    if has_device:
        monkeypatch.setattr(device_memory, "NVIDIA_CONTROL", tmp_path)
    monkeypatch.setattr(device_memory, "version", lambda _: torch)
    set_free(monkeypatch, 10_000)
    set_device(monkeypatch, 10_000)
    models = on_device(config, "auto")

    assert bool(plan_device_memories(models)) == is_on_device
    assert (plan_memory(models) is None) == is_on_device


AUTO = LevelsConfig(host_mib="auto")


def alone(config: Config, **engine: object) -> Config:
    """Return the configuration with one model, whose host level is "auto"."""
    own = replace(EngineConfig(levels=AUTO), **engine)
    name = config.models[0].path
    return replace(config, models=(), model=ModelSettings(name), engine=own)


def test_a_host_level_of_auto_gets_half_of_what_is_left(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU at most as much as the pool, which is host memory itself; on a device at most four
    times the pool; none where nothing is left, or where the system does not tell."""
    need = WORK_MIB + 3 + 700
    single = alone(config, kv_memory_mib=700)

    def sized(one: Config, free_mib: int | None) -> int:
        set_free(monkeypatch, free_mib)
        return size_host_levels(one)[1][""]

    assert sized(single, need + 1_000) == 500
    assert sized(single, need + 100_000) == 700
    assert sized(single, need + 2 * HOST_LEVEL_MIB_MIN) == HOST_LEVEL_MIB_MIN
    assert sized(single, need + 2 * HOST_LEVEL_MIB_MIN - 1) == 0
    assert (sized(single, 1), sized(single, None)) == (0, 0)
    assert sized(alone(config, kv_memory_mib=5), need) == 5, "as much as a small pool"
    on_gpu = alone(config, kv_memory_mib=700, device="cuda")
    assert sized(on_gpu, WORK_MIB + 100_000) == HOST_LEVEL_POOLS * 700
    staged = alone(config, levels=LevelsConfig(host_mib="auto", disk_gib=1.0, stage_mib=256))
    assert sized(staged, 1) == 256


def test_several_host_levels_share_what_is_left_by_their_pools(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of one model stays, and is no longer free for the others; all fit together."""
    models = (
        config.models[0],
        replace(config.models[1], engine={"kv_memory_mib": 300}),
        ServedModelSettings("own", config.models[0].path, engine={"levels": {"host_mib": 7}}),
    )
    several = replace(config, models=models, engine=EngineConfig(levels=AUTO))
    need = WORK_MIB + 2 * ENGINE_MIB + 3 * 3 + 700 + 300 + 512 + 7
    set_free(monkeypatch, need + 1_000)
    plan, sizes = size_host_levels(several)

    assert sizes == {"big": 350, "small": 150}
    assert plan is not None
    assert plan.need_mib == need + 500
    assert f"{500 + 7} for the host levels of the cache" in plan.describe()
    assert lacking_memory(several) == ""


def test_a_fixed_number_asks_for_nothing(config: Config) -> None:
    """Nor does a configuration without levels."""
    assert size_host_levels(config) == (None, {})


def test_free_memory_is_that_of_the_narrowest_group(tmp_path: Path) -> None:
    """Files that a group could drop are free, as in the machine's own count."""
    (tmp_path / "meminfo").write_text("MemAvailable: 4096000 kB\n")
    inner = tmp_path / "a"
    inner.mkdir()
    for folder, limit, used in ((tmp_path, 3_000, 500), (inner, 2_000, 1_500)):
        (folder / "memory.max").write_text(f"{limit * 2**20}\n")
        (folder / "memory.current").write_text(f"{used * 2**20}\n")
    found = [available_memory_mib(tmp_path / "meminfo", inner, tmp_path)]
    (inner / "memory.stat").write_text(f"anon 5\ninactive_file {900 * 2**20}\n")
    found.append(available_memory_mib(tmp_path / "meminfo", inner, tmp_path))
    (inner / "memory.stat").write_text("nothing known\n")
    found.append(available_memory_mib(tmp_path / "meminfo", inner, tmp_path))
    found.append(available_memory_mib(tmp_path / "meminfo"))

    assert found == [500, 1_400, 500, 4_000]


def test_each_gpu_of_a_model_over_several_has_an_even_part(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that names no GPU takes the first."""
    set_device(monkeypatch, 10_000)
    two = {"device": "cuda", "kv_memory_mib": 701, "gpus": [1, 2]}
    models = (replace(config.models[0], engine=two), config.models[1])
    models = (models[0], replace(models[1], engine={"device": "cuda", "kv_memory_mib": 20}))

    plans = plan_device_memories(replace(config, models=models))

    found = {plan.gpu: [(s.name, s.weights_mib, s.kv_mib) for s in plan.shares] for plan in plans}
    assert found == {1: [("big", 2, 351)], 2: [("big", 2, 351)], 0: [("small", 3, 20)]}
    assert "free on GPU 1, about" in plans[0].describe()
    assert lacking_memory(replace(config, models=models)) == ""


@pytest.mark.parametrize(
    ("first", "second", "shared"), [([0, 1], [1], 1), ([0, 1], [], 0), ([2], [1, 2], 2)]
)
def test_a_model_over_several_gpus_shares_none_of_them(
    config: Config, first: list[int], second: list[int], shared: int
) -> None:
    """Its lanes wait for each other, and another model's steps would hold one up."""
    models = tuple(
        replace(one, engine={"device": "cuda", "gpus": gpus})
        for one, gpus in zip(config.models, (first, second), strict=True)
    )

    said = lacking_memory(replace(config, models=models))

    assert said.startswith(f"models: big and small both take GPU {shared}, which")
