"""The card of an encoder, and its preparation from a folder or from a zip file of that folder.

A prepared folder holds `encoder_card.json`, `tokenizer.json` and, of a zip file, the weights. It
imports no torch and reads no weights: the gateway reads cards too. Commands call `prepare_encoder`
before a server starts.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from tokenizers import Tokenizer

from engine.errors import ModelError
from engine.model_store.card import read_card
from engine.model_store.prepare import content_digest, prepared_folder, write_atomically

ENCODER_CARD_VERSION = 1
"""Version of the card's fields; a card of another version is made anew."""

WEIGHTS = "model.safetensors"
CARD_FILE = "encoder_card.json"
TEXT_BYTES_MAX = 64 * 2**20
"""Largest JSON file of a model, in bytes."""
WEIGHT_BYTES_MAX = 4 * 2**30
"""Largest file of weights, in bytes."""
CHUNK_BYTES = 1 << 20
"""Bytes read from a file at once."""
TOKENS_MIN = 8
"""Fewest tokens of a text that a model must take."""

Size = Annotated[int, Meta(ge=1, le=2**20)]


class BertShape(Struct, frozen=True, kw_only=True):
    """The fields of a BERT's config.json; its names are Hugging Face's."""

    hidden_size: Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1_000)]
    num_attention_heads: Size
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    type_vocab_size: Size = 2
    layer_norm_eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-12


class EncoderCard(Struct, frozen=True, forbid_unknown_fields=True):
    """A prepared encoder.

    `digest` covers config, tokenizer and weights.
    """

    name: str
    digest: str
    shape: BertShape
    folder: str
    weights: str
    """The path of the safetensors file."""
    tokens_max: int
    """Of one text, with the two tokens `first_token_id` and `last_token_id` around it."""
    first_token_id: int
    last_token_id: int
    pooling: Literal["mean", "first"] = "mean"
    """The mean of all tokens, or the first one."""
    cuts: tuple[int, ...] = ()
    """To how many dimensions a vector may be cut; empty for a model that was not trained for it."""
    version: int = ENCODER_CARD_VERSION

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        return self.shape.hidden_size

    @property
    def tokenizer_path(self) -> Path:
        """Path of the prepared tokenizer.json."""
        return Path(self.folder) / "tokenizer.json"


Files = Callable[[str], bytes | None]
"""Returns the content of a small file of a model by name; None without that file."""


def load_encoder_card(folder: Path) -> EncoderCard:
    """Read the card of a prepared folder. Raises ModelError: not_found, corrupt or unsupported."""
    return read_card(folder / CARD_FILE, EncoderCard, ENCODER_CARD_VERSION)


def prepare_encoder(name: str, source: Path, models_dir: Path) -> EncoderCard:
    """Return the card of an encoder's prepared folder, which is made if missing.

    `source`: a Hugging Face folder, or a zip file of one. The first call reads every byte of the
    model for its digest, and unpacks a zip file (91 MB: 1 s); later ones, also where the model has
    another path, read its small files. Writes under `models_dir`/prepared. Raises ModelError:
    not_found, corrupt, unsupported or storage.
    """
    try:
        if source.is_dir():
            return _prepare(name, source, models_dir, _folder_files(source))
        if not source.is_file():
            raise ModelError("not_found", f"{source} does not exist.")
        with zipfile.ZipFile(source) as archive:
            return _prepare(name, source, models_dir, _zip_files(archive), archive)
    except zipfile.BadZipFile as error:
        raise ModelError(
            "unsupported", f"{source} is neither a folder nor a zip file of an encoder."
        ) from error
    except OSError as error:
        raise ModelError(
            "storage", f"{error.filename or models_dir}: {error.strerror or error}."
        ) from error


def _prepare(
    name: str,
    source: Path,
    models_dir: Path,
    files: Files,
    archive: zipfile.ZipFile | None = None,
) -> EncoderCard:
    digest = content_digest(source, models_dir)
    folder = prepared_folder(name, digest, models_dir)
    weights = folder / WEIGHTS if archive else source / WEIGHTS
    card = read_encoder(name, source, files, digest)
    card = msgspec.structs.replace(card, folder=str(folder), weights=str(weights))
    if weights.is_file() and (found := _found_card(folder)) is not None:
        if found == card:
            return card
        found = msgspec.structs.replace(found, folder=card.folder, weights=card.weights)
        if found == card:
            _write_card(card)  # the same model at another path
            return card
    folder.mkdir(parents=True, exist_ok=True)
    if archive is not None:
        _unpack_weights(archive, source, weights)
    elif not weights.is_file():
        raise ModelError("not_found", f"{source} has no {WEIGHTS}.")
    tokenizer = files("tokenizer.json")
    assert tokenizer is not None, "read_encoder has read it"
    write_atomically(card.tokenizer_path, _plain_tokenizer(tokenizer, source))
    _write_card(card)  # last: a folder with a card is complete
    return card


def _found_card(folder: Path) -> EncoderCard | None:
    """Return a folder's card; None if it is not prepared yet, or by another version."""
    try:
        return load_encoder_card(folder)
    except ModelError:
        return None


def _write_card(card: EncoderCard) -> None:
    path = Path(card.folder) / CARD_FILE
    write_atomically(path, msgspec.json.format(msgspec.json.encode(card)))


def read_encoder(name: str, source: Path, files: Files, digest: str) -> EncoderCard:
    """Return an encoder's card from its files, without folder and weights.

    Raises ModelError: not_found, corrupt or unsupported.
    """
    config = _json(files, "config.json", source)
    kind = config.get("model_type")
    if kind != "bert":
        raise ModelError(
            "unsupported", f"{source}: model_type {kind!r} is no encoder; expected 'bert'"
        )
    for field, expected in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if config.get(field, expected) != expected:
            raise ModelError(
                "unsupported", f"{source}: {field} is {config[field]!r}; expected {expected!r}"
            )
    try:
        shape = msgspec.convert(config, BertShape)
    except msgspec.ValidationError as error:
        raise ModelError("corrupt", f"{source}: config.json: {error}.") from error
    if shape.hidden_size % shape.num_attention_heads:
        raise ModelError(
            "corrupt",
            f"{source}: hidden_size {shape.hidden_size} is no multiple of"
            f" num_attention_heads {shape.num_attention_heads}",
        )
    ends = _ends(_json(files, "tokenizer.json", source), shape, source)
    return EncoderCard(
        name=name,
        digest=digest,
        shape=shape,
        folder="",
        weights="",
        tokens_max=_tokens_max(files, shape, source),
        first_token_id=ends[0],
        last_token_id=ends[1],
        pooling=_pooling(files, source),
        cuts=_cuts(config, shape),
    )


def _tokens_max(files: Files, shape: BertShape, source: Path) -> int:
    """Return the limit of sentence-transformers, else the model's positions."""
    found = _json(files, "sentence_bert_config.json", source, optional=True).get("max_seq_length")
    most = shape.max_position_embeddings
    tokens_max = min(found, most) if isinstance(found, int) else most
    if tokens_max < TOKENS_MIN:
        raise ModelError(
            "corrupt", f"{source}: texts of {tokens_max} tokens; expected {TOKENS_MIN} or more"
        )
    return tokens_max


def _pooling(files: Files, source: Path) -> Literal["mean", "first"]:
    config = _json(files, "1_Pooling/config.json", source, optional=True)
    modes = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if modes in ([], ["pooling_mode_mean_tokens"]):
        return "mean"
    if modes == ["pooling_mode_cls_token"]:
        return "first"
    raise ModelError(
        "unsupported", f"{source}: pooling by {', '.join(modes)}; expected the mean or [CLS]"
    )


def _cuts(config: dict[str, Any], shape: BertShape) -> tuple[int, ...]:
    """Return the dimensions that a model trained with Matryoshka losses names."""
    found = config.get("matryoshka_dimensions")
    cuts = found if isinstance(found, list) else []
    return tuple(sorted(n for n in cuts if isinstance(n, int) and 0 < n < shape.hidden_size))


def _ends(tokenizer: dict[str, Any], shape: BertShape, source: Path) -> tuple[int, int]:
    """Return the ids of [CLS] and [SEP], which are put around each text."""
    try:
        vocab = tokenizer["model"]["vocab"]
        ids = int(vocab["[CLS]"]), int(vocab["[SEP]"])
        most = max(map(int, vocab.values()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            "unsupported", f"{source}: tokenizer.json has no [CLS] or [SEP]; expected WordPiece"
        ) from error
    if most >= shape.vocab_size or min(ids) < 0:
        raise ModelError(
            "corrupt", f"{source}: token id {most} has no embedding; there are {shape.vocab_size}"
        )
    return ids


def _plain_tokenizer(data: bytes, source: Path) -> bytes:
    """Return the tokenizer without padding, truncation and special tokens: a client's text is text,
    even if it spells a special token. Raises ModelError if it is damaged."""
    settings: dict[str, Any] = json.loads(data)
    settings |= {"post_processor": None, "truncation": None, "padding": None}
    try:
        added = settings.get("added_tokens") or []
        settings["added_tokens"] = [one for one in added if not one.get("special")]
        text = json.dumps(settings)
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError("corrupt", f"{source}: invalid tokenizer: {error}") from error
    return text.encode()


# --- files ---------------------------------------------------------------------------------------


def _folder_files(folder: Path) -> Files:
    def read(name: str) -> bytes | None:
        path = folder / name
        if not path.is_file() or path.stat().st_size > TEXT_BYTES_MAX:
            return None
        return path.read_bytes()

    return read


def _zip_files(archive: zipfile.ZipFile) -> Files:
    def read(name: str) -> bytes | None:
        try:
            with archive.open(name) as file:  # the announced size may be wrong
                data = file.read(TEXT_BYTES_MAX + 1)
        except KeyError:
            return None
        return data if len(data) <= TEXT_BYTES_MAX else None

    return read


def _json(files: Files, name: str, source: Path, *, optional: bool = False) -> dict[str, Any]:
    data = files(name)
    if data is None:
        if optional:
            return {}
        raise ModelError("not_found", f"{source} has no {name} of at most {TEXT_BYTES_MAX} bytes.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError("corrupt", f"{source}: {name} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError("corrupt", f"{source}: {name} is not a JSON object.")
    return value


def _unpack_weights(archive: zipfile.ZipFile, source: Path, target: Path) -> None:
    """Write the weights of a zip file; a kill leaves no partial file under their name."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as scratch:
        partial = Path(scratch) / WEIGHTS
        try:
            with archive.open(WEIGHTS) as packed, partial.open("wb") as file:
                left = WEIGHT_BYTES_MAX
                while chunk := packed.read(CHUNK_BYTES):
                    left -= len(chunk)
                    if left < 0:
                        message = f"{source}: {WEIGHTS} has more than {WEIGHT_BYTES_MAX} bytes"
                        raise ModelError("corrupt", message)
                    file.write(chunk)
        except KeyError as error:
            raise ModelError("not_found", f"{source} has no {WEIGHTS}.") from error
        shutil.move(partial, target)
