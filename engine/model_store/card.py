"""What is known of a prepared model without opening its weights.

A prepared folder holds `model_card.json`, `tokenizer.json` and `chat_template.jinja`; the gateway
reads these and never the weights. Everything here is plain data.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from engine.errors import ModelError

Size = Annotated[int, Meta(ge=1, le=2**31)]

CARD_VERSION = 1


class RopeScaling(Struct, frozen=True, forbid_unknown_fields=True):
    """How rotary frequencies are stretched: Llama 3's way, `linear` by `factor` alone, or by given
    `divisors`, one for each frequency."""

    kind: Literal["llama3", "linear", "divisors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    divisors: tuple[float, ...] = ()


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a decoder of the Llama family. Sizes in channels, heads or tokens.

    MHA, GQA or MQA by `kv_heads`. `tie_embeddings`: the output head is the embedding.
    """

    architecture: str
    layers: Size
    hidden: Size
    intermediate: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    vocab: Size
    context: Size
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


class ModelCard(Struct, frozen=True, forbid_unknown_fields=True):
    """A prepared model. `digest` covers the weights file and what was made of it; `source` is the
    GGUF file or the Hugging Face folder, `folder` where the prepared files lie.

    `stop_token_ids`: every token that ends an answer. `special_token_ids`: tokens that are never
    text.
    """

    name: str
    digest: str
    config: ModelConfig
    source: str
    folder: str
    template_digest: str
    stop_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    add_bos: bool = False
    version: int = CARD_VERSION

    @property
    def tokenizer_path(self) -> Path:
        return Path(self.folder) / "tokenizer.json"

    @property
    def template_path(self) -> Path:
        return Path(self.folder) / "chat_template.jinja"


def load_card(folder: Path) -> ModelCard:
    """Read a prepared folder's card. Raises ModelError if it is none, or of another version."""
    path = folder / "model_card.json"
    try:
        card = msgspec.json.decode(path.read_bytes(), type=ModelCard)
    except OSError as error:
        raise ModelError("not_found", f"{path} cannot be read: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise ModelError("corrupt", f"{path} is not a model card: {error}.") from error
    if card.version != CARD_VERSION:
        raise ModelError("unsupported", f"{path} has version {card.version}, not {CARD_VERSION}.")
    return msgspec.structs.replace(card, folder=str(folder))  # a data directory may have moved


def check_config(config: ModelConfig) -> ModelConfig:
    """Raise ModelError where the sizes cannot be those of a model."""
    try:
        msgspec.convert(msgspec.to_builtins(config), ModelConfig)
    except msgspec.ValidationError as error:
        raise ModelError("corrupt", f"The model's shape cannot be right: {error}.") from error
    for name in ("rope_theta", "norm_eps"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise ModelError("corrupt", f"{name} is {value}.")
    scaling = config.rope_scaling
    if scaling is not None:
        numbers = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
        if not all(math.isfinite(n) and n > 0 for n in (*numbers, *scaling.divisors)):
            raise ModelError("corrupt", "A number of the rotary scaling is not above 0.")
        if scaling.kind == "divisors" and len(scaling.divisors) != config.head_dim // 2:
            raise ModelError(
                "corrupt",
                f"{len(scaling.divisors)} rotary divisors for a head dimension of"
                f" {config.head_dim}.",
            )
    if config.heads % config.kv_heads:
        raise ModelError(
            "corrupt", f"{config.heads} query heads do not divide among {config.kv_heads} KV heads."
        )
    if config.head_dim % 2:
        raise ModelError("unsupported", f"A head dimension of {config.head_dim} is odd.")
    return config
