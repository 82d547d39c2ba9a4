"""The model card: the description of a prepared model, without its weights.

A prepared folder holds `model_card.json`, `tokenizer.json` and `chat_template.jinja`. The gateway
reads these and never the weights; the engine loads the weights that the card points to.
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
"""Version of the card's fields; a card of another version is made anew."""


class RopeScaling(Struct, frozen=True, forbid_unknown_fields=True):
    """Scaling of rotary frequencies: Llama 3's, `linear` by `factor`, or `divisors`, one per
    frequency."""

    kind: Literal["llama3", "linear", "divisors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    divisors: tuple[float, ...] = ()


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of a decoder of the Llama family. Sizes in channels, heads or tokens.

    MHA, GQA or MQA by `kv_heads`. `tie_embeddings`: the output head shares the embedding's weights.
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
    """A prepared model.

    `digest` covers the model's files, tokenizer and template. `source`: the GGUF file or Hugging
    Face folder. `folder`: the prepared folder. `stop_token_ids`: every token that ends an output.
    `special_token_ids`: tokens that are never text.
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
        """Path of the prepared tokenizer.json."""
        return Path(self.folder) / "tokenizer.json"

    @property
    def template_path(self) -> Path:
        """Path of the prepared chat template."""
        return Path(self.folder) / "chat_template.jinja"


def load_card(folder: Path) -> ModelCard:
    """Read the card of a prepared folder. Raises ModelError: not_found, corrupt or unsupported."""
    path = folder / "model_card.json"
    try:
        card = msgspec.json.decode(path.read_bytes(), type=ModelCard)
    except OSError as error:
        raise ModelError("not_found", f"{path} cannot be read: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise ModelError("corrupt", f"{path} is not a model card: {error}.") from error
    if card.version != CARD_VERSION:
        raise ModelError(
            "unsupported", f"{path} has version {card.version}; expected {CARD_VERSION}"
        )
    return msgspec.structs.replace(card, folder=str(folder))  # the data directory may have moved


def check_config(config: ModelConfig) -> ModelConfig:
    """Return `config`. Raises ModelError where its sizes cannot be those of a model."""
    try:
        msgspec.convert(msgspec.to_builtins(config), ModelConfig)
    except msgspec.ValidationError as error:
        raise ModelError("corrupt", f"invalid model shape: {error}") from error
    for name in ("rope_theta", "norm_eps"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise ModelError("corrupt", f"invalid {name}: {value}; expected a number above 0")
    scaling = config.rope_scaling
    if scaling is not None:
        numbers = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
        if not all(math.isfinite(n) and n > 0 for n in (*numbers, *scaling.divisors)):
            raise ModelError("corrupt", "invalid rotary scaling: expected numbers above 0")
        if scaling.kind == "divisors" and len(scaling.divisors) != config.head_dim // 2:
            raise ModelError(
                "corrupt",
                f"{len(scaling.divisors)} rotary divisors; expected {config.head_dim // 2} for"
                f" head_dim {config.head_dim}",
            )
    if config.heads % config.kv_heads:
        raise ModelError(
            "corrupt",
            f"{config.heads} query heads are not a multiple of {config.kv_heads} KV heads",
        )
    if config.head_dim % 2:
        raise ModelError("unsupported", f"odd head_dim: {config.head_dim}; expected an even number")
    return config
