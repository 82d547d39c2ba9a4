"""What is read of a model before it is prepared, whatever it was read from."""

from __future__ import annotations

from msgspec import Struct

from engine.errors import ModelError
from engine.model_store.card import ModelConfig

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)
"""For models without a chat template: roles and colons, as base models see them in the wild."""

END_WORDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>")
"""Special tokens that end an answer wherever they exist."""


class ModelParts(Struct, frozen=True):
    """`tokenizer` is the text of a tokenizer.json, `template` of a Jinja chat template."""

    config: ModelConfig
    tokenizer: str
    template: str
    stop_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool


def unsupported_scaling(kind: object) -> ModelError:
    """The refusal of a way to stretch rotary frequencies that we do not compute."""
    return ModelError("unsupported", f"Rotary scaling {kind!r}; linear and llama3 are supported.")
