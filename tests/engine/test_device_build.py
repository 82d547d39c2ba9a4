"""A GPU runner is built, or what is missing is said in words that an operator can act on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.device_build import build_device_runner, fitting
from engine.errors import ModelError
from tests.models import prepared


def test_where_there_is_no_gpu_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are read, which may take minutes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ModelError, match="--device cpu"):
        build_device_runner(prepared(tmp_path), EngineConfig())


def test_memory_that_is_too_small_is_said_with_what_to_lower() -> None:
    """A start that fails by a trace of torch tells an operator nothing."""
    with pytest.raises(ModelError) as caught, fitting(3 * 2**30, 2048):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert caught.value.code == "no_memory"
    assert "3.0 GiB" in caught.value.message
    assert "kv_memory_mib" in caught.value.message


@pytest.mark.gpu
def test_more_blocks_than_a_gpu_has_room_for_are_refused(tmp_path: Path) -> None:
    """16 TiB."""
    with pytest.raises(ModelError) as caught:
        build_device_runner(prepared(tmp_path), EngineConfig(kv_memory_mib=2**24))

    assert caught.value.code == "no_memory"
