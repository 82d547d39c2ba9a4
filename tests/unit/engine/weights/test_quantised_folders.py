"""Packed weights of folders, against packers written from each format's description."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.model_store import ModelCard, prepare
from engine.weights import load_packed, load_weights
from kernels.reference_weights import Packed, Weight
from tests.models import tiny_config, tiny_weights, write_folder

CONFIG = msgspec.structs.replace(
    tiny_config(heads=4, kv_heads=4, head_dim=64, tie_embeddings=False), intermediate=384
)
"""Rows of 256, so that they have groups of 128."""

Tensors = dict[str, torch.Tensor]


def numbers(*shape: int, below: int = 16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(below, shape, generator=generator, dtype=torch.int32)


def scales_of(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(shape, generator=generator) / 64 + 1e-3).half()


def words(codes: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight codes of 4 bits into a word along `dim`: code `order[i]` at place i."""
    eights = codes.long().reshape(*codes.shape[:dim], -1, 8, *codes.shape[dim + 1 :])
    parts = [eights.select(dim + 1, order[i]) << 4 * i for i in range(8)]
    return torch.stack(parts).sum(0).to(torch.int32)


def values_of(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return (codes - zeros) * scales, [N, K] with [N, G] each."""
    group = codes.shape[1] // scales.shape[1]
    wide = [part.float().repeat_interleave(group, 1) for part in (scales, zeros)]
    return (codes - wide[1]) * wide[0]


def awq(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    codes, zeros = numbers(rows, columns), numbers(rows, columns // 128, seed=1)
    scales, order = scales_of(rows, columns // 128), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(codes.T, 1, order),
        "qzeros": words(zeros.T, 1, order),
        "scales": scales.T,
    }
    return tensors, values_of(codes, scales, zeros)


def gptq(rows: int, columns: int, less: int = 1) -> tuple[Tensors, torch.Tensor]:
    codes, zeros = numbers(rows, columns), numbers(rows, columns // 64, below=15, seed=1) + 1
    scales = scales_of(rows, columns // 64)
    tensors = {
        "qweight": words(codes.T, 0), "qzeros": words((zeros - less).T, 1), "scales": scales.T,
        "g_idx": (torch.arange(columns) // 64).int(),
    }  # fmt: skip
    return tensors, values_of(codes, scales, zeros)


def packed_rows(rows: int, columns: int, zeros: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales = numbers(rows, columns), scales_of(rows, columns // 32).bfloat16()
    tensors = {
        "weight_packed": words(codes, 1), "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }  # fmt: skip
    return tensors, values_of(codes, scales, zeros)


def symmetric(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    return packed_rows(rows, columns, torch.full((rows, columns // 32), 8))


def asymmetric(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    zeros = numbers(rows, columns // 32, seed=3)
    tensors, values = packed_rows(rows, columns, zeros)
    return {**tensors, "weight_zero_point": words(zeros, 0)}, values


def floats(rows: int, columns: int) -> torch.Tensor:
    return numbers(rows, columns, below=200).float().sub(100).to(torch.float8_e4m3fn)


def fp8_rows(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    codes, scales = floats(rows, columns), scales_of(rows, 1).float()
    tensors = {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}
    return tensors, codes.float() * scales


def fp8_tensor(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    codes = floats(rows, columns)
    return {"weight": codes, "weight_scale": torch.tensor(0.01)}, codes.float() * 0.01


def fp8_blocks(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    codes, scales = floats(rows, columns), scales_of(-(-rows // 128), -(-columns // 128)).float()
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def int8_rows(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    codes, scales = (numbers(rows, columns, below=255) - 127).to(torch.int8), scales_of(rows, 1)
    return {"weight": codes, "weight_scale": scales.float()}, codes.float() * scales.float()


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**given, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FP8 = {"num_bits": 8, "type": "float"}
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, awq),
    "GPTQ": (GPTQ, gptq),
    "GPTQ, second version": (
        {**GPTQ, "checkpoint_format": "gptq_v2"}, lambda n, k: gptq(n, k, 0)
    ),
    "compressed-tensors": (compressed("pack-quantized"), symmetric),
    "compressed-tensors with zeros": (compressed("pack-quantized", symmetric=False), asymmetric),
    "fp8 by row": (compressed("float-quantized", strategy="channel", **FP8), fp8_rows),
    "fp8 by tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor),
    "fp8 by block": (BLOCKS, fp8_blocks),
    "int8": (compressed("int-quantized", strategy="channel", num_bits=8), int8_rows),
}  # fmt: skip


def folder_of(path: Path, settings: dict[str, Any], pack: Any) -> tuple[Path, Tensors]:
    """Write a folder whose linear maps are packed, and return the weights it holds in fp32."""
    write_folder(path, CONFIG, dtype=torch.bfloat16)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    file = path / "model.safetensors"
    stored, expected = load_file(file), {}
    for name, tensor in list(stored.items()):
        expected[name] = tensor.float()
        if name.endswith("_proj.weight"):
            del stored[name]
            parts, expected[name] = pack(*tensor.shape)
            stem = name.removesuffix("weight")
            stored |= {f"{stem}{part}": one.contiguous() for part, one in parts.items()}
    save_file(stored, file)
    return path, expected


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_what_their_format_says(name: str, tmp_path: Path) -> None:
    """Exactly, in fp32: nothing that the file has is lost."""
    source, expected = folder_of(tmp_path / "m", *FORMATS[name])

    loaded = load_weights(prepare("tiny", source, tmp_path), torch.float32)

    assert loaded.keys() == expected.keys()
    for one, tensor in expected.items():
        torch.testing.assert_close(loaded[one], tensor, rtol=1e-6, atol=1e-7, msg=one)


def packed_of(card: ModelCard) -> Iterator[tuple[str, Weight]]:
    loaded = load_packed(card, torch.bfloat16, "cpu", lambda _, weight: weight)
    return iter(loaded.items())


@pytest.mark.parametrize("name", FORMATS)
def test_weights_stay_packed_where_a_device_takes_them(name: str, tmp_path: Path) -> None:
    """Linear maps alone; norms and embeddings are tensors."""
    source, _ = folder_of(tmp_path / "m", *FORMATS[name])

    packed = {n for n, w in packed_of(prepare("tiny", source, tmp_path)) if isinstance(w, Packed)}

    assert packed == {n for n in tiny_weights(CONFIG) if n.endswith("_proj.weight")}


def test_one_weight_at_a_time_is_unpacked(tmp_path: Path) -> None:
    """Each is brought into its form before the next is read."""
    source, _ = folder_of(tmp_path / "m", *FORMATS["AWQ"])
    waiting: list[str] = []

    def form(name: str, weight: Weight) -> Weight:
        waiting.append(name)
        return weight

    load_packed(prepare("tiny", source, tmp_path), torch.bfloat16, "cpu", form)

    assert len(waiting) == len(set(waiting)) == len(tiny_weights(CONFIG))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown method": ({"quant_method": "quip"}, "quant_method: 'quip'"),
    "reordered columns": ({**GPTQ, "desc_act": True}, "desc_act: True"),
    "other bits for some layers": ({**GPTQ, "dynamic": {"+:.*mlp.*": {"bits": 8}}}, "dynamic"),
    "rotated rows": (
        {**compressed("pack-quantized"), "transform_config": {"config_groups": {"R1": {}}}},
        "transform_config",
    ),
    "sparse weights": (
        {**compressed("pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse-24-bitmask",
    ),
    "three bits": ({**GPTQ, "bits": 3}, "bits: 3"),
    "other blocks": ({**BLOCKS, "weight_block_size": [64, 64]}, "weight_block_size"),
    "another AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
                    "version: 'gemv'"),
    "reordered groups": (compressed("pack-quantized", actorder="group"), "actorder: 'group'"),
    "an unknown form": (compressed("nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
    "mixed kinds": (
        {
            **compressed("pack-quantized"),
            "config_groups": {
                "a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}},
            },
        },
        "unlike weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_refused_by_name(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """At preparation, with what runs instead."""
    source, _ = folder_of(tmp_path / "m", settings, symmetric)

    with pytest.raises(ModelError, match=told) as caught:
        prepare("tiny", source, tmp_path)

    assert caught.value.code == "unsupported"
    assert "engine.weights" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("scales", lambda t: t[:1]),
        ("qzeros", None),
        ("qweight", lambda t: t[:, :1]),
    ],
)
def test_parts_that_do_not_fit_are_refused(part: str, change: Any, tmp_path: Path) -> None:
    """Missing, or of another shape; the message names the weight."""
    source, _ = folder_of(tmp_path / "m", *FORMATS["AWQ"])
    file = source / "model.safetensors"
    stored = load_file(file)
    name = f"model.layers.0.mlp.down_proj.{part}"
    tensor = stored.pop(name)
    if change is not None:
        stored[name] = change(tensor).contiguous()
    save_file(stored, file)

    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj") as caught:
        load_weights(prepare("tiny", source, tmp_path), torch.float32)

    assert caught.value.code == "corrupt"


def test_reordered_columns_of_a_file_are_refused(tmp_path: Path) -> None:
    """Whatever its settings say: read in order they would be other weights."""
    source, _ = folder_of(tmp_path / "m", *FORMATS["GPTQ"])
    file = source / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.down_proj.g_idx"
    save_file({**stored, name: stored[name].flip(0)}, file)

    with pytest.raises(ModelError, match=r"down_proj\.g_idx") as caught:
        load_weights(prepare("tiny", source, tmp_path), torch.float32)

    assert caught.value.code == "corrupt"
