"""From a model's files to a prepared folder: tokenizer, chat template and card, made once.

Read from a GGUF's metadata or a Hugging Face folder. The prepared folder is named after the digest
of what it was made from, so a second start finds it, and a changed model never meets an old
tokenizer, old weights or an old cache. It knows no tensor; commands call it before an engine
starts.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import xxhash
from tokenizers import Tokenizer

from engine.errors import ModelError
from engine.model_store.card import CARD_VERSION, ModelCard, check_config, load_card
from engine.model_store.gguf import read_gguf
from engine.model_store.huggingface import read_folder
from engine.model_store.parts import ModelParts

PIECE = 1 << 20
_WEIGHED = (".json", ".jinja", ".safetensors")
"""Files of a folder that make the model what it is."""


def prepare(name: str, source: Path, models_dir: Path) -> ModelCard:
    """Make, or find, the prepared folder of a model.

    The first time reads every byte of the model once, for its digest (98 MB: 0.1 s), and makes the
    tokenizer (0.5 s); later reads a small card. Writes under `models_dir`/prepared. Raises
    ModelError: not_found, corrupt, unsupported or storage.
    """
    try:
        return _prepare(name, source, models_dir)
    except OSError as error:
        raise ModelError(
            "storage", f"{error.filename or models_dir}: {error.strerror or error}."
        ) from error


def _prepare(name: str, source: Path, models_dir: Path) -> ModelCard:
    if not source.exists():
        raise ModelError("not_found", f"{source} does not exist.")
    digest = _digest(source, models_dir / "prepared" / ".digests")
    label = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in name)[-80:]
    folder = models_dir / "prepared" / f"{label.lstrip('.')}-{digest[:16]}"
    if (folder / "model_card.json").exists():
        try:
            found = load_card(folder)
        except ModelError:
            found = None  # from another version, or damaged: make it again
        if found is not None and found.source == str(source) and found.name == name:
            return found
    parts = read_gguf(source) if source.is_file() else read_folder(source)
    _check(parts, source)
    folder.mkdir(parents=True, exist_ok=True)
    identity = f"{digest}|{CARD_VERSION}|{parts.tokenizer}|{parts.template}"
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
        add_bos=parts.add_bos,
    )
    write_whole(folder / "tokenizer.json", parts.tokenizer.encode())
    write_whole(folder / "chat_template.jinja", parts.template.encode())
    # Last: a folder with a card has everything.
    write_whole(folder / "model_card.json", msgspec.json.format(msgspec.json.encode(card)))
    return card


def _check(parts: ModelParts, source: Path) -> None:
    """A damaged model is refused here, not by the process that would first use its tokenizer."""
    check_config(parts.config)
    try:
        words = Tokenizer.from_str(parts.tokenizer).get_vocab_size(with_added_tokens=True)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError("corrupt", f"{source}: its tokenizer cannot be built: {error}.") from error
    vocab = parts.config.vocab
    if words > vocab:
        raise ModelError(
            "corrupt", f"{source}: {words} tokens, but embeddings for no more than {vocab}."
        )
    named = {*parts.stop_token_ids, *parts.special_token_ids}
    if parts.bos_token_id is not None:
        named.add(parts.bos_token_id)
    strange = sorted(token for token in named if not 0 <= token < vocab)
    if strange:
        raise ModelError("corrupt", f"{source}: token {strange[0]} is not among {vocab} tokens.")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, whatever happens meanwhile."""
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


class _Remembered(msgspec.Struct, frozen=True):
    """A digest, and the sizes and times of the files it is the digest of."""

    files: list[tuple[str, int, int]]
    digest: str


def _digest(source: Path, remembered: Path) -> str:
    """Digest of a model's content, read once: while size and time of each file stay, it stays."""
    if source.is_file():
        paths = [source]
    else:
        paths = sorted(p for p in source.iterdir() if p.is_file() and p.suffix in _WEIGHED)
    facts = [(path, path.stat()) for path in paths]
    files = [(path.name, fact.st_size, fact.st_mtime_ns) for path, fact in facts]
    note = remembered / f"{xxhash.xxh3_64_hexdigest(str(source.resolve()).encode())}.json"
    try:
        known = msgspec.json.decode(note.read_bytes(), type=_Remembered)
        if known.files == files:
            return known.digest
    except (OSError, msgspec.MsgspecError):
        pass  # none yet, or damaged: it is only a saving
    content = xxhash.xxh3_128()
    for path, fact in facts:
        # A file's own name is not part of a single file's content: two copies are one model.
        content.update(f"{path.name if len(facts) > 1 else ''}|{fact.st_size}|".encode())
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                content.update(piece)
    remembered.mkdir(parents=True, exist_ok=True)
    write_whole(note, msgspec.json.encode(_Remembered(files, content.hexdigest())))
    return content.hexdigest()
