"""The memory of several models: what they need together is told before they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import Config, ServedModelSettings
from gateway.engines import memory
from gateway.engines.memory import ENGINE_MIB, WORK_MIB, lacking_memory, plan_memory


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Two models of 3 MiB each, on a machine without an NVIDIA device."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr(memory, "NVIDIA_CONTROL", tmp_path / "none")
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


def test_only_host_memory_of_several_models_is_checked(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A single model starts as before; an engine on a device says itself what does not fit."""
    set_free(monkeypatch, 1)
    on_device = tuple(
        ServedModelSettings(one.name, one.path, engine={"device": "cuda"}) for one in config.models
    )
    single = Config(data_dir=config.data_dir, models=config.models[:1])
    device = Config(data_dir=config.data_dir, models=on_device)

    assert lacking_memory(config) != ""
    assert lacking_memory(single) == ""
    assert (plan_memory(device), lacking_memory(device)) == (None, "")
    set_free(monkeypatch, None)
    assert lacking_memory(config) == ""
    set_free(monkeypatch, 1)
    monkeypatch.setattr(memory, "NVIDIA_CONTROL", tmp_path)
    assert lacking_memory(config) == ""
