"""A draft model is prepared beside its model, and must give the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_store import ModelCard
from gateway.engines.model_files import (
    prepare_draft_model,
    tokenizer_difference,
    with_draft_folder,
)
from tests.models import prepared, tiny_config, write_folder


def rewritten(card: ModelCard, change: Any) -> ModelCard:
    """Change a prepared tokenizer."""
    document = json.loads(card.tokenizer_path.read_text())
    change(document)
    card.tokenizer_path.write_text(json.dumps(document, indent=1))
    return card


@pytest.fixture
def cards(tmp_path: Path) -> tuple[ModelCard, ModelCard]:
    """Return two models with the same tokenizer."""
    return prepared(tmp_path / "a"), prepared(tmp_path / "b", tiny_config(layers=1), seed=2)


def test_the_same_tokens_may_be_written_otherwise(cards: tuple[ModelCard, ModelCard]) -> None:
    """A GGUF file and a folder of one family have other files, and the same ids."""
    main, draft = cards
    assert tokenizer_difference(main, draft) == ""

    rewritten(draft, lambda document: None)
    assert main.tokenizer_path.read_bytes() != draft.tokenizer_path.read_bytes()
    assert tokenizer_difference(main, draft) == ""


def test_a_smaller_vocabulary_may_be_a_beginning(cards: tuple[ModelCard, ModelCard]) -> None:
    """It lacks the model's last tokens, and has no other."""
    main, draft = cards
    words = json.loads(main.tokenizer_path.read_text())["model"]["vocab"]

    def longer(document: Any) -> None:
        document["model"]["vocab"]["<unheard>"] = 1 + max(words.values())

    rewritten(main, longer)
    assert tokenizer_difference(main, draft) == ""
    assert tokenizer_difference(draft, main) == (
        f"token {1 + max(words.values())} is '<unheard>', and in {draft.name} there is none"
    )


def swapped(card: ModelCard) -> tuple[ModelCard, int, tuple[str, str]]:
    """Let two tokens change places; return the first one's id, and both."""
    vocab = json.loads(card.tokenizer_path.read_text())["model"]["vocab"]
    (first, one), (second, other) = sorted(vocab.items(), key=lambda item: item[1])[40:42]

    def swap(document: Any) -> None:
        document["model"]["vocab"] |= {first: other, second: one}

    return rewritten(card, swap), one, (first, second)


def test_tokens_at_other_places_are_named(cards: tuple[ModelCard, ModelCard]) -> None:
    """The first of them, as both models have it."""
    main, draft = cards
    draft, number, (first, second) = swapped(draft)

    assert tokenizer_difference(main, draft) == (
        f"token {number} is {second!r}, in {main.name} {first!r}"
    )


def test_a_text_that_is_cut_otherwise_is_named(cards: tuple[ModelCard, ModelCard]) -> None:
    """The tokens are the same, and merged in another order."""
    main, draft = cards

    def fewer_merges(document: Any) -> None:
        del document["model"]["merges"][1:]

    assert " at place " in tokenizer_difference(main, rewritten(draft, fewer_merges))


def test_a_draft_model_is_prepared_and_engines_get_its_folder(tmp_path: Path) -> None:
    """By its path here; the settings name it as the operator does."""
    main = prepared(tmp_path)
    source = write_folder(tmp_path / "small", tiny_config(layers=1), seed=3)
    engine = EngineConfig(draft_model=str(source))
    with pytest.raises(ModelError, match=r"engine\.draft_model: .* is not prepared"):
        with_draft_folder(engine, tmp_path)
    prepare_draft_model(engine, main, tmp_path, print, lambda done, total: None)

    folder = Path(with_draft_folder(engine, tmp_path).draft_model)
    assert (folder / "model_card.json").is_file()
    assert folder != Path(main.folder)
    off = EngineConfig(draft_model="nothing", speculation="off")
    prepare_draft_model(off, main, tmp_path, print, lambda done, total: None)
    assert with_draft_folder(off, tmp_path) == off


def test_a_draft_model_of_other_tokens_is_refused_in_a_line(tmp_path: Path) -> None:
    """It names the setting, both models, and what differs."""
    main, _, _ = swapped(prepared(tmp_path))
    source = write_folder(tmp_path / "small", seed=3)
    engine = EngineConfig(draft_model=str(source))

    with pytest.raises(ModelError) as refused:
        prepare_draft_model(engine, main, tmp_path, print, lambda done, total: None)
    message = refused.value.message
    assert message.startswith(f"engine.draft_model: {str(source)!r} does not have the tokens of")
    assert message.endswith("; expected a model with the same tokenizer")
    assert "\n" not in message
