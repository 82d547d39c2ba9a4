"""The parts of a model that `prepare` needs, read from a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from engine.model_store.architecture import SIZE_NAMES, Architecture, Quantisation

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)
"""Chat template of models that have none: roles and colons, which base models know from text."""

END_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>"),
    *("<end_of_turn>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>"),
)
"""Special tokens that end an output in every vocabulary that has them."""


def choose_template(named: Mapping[object, object]) -> tuple[str, tuple[str, ...]]:
    """Return the chat template of several by name, and warnings: the default one, else the only
    one, else the one for tools, else `PLAIN_TEMPLATE`."""
    found = {name: text for name, text in named.items() if isinstance(text, str) and text.strip()}
    names = ", ".join(sorted(map(str, found)))
    for chosen in ("default", *(found if len(found) == 1 else ("tool_use",))):
        if chosen in found:
            others = len(found) > 1
            told = f"of the chat templates {names} only {chosen!r} is used"
            return str(found[chosen]), (told,) if others else ()
    why = f"has the chat templates {names}, none of them the default one" if found else "has none"
    return PLAIN_TEMPLATE, (
        f"chats are written as roles and colons: the model {why} (chat_template)",
    )


class ModelParts(Struct, frozen=True):
    """What a model's files say beside its weights."""

    config: Architecture
    tokenizer: str
    """Text of a tokenizer.json."""
    template: str
    """Text of a Jinja chat template."""
    stop_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    bos_token_id: int | None
    eos_token_id: int | None
    add_bos: bool
    warnings: tuple[str, ...] = ()
    """What is doubtful, each in a sentence for operators."""
    size_names: Mapping[str, str] = SIZE_NAMES
    """What the files call sizes, by field of the architecture."""
    quantisation: Quantisation | None = None
    """How a folder's weights are packed."""
