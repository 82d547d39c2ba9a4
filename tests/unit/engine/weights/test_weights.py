"""Weights: GGUF in every type we claim, folders in one or many files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.model_store import ModelCard, ModelConfig, prepare
from engine.weights import expected_shapes, load_weights, random_weights
from tests.models import LLAMA3_SCALING, tiny_config, tiny_weights, write_folder, write_gguf

SHAPES = {
    "MHA": tiny_config(heads=4, kv_heads=4),
    "GQA": tiny_config(heads=4, kv_heads=2),
    "MQA": tiny_config(heads=4, kv_heads=1),
    "untied": tiny_config(tie_embeddings=False),
    "stretched": tiny_config(rope_scaling=LLAMA3_SCALING),
}

# The largest error of a value, in units of its row's largest: half a step of each type, and the
# rounding of its scales.
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


def gguf_card(tmp: Path, config: ModelConfig, kind: Kind = Kind.F32) -> ModelCard:
    return prepare("tiny", write_gguf(tmp / "m.gguf", config, kind=kind), tmp)


def assert_same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_a_gguf_file_gives_the_weights_it_was_made_from(
    config: ModelConfig, tmp_path: Path
) -> None:
    """With q and k back in the order of the trained model: a wrong order is still a model, and
    speaks nonsense."""
    card = gguf_card(tmp_path, config)

    assert_same(load_weights(card, torch.float32), tiny_weights(config))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_folder_gives_the_weights_that_were_saved(
    dtype: torch.dtype, shards: int, tmp_path: Path
) -> None:
    """In each dtype that models are published in, in one file or in many."""
    config = tiny_config()
    source = write_folder(tmp_path / "m", config, dtype=dtype, shards=shards)
    saved = {n: t.to(dtype).float() for n, t in tiny_weights(config).items()}

    assert_same(load_weights(prepare("tiny", source, tmp_path), torch.float32), saved)


@pytest.mark.parametrize(("kind", "error"), KINDS.items(), ids=lambda k: getattr(k, "name", ""))
def test_each_type_comes_back_within_its_step(kind: Kind, error: float, tmp_path: Path) -> None:
    """Quantised by the reference implementation; ours must be off by no more than rounding."""
    config = tiny_config()
    original = tiny_weights(config)

    loaded = load_weights(gguf_card(tmp_path, config, kind), torch.float32)

    for name, tensor in original.items():
        off = (loaded[name] - tensor).abs().amax()
        assert off <= error * tensor.abs().amax(), name


K_QUANTS = {Kind.Q2_K: 84, Kind.Q3_K: 110, Kind.Q4_K: 144, Kind.Q5_K: 176, Kind.Q6_K: 210}
"""Bytes of a block of 256 values."""


@pytest.mark.parametrize(("kind", "size"), K_QUANTS.items(), ids=lambda k: getattr(k, "name", ""))
def test_k_quants_are_read_as_the_reference_reads_them(
    kind: Kind, size: int, tmp_path: Path
) -> None:
    """The reference writes no K-quants, so random blocks stand for a file; one of zeros must be
    zero, whatever the layout."""
    config = tiny_config(heads=4, kv_heads=4, head_dim=64)  # rows of 256
    path = tmp_path / "m.gguf"
    write_gguf(path, config, kind=Kind.Q8_0)
    info = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_v.weight")
    data = bytearray(path.read_bytes())
    # The type follows name, dimension count and two dimensions; one K row takes less room.
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


def test_the_second_load_maps_what_the_first_one_kept(tmp_path: Path) -> None:
    """Dequantising is paid once per dtype; the source's tensors are not touched again."""
    config = tiny_config()
    card = gguf_card(tmp_path, config, Kind.Q8_0)
    first = load_weights(card, torch.float32)
    Path(card.source).unlink()

    assert_same(load_weights(card, torch.float32), first)
    with pytest.raises(ModelError):
        load_weights(card, torch.bfloat16)


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_kept_weights_that_are_damaged_are_made_again(damage: str, tmp_path: Path) -> None:
    """What is only derived never stops a start."""
    card = gguf_card(tmp_path, tiny_config())
    first = {n: t.clone() for n, t in load_weights(card, torch.float32).items()}
    kept = next(Path(card.folder).glob("weights-*"))
    whole = kept.read_bytes()
    broken = {"cut": whole[: len(whole) // 2], "empty": b"", "other": b"x" * 100}[damage]
    kept.unlink()
    kept.write_bytes(broken)

    assert_same(load_weights(card, torch.float32), first)


def test_a_load_leaves_no_half_written_file(tmp_path: Path) -> None:
    """Killed or refused, the folder has whole files only."""
    card = gguf_card(tmp_path, tiny_config())

    load_weights(card, torch.float32)

    assert sorted(p.name for p in Path(card.folder).iterdir()) == [
        "chat_template.jinja",
        "model_card.json",
        "tokenizer.json",
        "weights-float32.safetensors",
    ]


def refused(source: Path, tmp: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_weights(prepare("tiny", source, tmp), torch.float32)
    return caught.value


@pytest.mark.parametrize("change", ["missing", "extra", "misshaped"])
def test_a_tensor_that_is_not_as_the_config_says_is_named(change: str, tmp_path: Path) -> None:
    """The message must say which one: models have hundreds."""
    name = "model.layers.1.mlp.up_proj.weight"
    source = write_folder(tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    if change == "missing":
        del weights[name]
    elif change == "extra":
        name = "model.layers.1.mlp.strange.weight"
        weights[name] = torch.zeros(3)
    else:
        weights[name] = weights[name][:-1].clone()
    save_file(weights, source / "model.safetensors")

    error = refused(source, tmp_path)

    assert error.code == "corrupt"
    assert name in error.message


def test_old_folders_that_carry_their_frequencies_load(tmp_path: Path) -> None:
    """They are computed from the config; a tensor of them changes nothing."""
    source = write_folder(tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(weights, source / "model.safetensors")

    loaded = load_weights(prepare("tiny", source, tmp_path), torch.float32)

    assert_same(loaded, tiny_weights(tiny_config()))


@pytest.mark.parametrize(
    "place", ["../outside.safetensors", "/etc/passwd", "..", "missing.safetensors"]
)
def test_an_index_names_files_beside_it_only(place: str, tmp_path: Path) -> None:
    """A downloaded index must not make us read other files of the machine."""
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
def test_a_truncated_gguf_file_is_refused(cut: float, tmp_path: Path) -> None:
    """A download that broke off: never zeros for weights."""
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * cut)])

    assert refused(path, tmp_path).code == "corrupt"


def test_a_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    """The same for folders."""
    source = write_folder(tmp_path / "m")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-100])

    assert refused(source, tmp_path).code == "corrupt"


def test_random_weights_are_those_of_their_seed(tmp_path: Path) -> None:
    """Benchmarks on two machines measure the same model."""
    config, cpu = tiny_config(), torch.device("cpu")

    one = random_weights(config, torch.float32, 7, cpu)
    two = random_weights(config, torch.float32, 7, cpu)
    other = random_weights(config, torch.float32, 8, cpu)

    assert_same(one, two)
    assert {n: tuple(t.shape) for n, t in one.items()} == expected_shapes(config)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
