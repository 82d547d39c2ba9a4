"""The files of a model, for the commands that serve one: found, fetched and prepared.

A draft model's too, whose tokenizer is compared with that of the model it drafts for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_store import CATALOGUE, ModelCard, prepare, pull, read_model, resolve
from engine.model_store.gguf_header import shard_stem
from gateway.config import ConfigError
from gateway.levels.model_cost import find_card

Say = Callable[[str], None]
Progress = Callable[[int, int], None]

SAMPLES = (
    "The quick brown fox jumps over 13 lazy dogs; isn't it 2,048.50 o'clock?",
    "def f(x: int) -> None:\n    return [x ** 2 for _ in range(10)]  # \t\ttabs\r\n\n\n",
    '{"name": "Zoë", "prix": 3.14e-5, "ok": true, "list": [null, -1]}',
    "Größe, naïve, Ελληνικά, русский, العربية, हिन्दी, 日本語と中文, 한국어, 😀👩‍👩‍👧",
    "   leading and trailing   ",
    "<|im_start|>user\n</s><s>[INST] <think> ﬁne e\u0301 \u00a0\u200b",
)
"""Texts that two equal tokenizers cut into the same tokens, and most others do not."""


def prepared_model(name: str, models: Path, say: Say, progress: Progress) -> ModelCard:
    """Resolve a model, fetch a missing built-in one, and prepare it. Raises ModelError, and
    ConfigError for an embedding model."""
    if name in CATALOGUE and CATALOGUE[name].is_encoder:
        message = (
            f"{name} is an embedding model; expected a chat model, or this one as embeddings.model"
        )
        raise ConfigError(message)
    source = found_model(name, models, say, progress)
    return prepare(short_name(name, source), source, models, _check_template)


def check_model(name: str, models: Path) -> Path:
    """Return the file or folder of a model that is here. One that is not prepared is read, as far
    as a start would before it loads weights: seconds. Raises ModelError."""
    source = resolve(name, models)
    if find_card(name, models) is None:
        read_model(source, _check_template)
    return source


def prepare_draft_model(
    engine: EngineConfig, card: ModelCard, models: Path, say: Say, progress: Progress
) -> None:
    """Prepare the draft model of a model, if its engine has one. Raises ModelError, `unsupported`
    for one of other tokens, and ConfigError."""
    if not engine.drafting_model:
        return
    draft = prepared_model(engine.drafting_model, models, say, progress)
    if difference := tokenizer_difference(card, draft):
        raise ModelError(
            "unsupported",
            f"engine.draft_model: {engine.draft_model!r} does not have the tokens of {card.name}:"
            f" {difference}; expected a model with the same tokenizer",
        )


def tokenizer_difference(card: ModelCard, draft: ModelCard) -> str:
    """Return how a draft model's tokenizer differs from that of its model, "" if it gives the same
    ids. It may lack the tokens behind its last one. Seconds, unless the files are equal."""
    files = card.tokenizer_path.read_text(), draft.tokenizer_path.read_text()
    if files[0] == files[1]:
        return ""
    wanted, found = (Tokenizer.from_str(one) for one in files)
    words, own = ({i: word for word, i in one.get_vocab().items()} for one in (wanted, found))
    if unknown := sorted(own.keys() - words.keys()):
        return f"token {unknown[0]} is {own[unknown[0]]!r}, and in {card.name} there is none"
    end = max(own, default=-1) + 1
    for number in range(end):
        if words.get(number) != own.get(number):
            return f"token {number} is {own.get(number)!r}, in {card.name} {words.get(number)!r}"
    for text in SAMPLES:
        ids, others = (one.encode(text, add_special_tokens=False).ids for one in (wanted, found))
        if ids != others and max(ids) < end:
            place = next(
                i for i, pair in enumerate(zip(ids, others, strict=False)) if len({*pair}) > 1
            )
            return (
                f"{text!r} has token {others[place]} at place {place}, in {card.name} {ids[place]}"
            )
    return ""


def with_draft_folder(engine: EngineConfig, models: Path) -> EngineConfig:
    """Return an engine's settings with the folder of the prepared draft model in place of its name.
    Raises ModelError if it is not prepared."""
    if not engine.drafting_model:
        return engine
    card = find_card(engine.drafting_model, models)
    if card is None:
        raise ModelError("not_found", f"engine.draft_model: {engine.draft_model} is not prepared")
    return replace(engine, draft_model=card.folder)


def _check_template(source: str) -> None:
    """Compile a chat template. Raises ValueError."""
    from gateway.prompt.template import ChatTemplate  # for the first start of a model alone

    ChatTemplate(source)


def short_name(name: str, source: Path) -> str:
    """Return the name of a model by that of its source."""
    if name in CATALOGUE:
        return name
    return shard_stem(source) if source.is_file() else source.name


def found_model(name: str, models: Path, say: Say, progress: Progress) -> Path:
    """Return the file or folder of a model; fetches a missing built-in one."""
    try:
        return resolve(name, models)
    except ModelError as error:
        if error.code != "not_found" or name not in CATALOGUE:
            raise
        say(f"fetching {name}")
        return pull(name, models, progress)
