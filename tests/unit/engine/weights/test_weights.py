"""Loading weights: every supported GGUF type, folders with one or many shards, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.model_store import Architecture, ModelCard, expected_shapes, prepare
from engine.weights import load_packed, load_weights, random_weights
from kernels.reference_weights import Packed
from tests.models import SHAPES, tiny_config, tiny_weights, write_folder, write_gguf

# Largest error of a value, relative to the largest value of its row: half a step of each type, plus
# rounding of the scales.
KINDS = {
    Kind.F32: 0.0,
    Kind.F16: 2**-11,
    Kind.BF16: 2**-8,
    Kind.Q8_0: 1 / 127,
    Kind.Q5_0: 1 / 14,
    Kind.Q5_1: 1 / 14,
    Kind.Q4_0: 1 / 6,
    Kind.Q4_1: 1 / 6,
}


def gguf_card(tmp: Path, config: Architecture, kind: Kind = Kind.F32) -> ModelCard:
    return prepare("tiny", write_gguf(tmp / "m.gguf", config, kind=kind), tmp)


def assert_same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_gguf_file_gives_original_weights(config: Architecture, tmp_path: Path) -> None:
    """With q and k in the order of training: a wrong order still loads, and the model outputs
    nonsense."""
    card = gguf_card(tmp_path, config)

    assert_same(load_weights(card, torch.float32), tiny_weights(config))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folder_gives_saved_weights(dtype: torch.dtype, shards: int, tmp_path: Path) -> None:
    """In each dtype of published models, in one file or in many."""
    config = tiny_config()
    source = write_folder(tmp_path / "m", config, dtype=dtype, shards=shards)
    saved = {n: t.to(dtype).float() for n, t in tiny_weights(config).items()}

    assert_same(load_weights(prepare("tiny", source, tmp_path), torch.float32), saved)


@pytest.mark.parametrize(("kind", "error"), KINDS.items(), ids=lambda k: getattr(k, "name", ""))
def test_dequantised_weights_are_within_one_step(kind: Kind, error: float, tmp_path: Path) -> None:
    """The reference implementation quantises; the error must not exceed rounding."""
    config = tiny_config()
    original = tiny_weights(config)

    loaded = load_weights(gguf_card(tmp_path, config, kind), torch.float32)

    for name, tensor in original.items():
        worst = (loaded[name] - tensor).abs().amax()
        assert worst <= error * tensor.abs().amax(), name


K_QUANTS = {Kind.Q2_K: 84, Kind.Q3_K: 110, Kind.Q4_K: 144, Kind.Q5_K: 176, Kind.Q6_K: 210}
"""Bytes of a block of 256 values."""


@pytest.mark.parametrize(("kind", "size"), K_QUANTS.items(), ids=lambda k: getattr(k, "name", ""))
def test_k_quants_equal_reference(kind: Kind, size: int, tmp_path: Path) -> None:
    """The reference cannot write K-quants, so the test writes random blocks. A block of zeros must
    give zeros in any layout."""
    config = tiny_config(heads=4, kv_heads=4, head_dim=64)  # rows of 256
    path = tmp_path / "m.gguf"
    write_gguf(path, config, kind=Kind.Q8_0)
    info = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_v.weight")
    data = bytearray(path.read_bytes())
    # The type field follows name, dimension count and two dimensions; K rows are smaller.
    name = b"blk.0.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = int(kind).to_bytes(4, "little")
    raw = torch.randint(0, 60, (256, size), dtype=torch.uint8, generator=torch.manual_seed(3))
    raw[:, -4:] = torch.tensor([0, 60, 0, 60], dtype=torch.uint8)  # fp16 scales of about 1
    raw[0] = 0
    data[info.data_offset : info.data_offset + raw.numel()] = raw.numpy().tobytes()
    path.write_bytes(data)

    loaded = load_weights(prepare("tiny", path, tmp_path), torch.float32)

    value = loaded["model.layers.0.self_attn.v_proj.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), kind))
    assert torch.equal(value, expected)
    assert not value[0].any()
    assert value[1:].any()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_tensors_of_4_bits_stay_packed(kind: Kind, tmp_path: Path) -> None:
    """From the file and from what is cached of it, with the reference's values."""
    config = tiny_config()
    card = gguf_card(tmp_path, config, kind)
    expected = load_weights(card, torch.float32)

    for _ in range(2):
        loaded = load_packed(card, torch.bfloat16, "cpu", lambda _, weight: weight)

        packed = {n: w for n, w in loaded.items() if isinstance(w, Packed)}
        assert {n for n in packed if n.endswith("_proj.weight")} == {
            n for n in expected if n.endswith("_proj.weight")
        }
        assert all(torch.equal(w.dense(torch.float32), expected[n]) for n, w in packed.items())


def test_second_load_maps_cached_weights(tmp_path: Path) -> None:
    """Dequantising happens once per dtype; later loads do not read the source."""
    config = tiny_config()
    card = gguf_card(tmp_path, config, Kind.Q8_0)
    first = load_weights(card, torch.float32)
    Path(card.source).unlink()

    assert_same(load_weights(card, torch.float32), first)
    with pytest.raises(ModelError):
        load_weights(card, torch.bfloat16)


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_damaged_cached_weights_are_made_again(damage: str, tmp_path: Path) -> None:
    """A damaged derived file must not fail a start."""
    card = gguf_card(tmp_path, tiny_config())
    first = {n: t.clone() for n, t in load_weights(card, torch.float32).items()}
    cached = next(Path(card.folder).glob("weights-*"))
    content = cached.read_bytes()
    broken = {"cut": content[: len(content) // 2], "empty": b"", "other": b"x" * 100}[damage]
    cached.unlink()
    cached.write_bytes(broken)

    assert_same(load_weights(card, torch.float32), first)


def test_load_leaves_no_partial_file(tmp_path: Path) -> None:
    """The prepared folder has complete files only."""
    card = gguf_card(tmp_path, tiny_config())

    load_weights(card, torch.float32)

    assert sorted(p.name for p in Path(card.folder).iterdir()) == [
        "chat_template.jinja",
        "model_card.json",
        "tokenizer.json",
        "weights-4-float32.safetensors",
    ]


def refused(source: Path, tmp: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_weights(prepare("tiny", source, tmp), torch.float32)
    return caught.value


@pytest.mark.parametrize("change", ["missing", "extra", "misshaped"])
def test_wrong_tensor_is_named(change: str, tmp_path: Path) -> None:
    """Models have hundreds of tensors, so the message names the wrong one."""
    name = "model.layers.1.mlp.up_proj.weight"
    source = write_folder(tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    if change == "missing":
        del weights[name]
    elif change == "extra":
        name = "model.layers.1.mlp.unknown.weight"
        weights[name] = torch.zeros(3)
    else:
        weights[name] = weights[name][:-1].clone()
    save_file(weights, source / "model.safetensors")

    error = refused(source, tmp_path)

    assert error.code == "corrupt"
    assert name in error.message


def test_old_folder_with_rope_frequencies_loads(tmp_path: Path) -> None:
    """The frequencies are computed from the config; the tensor is ignored."""
    source = write_folder(tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(weights, source / "model.safetensors")

    loaded = load_weights(prepare("tiny", source, tmp_path), torch.float32)

    assert_same(loaded, tiny_weights(tiny_config()))


@pytest.mark.parametrize(
    "place", ["../outside.safetensors", "/etc/passwd", "..", "missing.safetensors"]
)
def test_index_may_name_only_files_beside_it(place: str, tmp_path: Path) -> None:
    """A downloaded index must not make the engine read other files of the machine."""
    source = write_folder(tmp_path / "m", shards=2)
    index = source / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    places["model.norm.weight"] = place
    index.write_text(json.dumps({"weight_map": places}))

    save_file(tiny_weights(tiny_config()), tmp_path / "outside.safetensors")

    error = refused(source, tmp_path)

    assert error.code == ("not_found" if place == "missing.safetensors" else "corrupt")
    assert place in error.message


@pytest.mark.parametrize("cut", [0.3, 0.9, 0.9999])
def test_truncated_gguf_file_is_refused(cut: float, tmp_path: Path) -> None:
    """A broken download must not give zeros for weights."""
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * cut)])

    assert refused(path, tmp_path).code == "corrupt"


def test_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    """A broken download of a folder must not give zeros for weights."""
    source = write_folder(tmp_path / "m")
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[:-100])

    assert refused(source, tmp_path).code == "corrupt"


def test_random_weights_depend_on_seed_alone(tmp_path: Path) -> None:
    """Benchmarks on two machines measure the same model."""
    config, cpu = tiny_config(), torch.device("cpu")

    one = random_weights(config, torch.float32, 7, cpu)
    two = random_weights(config, torch.float32, 7, cpu)
    other = random_weights(config, torch.float32, 8, cpu)

    assert_same(one, two)
    assert {n: tuple(t.shape) for n, t in one.items()} == expected_shapes(config)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
