"""Cards of encoders: preparation from folders and zip files, and refusals."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from engine.encoder.card import CARD_FILE, load_encoder_card, prepare_encoder
from engine.errors import ModelError
from tests.encoders import (
    SHAPE,
    TOKENS_MAX,
    VOCABULARY,
    prepared_encoder,
    write_encoder,
    zip_encoder,
)


def refusal(source: Path, tmp: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        prepare_encoder("tiny-bert", source, tmp)
    return caught.value


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_card_has_shape_and_limits_of_the_folder(tmp_path: Path) -> None:
    """Every size comes from the files."""
    card = prepared_encoder(tmp_path)

    assert (card.shape, card.dimensions, card.tokens_max) == (SHAPE, 32, TOKENS_MAX)
    assert (card.first_token_id, card.last_token_id) == (2, 3)
    assert (card.pooling, card.cuts) == ("mean", ())
    assert load_encoder_card(Path(card.folder)) == card


def test_zip_file_gives_the_card_of_its_folder(tmp_path: Path) -> None:
    """The package on the index holds a zip file; its weights are unpacked once."""
    folder = write_encoder(tmp_path / "bert")
    card = prepare_encoder("tiny-bert", folder, tmp_path)
    packed = prepare_encoder("tiny-bert", zip_encoder(folder, tmp_path / "m.zip"), tmp_path)
    own = {"digest": "", "folder": "", "weights": ""}

    assert replace(packed, **own) == replace(card, **own)
    assert Path(packed.weights).read_bytes() == (folder / "model.safetensors").read_bytes()


def test_second_preparation_writes_nothing(tmp_path: Path) -> None:
    """Modification times stay the same."""
    source = zip_encoder(write_encoder(tmp_path / "bert"), tmp_path / "m.zip")
    card = prepare_encoder("tiny-bert", source, tmp_path)
    times = [path.stat().st_mtime_ns for path in sorted(Path(card.folder).iterdir())]

    assert prepare_encoder("tiny-bert", source, tmp_path) == card
    assert [path.stat().st_mtime_ns for path in sorted(Path(card.folder).iterdir())] == times


def test_moved_zip_file_is_not_unpacked_again(tmp_path: Path) -> None:
    """A data directory behind a link has another path; unpacking takes a second."""
    source = zip_encoder(write_encoder(tmp_path / "bert"), tmp_path / "m.zip")
    card = prepare_encoder("tiny-bert", source, tmp_path)
    written = Path(card.weights).stat().st_mtime_ns
    (tmp_path / "linked").symlink_to(tmp_path)
    again = prepare_encoder("tiny-bert", tmp_path / "linked" / "m.zip", tmp_path / "linked")

    assert again.folder == str(tmp_path / "linked" / "prepared" / Path(card.folder).name)
    assert load_encoder_card(Path(again.folder)) == again
    assert Path(again.weights).stat().st_mtime_ns == written


def test_other_weights_give_another_digest(tmp_path: Path) -> None:
    """A vector of one model is never taken for that of another."""
    first = prepared_encoder(tmp_path)
    second = prepared_encoder(tmp_path, seed=1)

    assert first.digest != second.digest
    assert first.folder != second.folder


def test_prepared_tokenizer_neither_pads_nor_truncates_nor_finds_special_tokens(
    tmp_path: Path,
) -> None:
    """Files of encoders truncate at a length of their own, and a client's text is text."""
    tokenizer = Tokenizer.from_file(str(prepared_encoder(tmp_path).tokenizer_path))

    assert tokenizer.encode("[SEP]", add_special_tokens=False).ids == [
        VOCABULARY.index(token) for token in ("[", "s", "##e", "##p", "]")
    ]
    assert len(tokenizer.encode("the " * 30, add_special_tokens=False).ids) == 30
    assert tokenizer.encode("", add_special_tokens=False).ids == []


def test_pooling_by_the_first_token_is_read(tmp_path: Path) -> None:
    """BGE's models take the vector of [CLS]."""
    folder = write_encoder(tmp_path / "bert")
    change_json(
        folder / "1_Pooling/config.json",
        pooling_mode_cls_token=True,
        pooling_mode_mean_tokens=False,
    )

    assert prepare_encoder("tiny-bert", folder, tmp_path).pooling == "first"


def test_matryoshka_dimensions_are_read(tmp_path: Path) -> None:
    """Without them, the model was not trained to be cut. The whole length is no cut."""
    assert prepared_encoder(tmp_path, matryoshka_dimensions=[32, 16, 8]).cuts == (8, 16)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"model_type": "llama"}, "unsupported", "'llama' is no encoder"),
        ({"hidden_act": "relu"}, "unsupported", "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "unsupported", "'relative_key'"),
        ({"num_hidden_layers": 0}, "corrupt", "num_hidden_layers"),
        ({"num_attention_heads": 5}, "corrupt", "no multiple of num_attention_heads 5"),
        ({"vocab_size": 10}, "corrupt", "has no embedding; there are 10"),
        ({"max_position_embeddings": 4}, "corrupt", "texts of 4 tokens"),
    ],
)
def test_config_that_cannot_run_is_refused(
    fields: dict[str, Any], code: str, words: str, tmp_path: Path
) -> None:
    """Before a process loads it."""
    found = refusal(write_encoder(tmp_path / "bert", **fields), tmp_path)

    assert found.code == code
    assert words in found.message


def test_unknown_pooling_is_refused(tmp_path: Path) -> None:
    """Vectors of another pooling would look right and be wrong."""
    folder = write_encoder(tmp_path / "bert")
    change_json(folder / "1_Pooling/config.json", pooling_mode_max_tokens=True)

    assert "pooling_mode_max_tokens" in refusal(folder, tmp_path).message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_without_a_file_is_refused(name: str, tmp_path: Path) -> None:
    """The message names the file."""
    folder = write_encoder(tmp_path / "bert")
    (folder / name).unlink()

    found = refusal(folder, tmp_path)

    assert (found.code, name in found.message) == ("not_found", True)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_damaged_config_is_refused(data: bytes, tmp_path: Path) -> None:
    """Files are untrusted."""
    folder = write_encoder(tmp_path / "bert")
    (folder / "config.json").write_bytes(data)

    assert refusal(folder, tmp_path).code == "corrupt"


@pytest.mark.parametrize(
    "fields",
    [
        {"added_tokens": [3]},
        {"added_tokens": 3},
        {"model": {"vocab": {"[CLS]": "2", "[SEP]": "3"}}},
        {"model": {"vocab": {"[CLS]": 2, "[SEP]": 3, "word": "four"}}},
    ],
)
def test_damaged_tokenizer_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    """With a reason, not a traceback of what could not be read."""
    folder = write_encoder(tmp_path / "bert")
    change_json(folder / "tokenizer.json", **fields)

    assert refusal(folder, tmp_path).code in ("corrupt", "unsupported")


def test_file_that_is_no_zip_file_is_refused(tmp_path: Path) -> None:
    """A GGUF file, say."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")

    assert refusal(source, tmp_path).code == "unsupported"


def test_member_outside_the_folder_is_never_written(tmp_path: Path) -> None:
    """Only the files that an encoder needs are read, each under its own name."""
    source = zip_encoder(write_encoder(tmp_path / "bert"), tmp_path / "m.zip")
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr("../../outside.txt", "x")
    models = tmp_path / "deep" / "models"

    card = prepare_encoder("tiny-bert", source, models)

    assert {path.name for path in Path(card.folder).iterdir()} == {
        CARD_FILE, "tokenizer.json", "model.safetensors",
    }  # fmt: skip
    assert not list(tmp_path.rglob("outside.txt"))
