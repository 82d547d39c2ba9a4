"""Building a GPU runner, and the errors that tell an operator what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kv.format import kv_format
from engine.model_store import Architecture, Layer, Rope
from engine.model_store.architecture import Delta, Latent, Mamba, Moe
from engine.runner.gpu_build import (
    build_gpu_runner,
    check_dtypes,
    lacking_kernel,
    out_of_memory_as_model_error,
    states_of,
)
from engine.runner.loaded_model import blocks_of
from tests.models import prepared

SHAPE = Architecture(
    "llama", (Layer(),), 256, 256, heads=32, kv_heads=2, head_dim=128, vocab=64, context=64,
    ropes={"full": Rope(10_000.0, 128)},
)  # fmt: skip


def test_missing_gpu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check comes before weights are read, which may take minutes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ModelError, match=r"engine\.device"):
        build_gpu_runner(prepared(tmp_path), EngineConfig())


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"head_dim": 20}, "head_dim is 20"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"kv_heads": 1}, "32 query heads share a KV head"),
        ({"latent": Latent(32, 16, 8, 16)}, "8 + 32 channels"),
        ({"layers": (Layer("delta"), Layer()), "delta": Delta(1, 2, 256, 64)}, "256 channels"),
    ],
)
def test_model_without_kernels_runs_in_torch(shape: dict[str, Any], why: str) -> None:
    """Rows with more heads than a tile has vectors would be left out of every plan, and their
    output would be old memory."""
    assert why in lacking_kernel(msgspec.structs.replace(SHAPE, **shape))


@pytest.mark.parametrize("settings", [{"dtype": "fp32"}, {"kv_dtype": "fp32"}])
def test_fp32_is_refused(settings: dict[str, Any]) -> None:
    """A GPU runs bf16."""
    with pytest.raises(ModelError, match=r"dtype.* --device cpu") as caught:
        check_dtypes(EngineConfig(**settings))

    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"head_dim": 16},
        {"kv_heads": 32},
        {"heads": 9, "kv_heads": 3, "head_dim": 64},
        {"qk_norm": "head", "qkv_bias": True, "place": "sandwich"},
        {"score_scale": 0.3, "score_cap": 50.0, "sinks": True},
        {"layers": (Layer(window=64), Layer())},
        {"head_dim": 256},
        {"head_dim": 96},
        {"query_growth": (0.1, 8192)},
        {"moe": Moe(experts=4, top_k=2, intermediate=64)},
        {"latent": Latent(512, 128, 64, 128), "heads": 128},
        {"layers": (Layer("conv"), Layer()), "conv_width": 3},
        {"layers": (Layer("delta"), Layer()), "delta": Delta(16, 32, 128, 128)},
        {"layers": (Layer("mamba"), Layer()), "mamba": Mamba(48, 64, 128, 1)},
    ],
)
def test_model_with_kernels_is_accepted(shape: dict[str, Any]) -> None:
    """Up to 16 query heads per KV head, the usual head dimensions, and all that stands around
    attention."""
    assert lacking_kernel(msgspec.structs.replace(SHAPE, **shape)) == ""


def test_out_of_memory_names_settings_to_lower() -> None:
    """A torch traceback does not tell an operator what to change."""
    with pytest.raises(ModelError) as caught, out_of_memory_as_model_error(3 * 2**30, 2048):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert caught.value.code == "no_memory"
    assert "3.0 GiB" in caught.value.message
    assert "kv_memory_mib" in caught.value.message


@pytest.mark.gpu
def test_too_many_blocks_for_gpu_memory_are_refused(tmp_path: Path) -> None:
    """The setting asks for 16 TiB."""
    with pytest.raises(ModelError) as caught:
        build_gpu_runner(prepared(tmp_path), EngineConfig(kv_memory_mib=2**24))

    assert caught.value.code == "no_memory"


HYBRID = msgspec.structs.replace(
    SHAPE, layers=(Layer("delta"),) * 3 + (Layer(),), delta=Delta(4, 8, 128, 128), conv_width=4
)


def test_states_of_running_sequences_are_within_the_memory_of_kv() -> None:
    """A pool that they leave no room names the number that would do, and that number does."""
    form = kv_format(HYBRID, torch.bfloat16, 16)
    small = EngineConfig(kv_memory_mib=100)

    with pytest.raises(ModelError, match="states of 64 running sequences") as caught:
        states_of(HYBRID, small, form)

    found = re.search(r"at least (\d+)", str(caught.value))
    assert found is not None
    least = int(found[1])
    enough = EngineConfig(kv_memory_mib=least)
    states_bytes = states_of(HYBRID, enough, form)
    pool_bytes = blocks_of(form, enough, states_bytes) * form.block_bytes
    assert pool_bytes + states_bytes <= least * 2**20
    with pytest.raises(ModelError, match=r"lower engine\.sequences_max"):
        states_of(HYBRID, EngineConfig(kv_memory_mib=least - 2), form)
    assert states_of(HYBRID, EngineConfig(kv_memory_mib=100, sequences_max=8), form) < states_bytes
