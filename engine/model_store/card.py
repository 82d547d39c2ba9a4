"""The model card: the description of a prepared model, without its weights.

A prepared folder holds `model_card.json`, `tokenizer.json` and `chat_template.jinja`. The gateway
reads these and never the weights; the engine loads the weights that the card points to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from engine.errors import ModelError
from engine.model_store.architecture import Architecture, Quantisation

CARD_VERSION = 4
"""Version of the card's fields; a card of another version is made anew."""


class ModelCard(Struct, frozen=True, forbid_unknown_fields=True):
    """A prepared model.

    `digest` covers the model's files, tokenizer and template.
    """

    name: str
    digest: str
    config: Architecture
    source: str
    """The GGUF file or Hugging Face folder."""
    folder: str
    """The prepared folder."""
    template_digest: str
    stop_token_ids: tuple[int, ...]
    """Every token that ends an output."""
    special_token_ids: tuple[int, ...]
    """Tokens that are never text."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    """The one that templates write."""
    add_bos: bool = False
    warnings: tuple[str, ...] = ()
    """What is doubtful in the model's files, each in a sentence for operators."""
    quantisation: Quantisation | None = None
    """How a folder's weights are packed."""
    version: int = CARD_VERSION

    @property
    def tokenizer_path(self) -> Path:
        """Path of the prepared tokenizer.json."""
        return Path(self.folder) / "tokenizer.json"

    @property
    def template_path(self) -> Path:
        """Path of the prepared chat template."""
        return Path(self.folder) / "chat_template.jinja"


class VersionedCard(Protocol):
    """The part of a card of any kind that tells whether it can be read."""

    @property
    def version(self) -> int: ...


CardT = TypeVar("CardT", bound=VersionedCard)


def load_card(folder: Path) -> ModelCard:
    """Read the card of a prepared folder. Raises ModelError: not_found, corrupt or unsupported."""
    card = read_card(folder / "model_card.json", ModelCard, CARD_VERSION)
    return msgspec.structs.replace(card, folder=str(folder))  # the data directory may have moved


def read_card(path: Path, kind: type[CardT], version: int) -> CardT:
    """Read a card of some kind. Raises ModelError: not_found, corrupt or unsupported."""
    try:
        card = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelError("not_found", f"{path} cannot be read: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise ModelError("corrupt", f"{path} is not a model's card: {error}.") from error
    if card.version != version:
        raise ModelError("unsupported", f"{path} has version {card.version}; expected {version}")
    return card
