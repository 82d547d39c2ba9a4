"""A GPU runner is built, or what is missing is said in words that an operator can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_store import ModelConfig
from engine.runner.gpu_build import build_device_runner, check_shape, fitting
from tests.models import prepared

SHAPE = ModelConfig("llama", 1, 256, 256, heads=32, kv_heads=2, head_dim=128, vocab=64, context=64)


def test_where_there_is_no_gpu_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are read, which may take minutes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ModelError, match="--device cpu"):
        build_device_runner(prepared(tmp_path), EngineConfig())


@pytest.mark.parametrize(
    ("shape", "settings", "why"),
    [
        ({"head_dim": 96}, {}, "this model's have 96"),
        ({"head_dim": 8}, {}, "this model's have 8"),
        ({"head_dim": 256}, {}, "this model's have 256"),
        ({"kv_heads": 1}, {}, "in this model 32"),
        ({}, {"dtype": "fp32"}, "dtype"),
        ({}, {"kv_dtype": "fp32"}, "kv_dtype"),
    ],
)
def test_what_no_kernel_computes_is_refused_by_its_name(
    shape: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    """Rows with more heads than a tile has vectors would be left out of every plan, and answered
    with what the memory held before; others would fail as a compiler's error."""
    with pytest.raises(ModelError, match=f"{why}.* --device cpu") as caught:
        check_shape(msgspec.structs.replace(SHAPE, **shape), EngineConfig(**settings))

    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(
    "shape", [{}, {"head_dim": 16}, {"kv_heads": 32}, {"heads": 9, "kv_heads": 3, "head_dim": 64}]
)
def test_what_has_kernels_is_taken(shape: dict[str, Any]) -> None:
    """Up to 16 heads that share one, and the usual dimensions."""
    check_shape(msgspec.structs.replace(SHAPE, **shape), EngineConfig(dtype="bf16"))


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
