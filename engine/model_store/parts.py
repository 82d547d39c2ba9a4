"""The parts of a model that `prepare` needs, read from a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from msgspec import Struct

from engine.model_store.architecture import Architecture

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)
"""Chat template of models that have none: roles and colons, which base models know from text."""

END_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>"),
    *("<end_of_turn>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>"),
)
"""Special tokens that end an output in every vocabulary that has them."""


class ModelParts(Struct, frozen=True):
    """`tokenizer`: text of a tokenizer.json. `template`: text of a Jinja chat template."""

    config: Architecture
    tokenizer: str
    template: str
    stop_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool
