"""Preparing models: the card, preparation once per model, and refusals."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import ModelError
from engine.model_store import Architecture, load_card, prepare
from engine.model_store.huggingface import read_folder
from engine.model_store.parts import PLAIN_TEMPLATE
from tests.models import (
    CHAT_TEMPLATE,
    SHAPES,
    write_folder,
    write_gguf,
)
from tests.tiny_tokenizer import TOKENS


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_card_has_shape_of_folder_and_gguf_file(config: Architecture, tmp_path: Path) -> None:
    """Every size comes from the files."""
    folder = prepare("a", write_folder(tmp_path / "a", config), tmp_path)
    file = prepare("b", write_gguf(tmp_path / "b.gguf", config), tmp_path)

    assert folder.config == config
    assert file.config.norm_eps == pytest.approx(config.norm_eps)
    if config.ropes["full"].kind == "plain":
        same = {"norm_eps": 0, "interleaved": True}  # GGUF files hold neighbours, folders halves
        assert {**as_dict(file.config), **same} == {**as_dict(config), **same}
    else:
        assert len(file.config.ropes["full"].divisors) == config.head_dim // 2


def as_dict(config: Architecture) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


@pytest.mark.parametrize("write", [write_folder, write_gguf])
def test_card_has_stop_tokens(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """The configured token, and every end-of-turn token of the vocabulary."""
    card = prepare("tiny", write(tmp_path / "m"), tmp_path)

    assert card.stop_token_ids == (TOKENS.index("<|endoftext|>"), TOKENS.index("<|im_end|>"))
    assert card.special_token_ids == (0, 1, 2)
    assert (card.bos_token_id, card.eos_token_id) == (0, TOKENS.index("<|im_end|>"))
    assert not card.add_bos
    assert card.template_path.read_text() == CHAT_TEMPLATE


def test_load_card_returns_prepared_card(tmp_path: Path) -> None:
    """The gateway needs the prepared folder alone."""
    card = prepare("tiny", write_folder(tmp_path / "m"), tmp_path)

    assert load_card(Path(card.folder)) == card


def test_second_prepare_writes_nothing(tmp_path: Path) -> None:
    """Modification times stay the same."""
    source = write_gguf(tmp_path / "m.gguf")
    card = prepare("tiny", source, tmp_path)
    times = [p.stat().st_mtime_ns for p in sorted(Path(card.folder).iterdir())]

    assert prepare("tiny", source, tmp_path) == card
    assert [p.stat().st_mtime_ns for p in sorted(Path(card.folder).iterdir())] == times


def test_changed_weight_byte_changes_digest(tmp_path: Path) -> None:
    """A fine-tune of the same size must not use the old weights or the old cache."""
    source = write_gguf(tmp_path / "m.gguf")
    before = prepare("tiny", source, tmp_path)
    data = bytearray(source.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    source.write_bytes(data)
    os.utime(source, ns=(0, 0))

    after = prepare("tiny", source, tmp_path)

    assert after.digest != before.digest
    assert after.folder != before.folder


def test_changed_chat_template_changes_digest(tmp_path: Path) -> None:
    """Every cache namespace contains the digest, so the digest covers the template."""
    source = write_folder(tmp_path / "m")
    before = prepare("tiny", source, tmp_path)
    (source / "chat_template.jinja").write_text("{{ messages }}")

    assert prepare("tiny", source, tmp_path).digest != before.digest


def test_copy_of_model_has_same_digest_and_own_source(tmp_path: Path) -> None:
    """Replicas have equal digests, and each loads its own file."""
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    write_gguf(one)
    two.write_bytes(one.read_bytes())

    first, second = prepare("tiny", one, tmp_path), prepare("tiny", two, tmp_path)

    assert first.digest == second.digest
    assert second.source == str(two)


def test_data_directory_may_move(tmp_path: Path) -> None:
    """A loaded card has the folder's present path."""
    source = write_folder(tmp_path / "m")
    card = prepare("tiny", source, tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    moved = tmp_path / "new" / "prepared" / Path(card.folder).name

    assert load_card(moved).tokenizer_path == moved / "tokenizer.json"


def test_moved_model_keeps_its_tokenizer(tmp_path: Path) -> None:
    """Making one takes seconds, and a start on a linked data directory would do it again."""
    card = prepare("tiny", write_gguf(tmp_path / "m.gguf"), tmp_path)
    card.tokenizer_path.write_text("kept")
    moved = (tmp_path / "m.gguf").rename(tmp_path / "n.gguf")

    again = prepare("tiny", moved, tmp_path)

    assert again == msgspec.structs.replace(card, source=str(moved))
    assert load_card(Path(again.folder)) == again
    assert card.tokenizer_path.read_text() == "kept"


def test_damaged_card_is_made_again(tmp_path: Path) -> None:
    """A damaged derived file must not fail a start."""
    source = write_folder(tmp_path / "m")
    card = prepare("tiny", source, tmp_path)
    (Path(card.folder) / "model_card.json").write_text("{")

    assert prepare("tiny", source, tmp_path) == card


@pytest.mark.parametrize("name", ["../../escape", "a/b", ".", "", "x" * 300, "spaces and \n"])
def test_model_name_cannot_leave_data_directory(name: str, tmp_path: Path) -> None:
    """A model's name becomes part of a path, which must stay inside the data directory."""
    source = write_folder(tmp_path / "m")

    card = prepare(name, source, tmp_path / "models")

    assert Path(card.folder).resolve().parent == (tmp_path / "models" / "prepared").resolve()


def refusal(source: Path, models: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        prepare("tiny", source, models)
    assert not (models / "prepared").exists() or not list((models / "prepared").glob("tiny*"))
    return caught.value


def folder_with(folder: Path, **fields: Any) -> Path:
    """Write a model's folder with other fields in its config; return it."""
    config = write_folder(folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return folder


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "heads that do not divide": ({"num_key_value_heads": 3}, "corrupt"),
    "no heads": ({"num_attention_heads": 0}, "corrupt"),
    "a negative size": ({"num_hidden_layers": -1}, "corrupt"),
    "more layers than memory": ({"num_hidden_layers": 10**30}, "corrupt"),
    "a size in words": ({"hidden_size": "large"}, "corrupt"),
    "a size that is missing": ({"vocab_size": None}, "corrupt"),
    "an odd head": ({"head_dim": 15}, "unsupported"),
    "no rotation base": ({"rope_theta": -1.0}, "corrupt"),
    "fewer embeddings than tokens": ({"vocab_size": 100}, "corrupt"),
    "an unknown end token": ({"eos_token_id": 99_999}, "corrupt"),
    "an end token in words": ({"eos_token_id": "</s>"}, "corrupt"),
    "another activation": ({"hidden_act": "gelu"}, "unsupported"),
    "quantised weights": ({"quantization_config": {"quant_method": "awq"}}, "unsupported"),
    "another scaling": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, "unsupported"),
    "scaling without its factor": ({"rope_scaling": {"rope_type": "linear"}}, "corrupt"),
    "scaling in words": ({"rope_scaling": "twice"}, "corrupt"),
}


@pytest.mark.parametrize(("change", "code"), CONFIGS.values(), ids=CONFIGS.keys())
def test_invalid_config_is_refused(change: dict[str, Any], code: str, tmp_path: Path) -> None:
    """A wrong guess would compute another model."""
    source = folder_with(tmp_path / "m", **change)

    assert refusal(source, tmp_path).code == code


SIZES: dict[str, tuple[object, str]] = {
    "max_position_embeddings": (0, "0; expected 1 to 2147483648"),
    "vocab_size": (-1, "-1; expected 1 to 2147483648"),
    "hidden_size": (2**62, f"{2**62}; expected 1 to 2147483648"),
    "intermediate_size": ("wide", "'wide'; expected a whole number"),
    "num_attention_heads": (3, "3; expected a multiple of num_key_value_heads, 2"),
    "head_dim": (7, "7; expected an even number"),
    "num_hidden_layers": (1.5, "1.5; expected a whole number"),
    "num_key_value_heads": ([2, 2], "[2, 2]; expected a whole number"),
}


@pytest.mark.parametrize(("name", "told"), SIZES.items())
def test_an_impossible_size_is_told_in_the_files_own_words(
    name: str, told: tuple[object, str], tmp_path: Path
) -> None:
    """The operator has config.json open, not our fields."""
    value, problem = told
    source = folder_with(tmp_path / "m", **{name: value})

    assert f"config.json: {name}: {problem}" in refusal(source, tmp_path).message


@pytest.mark.parametrize("key", ["context_length", "embedding_length"])
def test_an_impossible_size_of_a_gguf_file_is_told_by_its_key(key: str, tmp_path: Path) -> None:
    """As tools that edit such files call it."""
    path, name = write_gguf(tmp_path / "m.gguf"), f"llama.{key}".encode()
    content = path.read_bytes()
    at = content.index(name) + len(name) + 4
    path.write_bytes(content[:at] + bytes(4) + content[at + 4 :])

    message = refusal(path, tmp_path).message
    assert f"m.gguf: {name.decode()}: 0; expected 1 to 2147483648" in message


FILES: dict[str, tuple[str, bytes | None]] = {
    "no config": ("config.json", None),
    "a config that is a list": ("config.json", b"[]"),
    "a config that is not text": ("config.json", b"\xff\xfe"),
    "a deep config": ("config.json", b"[" * 100_000),
    "no tokenizer": ("tokenizer.json", None),
    "a tokenizer that is not one": ("tokenizer.json", b'{"model": 1}'),
    "added tokens that are none": ("tokenizer.json", b'{"added_tokens": [3]}'),
    "half a tokenizer": ("tokenizer.json", b'{"version": "1.0", "model"'),
}


@pytest.mark.parametrize(("file", "content"), FILES.values(), ids=FILES.keys())
def test_damaged_folder_is_refused(file: str, content: bytes | None, tmp_path: Path) -> None:
    """The command line gives a clear error, not a traceback from the engine's start."""
    source = write_folder(tmp_path / "m")
    (source / file).unlink()
    if content is not None:
        (source / file).write_bytes(content)

    assert refusal(source, tmp_path).code in ("corrupt", "not_found", "unsupported")


def with_settings(folder: Path, **settings: Any) -> Path:
    """Write a model's folder whose tokenizer has these settings; return it."""
    path = write_folder(folder) / "tokenizer_config.json"
    path.write_text(json.dumps({"add_bos_token": False, **settings}))
    return folder


ENDS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "a word": ({"eos_token": "<|im_end|>"}, {}, "<|im_end|>"),
    "an object": ({"eos_token": {"content": "<|im_start|>"}}, {}, "<|im_start|>"),
    "the map of special tokens": ({}, {"eos_token": {"content": "<|im_end|>"}}, "<|im_end|>"),
    "settings before the map": (
        {"eos_token": "<|im_end|>"},
        {"eos_token": "<|im_start|>"},
        "<|im_end|>",
    ),
    "none": ({"eos_token": None}, {}, None),
    "a word that is no token": ({"eos_token": "<end>"}, {}, "<|im_start|>"),
    "the configuration": ({}, {}, "<|im_start|>"),
}


@pytest.mark.parametrize(("settings", "names", "told"), ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("kind", ["eos", "bos"])
def test_templates_get_the_tokens_that_the_model_names(
    kind: str, settings: dict[str, Any], names: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    """A template writes the end of earlier turns with it: the smallest of all end tokens is one
    that the model has not seen there. The model's own end token ends answers, too."""
    if kind == "bos":
        settings, names = ({f"bos_{k[4:]}": v for k, v in one.items()} for one in (settings, names))
    source = with_settings(tmp_path / "m", **settings)
    (source / "special_tokens_map.json").write_text(json.dumps(names))
    path = source / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, f"{kind}_token_id": [TOKENS.index("<|im_start|>")]}))

    card = prepare("tiny", source, tmp_path)
    found = card.eos_token_id if kind == "eos" else card.bos_token_id

    assert found == (None if told is None else TOKENS.index(told))
    assert kind == "bos" or found is None or found in card.stop_token_ids


def test_a_card_of_an_older_version_is_made_again_with_its_digest(tmp_path: Path) -> None:
    """What was cached before is found after an update that reads more of the same files."""
    card = prepare("tiny", write_folder(tmp_path / "m"), tmp_path)
    path = Path(card.folder) / "model_card.json"
    fields = json.loads(path.read_text())
    del fields["eos_token_id"]
    path.write_text(json.dumps({**fields, "version": card.version - 1}))

    assert prepare("tiny", tmp_path / "m", tmp_path) == card


NAMED = [{"name": "default", "template": "MINE"}, {"name": "tool_use", "template": "TOOLS"}]
PLACES: dict[str, tuple[dict[str, Any], dict[str, str], str, int]] = {
    "settings": ({"chat_template": "MINE"}, {}, "MINE", 0),
    "a file": ({}, {"chat_template.jinja": "MINE"}, "MINE", 0),
    "a file with a byte order mark": ({}, {"chat_template.jinja": "\ufeffMINE"}, "MINE", 0),
    "the processor's file": ({}, {"chat_template.json": '{"chat_template": "MINE"}'}, "MINE", 0),
    "a file before settings": (
        {"chat_template": "OTHER"},
        {"chat_template.jinja": "MINE"},
        "MINE",
        0,
    ),
    "a list": ({"chat_template": NAMED}, {}, "MINE", 1),
    "a dict": ({"chat_template": {"default": "MINE", "tool_use": "TOOLS"}}, {}, "MINE", 1),
    "a list of one": ({"chat_template": NAMED[1:]}, {}, "TOOLS", 0),
    "a dict of one": ({"chat_template": {"mine": "MINE"}}, {}, "MINE", 0),
    "no default one": ({"chat_template": {"rag": "RAG", "tool_use": "TOOLS"}}, {}, "TOOLS", 1),
    "none that is known": ({"chat_template": {"a": "A", "b": "B"}}, {}, PLAIN_TEMPLATE, 1),
    "an empty one": ({"chat_template": ""}, {}, PLAIN_TEMPLATE, 1),
    "a folder": ({}, {"additional_chat_templates/tool_use.jinja": "TOOLS"}, "TOOLS", 0),
    "none": ({}, {}, PLAIN_TEMPLATE, 1),
}


@pytest.mark.parametrize(
    ("settings", "files", "template", "warnings"), PLACES.values(), ids=PLACES.keys()
)
def test_template_is_found_or_a_warning_says_what_is_used(
    settings: dict[str, Any], files: dict[str, str], template: str, warnings: int, tmp_path: Path
) -> None:
    """A model that is asked in roles and colons answers worse, and nothing else shows it."""
    source = with_settings(tmp_path / "m", **settings)
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)

    card = prepare("tiny", source, tmp_path)

    assert card.template_path.read_text() == template
    assert len(card.warnings) == warnings
    assert load_card(Path(card.folder)).warnings == card.warnings


def replace_rules(count: int) -> dict[str, Any]:
    """Return a normalizer that makes each of some letters a thousand, several times over."""
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    return {"type": "Sequence", "normalizers": [rule] * count}


TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "replacements of replacements": ({"normalizer": replace_rules(3)}, "1e.09 times longer"),
    "one long replacement": ({"normalizer": replace_rules(1)}, "times longer"),
    "a long insertion": (
        {
            "normalizer": {
                "type": "Replace",
                "pattern": {"Regex": "x*"},
                "content": "y" * 1_000_000,
            }
        },
        "times longer",
    ),
    "a long beginning": (
        {"normalizer": {"type": "Prepend", "prepend": "y" * 1_000_000}},
        "times longer",
    ),
}


@pytest.mark.parametrize(("change", "told"), TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_tokenizer_that_blows_texts_up_is_refused(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """Each client's text would fill the gateway's memory, and the first probe would already."""
    path = write_folder(tmp_path / "m") / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    error = refusal(path.parent, tmp_path)

    assert error.code == "corrupt"
    assert re.search(told, error.message)


@pytest.mark.parametrize("fault", ["a panic", "one id for two", "an id behind all", "dropout"])
def test_tokenizer_that_panics_or_tokenizes_wrongly_is_refused(fault: str, tmp_path: Path) -> None:
    """A panic of the library is no Exception and ended the server; ids would be of other words."""
    path = write_folder(tmp_path / "m") / "tokenizer.json"
    document = json.loads(path.read_text())
    vocab = document["model"]["vocab"]
    first, second = list(vocab)[:2]
    if fault == "a panic":
        document["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AA=="}
    elif fault == "dropout":
        document["model"]["dropout"] = 0.5
    else:
        vocab[first] = vocab[second] if fault == "one id for two" else len(vocab) + 1_000
    path.write_text(json.dumps(document))

    assert refusal(path.parent, tmp_path).code == "corrupt"


@pytest.mark.parametrize("is_gguf", [False, True], ids=["folder", "gguf"])
def test_bpe_without_merges_is_refused(is_gguf: bool, tmp_path: Path) -> None:
    """Every word would be read as single bytes, which no model was trained on."""
    path = write_folder(tmp_path / "m") / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["merges"] = []
    path.write_text(json.dumps(document))
    source = path.parent
    if is_gguf:
        source = write_gguf(tmp_path / "m.gguf")
        data = source.read_bytes()
        source.write_bytes(data.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez"))

    assert "without merges" in refusal(source, tmp_path).message


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_pipe_in_place_of_a_file_is_refused(file: str, tmp_path: Path) -> None:
    """Its reader would wait for ever, and the start with it."""
    path = write_folder(tmp_path / "m") / file
    path.unlink()
    os.mkfifo(path)

    assert refusal(path.parent, tmp_path).message == f"{path} is not a regular file."


def test_file_larger_than_any_tokenizer_is_refused_unread(tmp_path: Path) -> None:
    """A sparse file takes no disk and fills memory."""
    path = write_folder(tmp_path / "m") / "tokenizer_config.json"
    os.truncate(path, 2**40)

    with pytest.raises(ModelError, match="expected at most"):
        read_folder(path.parent)


def test_template_is_checked_before_a_folder_is_made(tmp_path: Path) -> None:
    """Its error is one line, also where the template engine writes more."""

    def check(source: str) -> None:
        raise ValueError("no such tag\n  line 3")

    with pytest.raises(ModelError, match=r"no such tag line 3$"):
        prepare("tiny", write_folder(tmp_path / "m"), tmp_path, check)

    assert not list((tmp_path / "prepared").glob("tiny*"))


def test_sliding_window_limits_context(tmp_path: Path) -> None:
    """Sliding attention equals full attention inside the window, not beyond."""
    source = folder_with(tmp_path / "m", model_type="mistral", sliding_window=128)

    assert prepare("tiny", source, tmp_path).config.context == 128
