"""Prepares a model: writes a folder with tokenizer, chat template and card, once per model.

The input is a GGUF file or a Hugging Face folder. The prepared folder's name contains the digest of
the input, so a second start finds the folder, and a changed model never uses an old tokenizer, old
weights or an old cache. It knows no tensor. Commands call it before an engine starts.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from tokenizers import Tokenizer

from engine.errors import ModelError
from engine.model_store.architecture import check_architecture
from engine.model_store.card import ModelCard, load_card
from engine.model_store.gguf import read_gguf
from engine.model_store.gguf_header import gguf_shards
from engine.model_store.huggingface import read_folder
from engine.model_store.parts import ModelParts

CHUNK_BYTES = 1 << 20
"""Bytes hashed at once."""

GROWTH_MAX = 64
"""How many times longer a tokenizer's rules may make a text before they split it."""
IDENTITY_VERSION = 3
"""Changes when equal files are tokenized or computed otherwise: what was cached before is then not
found."""
_PANIC = "PanicException"
"""The error of a library written in Rust that panics: a BaseException, and no Exception."""
_NO_END = "the model names no end token, so that answers end at their length limit alone"
_DIGESTED_SUFFIXES = (".json", ".jinja", ".safetensors")
"""Files of a folder that the digest covers."""


def prepare(
    name: str,
    source: Path,
    models_dir: Path,
    check_template: Callable[[str], None] = lambda source: None,
) -> ModelCard:
    """Return the card of a model's prepared folder, which is made if missing.

    `check_template` is called before a folder is made; its ValueError says what is wrong.

    The first call reads every byte of the model for its digest (98 MB: 0.1 s) and makes the
    tokenizer (0.5 s; 5 s for 262,144 tokens); later calls read a small card, also where the model
    has another path. Writes under `models_dir`/prepared. Raises ModelError: not_found, corrupt,
    unsupported or storage.
    """
    try:
        return _prepare(name, source, models_dir, check_template)
    except OSError as error:
        raise ModelError(
            "storage", f"{error.filename or models_dir}: {error.strerror or error}."
        ) from error


def _prepare(
    name: str, source: Path, models_dir: Path, check_template: Callable[[str], None]
) -> ModelCard:
    if not source.exists():
        raise ModelError("not_found", f"{source} does not exist.")
    _check_files(source)
    digest = content_digest(source, models_dir)
    folder = prepared_folder(name, digest, models_dir)
    if (folder / "model_card.json").exists():
        try:
            found = load_card(folder)
        except ModelError:
            found = None  # of another version, or damaged: make it again
        if found is not None and found.name == name:
            return found if found.source == str(source) else _moved(found, source, folder)
    parts = read_model(source, check_template)
    folder.mkdir(parents=True, exist_ok=True)
    identity = f"{digest}|{IDENTITY_VERSION}|{parts.tokenizer}|{parts.template}"
    card = ModelCard(
        name=name,
        digest=xxhash.xxh3_128_hexdigest(identity.encode()),
        config=parts.config,
        source=str(source),
        folder=str(folder),
        template_digest=xxhash.xxh3_128_hexdigest(parts.template.encode()),
        stop_token_ids=parts.stop_token_ids,
        special_token_ids=parts.special_token_ids,
        bos_token_id=parts.bos_token_id,
        eos_token_id=parts.eos_token_id,
        add_bos=parts.add_bos,
        warnings=parts.warnings if parts.stop_token_ids else (*parts.warnings, _NO_END),
        quantisation=parts.quantisation,
    )
    write_atomically(folder / "tokenizer.json", parts.tokenizer.encode())
    write_atomically(folder / "chat_template.jinja", parts.template.encode())
    _write_card(card, folder)  # last: a folder with a card is complete
    return card


def read_model(source: Path, check_template: Callable[[str], None]) -> ModelParts:
    """Return what a model's files say, but its weights; see `prepare`. Writes nothing; costs making
    the tokenizer. Raises ModelError: corrupt or unsupported.
    """
    _check_files(source)
    parts = read_gguf(source) if source.is_file() else read_folder(source)
    _check(parts, source)
    try:
        check_template(parts.template)
    except ValueError as error:
        raise ModelError("unsupported", f"{source}: {_one_line(error)}") from error
    return parts


def _moved(card: ModelCard, source: Path, folder: Path) -> ModelCard:
    """Return the card of the same model at another path; engines load the weights from there."""
    card = msgspec.structs.replace(card, source=str(source))
    _write_card(card, folder)
    return card


def _write_card(card: ModelCard, folder: Path) -> None:
    write_atomically(folder / "model_card.json", msgspec.json.format(msgspec.json.encode(card)))


def _one_line(error: BaseException) -> str:
    """Return the message of a library's error in one line."""
    return " ".join(str(error).split())[:500]


def _check(parts: ModelParts, source: Path) -> None:
    """Refuse a damaged model here, not in the process that first uses its tokenizer."""
    place = source if source.is_file() else source / "config.json"
    try:
        check_architecture(parts.config, parts.size_names)
    except ModelError as error:
        raise ModelError(error.code, f"{place}: {error.message}") from error
    if problem := _tokenizer_problem(parts.tokenizer):
        raise ModelError("corrupt", f"{source}: invalid tokenizer: {problem}")
    try:
        words = Tokenizer.from_str(parts.tokenizer).get_vocab(with_added_tokens=True)
    except BaseException as error:  # the library raises nothing narrower, and panics
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        told = f"{source}: invalid tokenizer: {_one_line(error)}"
        raise ModelError("corrupt", told) from error
    vocab = parts.config.vocab
    if (tokens := max(words.values(), default=-1) + 1) > vocab:
        message = f"{source}: the tokenizer has {tokens} tokens; expected at most {vocab}"
        raise ModelError("corrupt", message)
    named = {*parts.stop_token_ids, *parts.special_token_ids}
    named |= {one for one in (parts.bos_token_id, parts.eos_token_id) if one is not None}
    unknown = sorted(token for token in named if not 0 <= token < vocab)
    if unknown:
        raise ModelError(
            "corrupt", f"{source}: token id {unknown[0]} is outside the vocabulary of {vocab}"
        )


def _check_files(source: Path) -> None:
    """Refuse what would block its reader, such as a pipe, or never end, such as a device."""
    found = source.iterdir() if source.is_dir() else gguf_shards(source)
    for path in found:
        is_read = not source.is_dir() or path.suffix in _DIGESTED_SUFFIXES
        if is_read and not path.is_file() and not path.is_dir():
            raise ModelError("corrupt", f"{path} is not a regular file.")


def _tokenizer_problem(tokenizer: str) -> str:
    """Return why a tokenizer.json would tokenize, and wrongly or without bounds; "" if it does
    not. What the library refuses is left to it."""
    try:
        document = json.loads(tokenizer)
    except (ValueError, RecursionError) as error:
        return str(error)
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        return "it has no model"
    vocab = model.get("vocab")
    if model.get("type") == "BPE" and isinstance(vocab, dict) and not model.get("merges"):
        added = {one.get("content") for one in document.get("added_tokens") or ()}
        if word := next((w for w in vocab if len(w) > 1 and w not in added and w[:3] != "<0x"), ""):
            return (
                f"BPE without merges, which never makes the token {word[:80]!r} of its vocabulary"
            )
    if model.get("dropout"):
        return "BPE with dropout, which splits a text otherwise each time"
    if isinstance(vocab, dict) and len(set(map(str, vocab.values()))) < len(vocab):
        return "two tokens of its vocabulary have one id"
    growth, rest = 1.0, [document.get("normalizer")]
    while rest:
        rule = rest.pop()
        if isinstance(rule, dict):
            growth *= _growth(rule)
            inner = rule.get("normalizers")
            rest += inner if isinstance(inner, list) else ()
    if growth > GROWTH_MAX:
        return (
            f"its normalizer makes texts {growth:.3g} times longer; expected {GROWTH_MAX} at most"
        )
    return ""


def _growth(rule: dict[str, Any]) -> float:
    """Return how many times longer a rule of a normalizer makes a text at most, about."""
    match rule.get("type"):
        case "Replace":
            pattern = rule.get("pattern")
            text = str(pattern.get("String") or "") if isinstance(pattern, dict) else ""
            size = len(str(rule.get("content", "")).encode(errors="replace"))
            return max(1.0, size / len(text.encode(errors="replace")) if text else 1 + size)
        case "Prepend":
            return max(1.0, len(str(rule.get("prepend", ""))) / 8)
        case "Precompiled":
            try:
                data = base64.b64decode(str(rule.get("precompiled_charsmap", "")))
            except ValueError:
                return 1.0
            words = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
            return max(1.0, max(map(len, words)) / 3)
        case "NFKC" | "NFKD":
            return 11.0
        case "NFD" | "BertNormalizer":
            return 3.0
        case _:
            return 1.0


def prepared_folder(name: str, digest: str, models_dir: Path) -> Path:
    """Return where a model of this digest is prepared: inside `models_dir` by any name."""
    label = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[-80:].lstrip(".")
    return models_dir / "prepared" / f"{label}-{digest[:16]}"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash it is complete or absent."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


class _DigestNote(msgspec.Struct, frozen=True):
    """A cached digest, with name, size and modification time of each file that it covers."""

    files: list[tuple[str, int, int]]
    digest: str


def content_digest(source: Path, models_dir: Path) -> str:
    """Return the digest of a model's file, or of a folder's configuration and weights.

    Reads every byte (98 MB: 0.1 s); a note under `models_dir` keeps the digest while each file's
    size and time stay the same. Raises OSError.
    """
    if source.is_file():
        paths = list(gguf_shards(source))
    else:
        paths = sorted(
            p for p in source.iterdir() if p.is_file() and p.suffix in _DIGESTED_SUFFIXES
        )
    stats = [(path, path.stat()) for path in paths]
    files = [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    notes = models_dir / "prepared" / ".digests"
    note = notes / f"{xxhash.xxh3_64_hexdigest(str(source.resolve()).encode())}.json"
    try:
        known = msgspec.json.decode(note.read_bytes(), type=_DigestNote)
        if known.files == files:
            return known.digest
    except (OSError, msgspec.MsgspecError):
        pass  # no note, or a damaged one: compute the digest
    content = xxhash.xxh3_128()
    for path, stat in stats:
        # A single file's name is left out, so that two copies of it are one model.
        content.update(f"{path.name if len(stats) > 1 else ''}|{stat.st_size}|".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                content.update(chunk)
    notes.mkdir(parents=True, exist_ok=True)
    write_atomically(note, msgspec.json.encode(_DigestNote(files, content.hexdigest())))
    return content.hexdigest()
