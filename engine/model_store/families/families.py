"""The families of models that run: each is a function from its config to an `Architecture`.

A config is the content of a Hugging Face `config.json`; `engine.model_store.gguf` translates the
metadata of GGUF files into one. Strict where a wrong guess would compute another model, lenient
elsewhere: published configs have many fields that change nothing. It knows no tensor.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from engine.errors import ModelError
from engine.model_store.architecture import REFUSED, SIZE_NAMES, Architecture
from engine.model_store.families.dense import (
    cohere2,
    gemma,
    gemma2,
    gemma3,
    glm4,
    granite,
    llama,
    ministral3,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from engine.model_store.families.experts import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    mixtral,
    qwen2_moe,
    qwen3_moe,
)
from engine.model_store.families.hybrids import (
    granite_hybrid,
    granite_moe,
    lfm2,
    nemotron_h,
    qwen3_hybrid,
)
from engine.model_store.rope_parameters import Config, known
from engine.model_store.tensors import (
    DELTA_NAMES,
    GGUF_DELTA_NAMES,
    GGUF_FUSED_NAMES,
    GGUF_LFM2_NAMES,
    GGUF_MAMBA_NAMES,
    GGUF_NORM_NAMES,
    GLM4_NAMES,
    GPT_OSS_NAMES,
    GRANITE_HYBRID_NAMES,
    LFM2_NAMES,
    MIXTRAL_NAMES,
    NEMOTRON_H_NAMES,
    SANDWICH_NAMES,
    Names,
)

LAYERS_MAX = 1024
"""Most layers of a model: a damaged number would fill memory before any tensor is missed."""


class Family(Struct, frozen=True):
    """A family of models.

    `folder_names`, `gguf_names`: tensors that the family names its own way.
    """

    models: str
    """For the documents."""
    read: Callable[[Config], Architecture]
    """Config → architecture."""
    gguf: str = ""
    """The architecture's name in GGUF files, empty if these are not read."""
    gguf_interleaved: bool = False
    """GGUF files of the family hold rotating channels as neighbours."""
    gguf_values_in_turns: bool = False
    """They hold the delta rule's heads of values in turns over the heads of keys."""
    folder_names: Names = {}
    gguf_names: Names = {}
    defaults: Config = {}
    """Fields that published configs leave out or hold as null."""


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a config.json. Raises ModelError: unsupported or corrupt."""
    kind = str(config.get("model_type", ""))
    inner = config.get("text_config")
    if kind not in FAMILIES and isinstance(inner, dict):
        tied = config.get("tie_word_embeddings")
        return architecture_of({"tie_word_embeddings": tied, **inner})
    family = FAMILIES.get(kind)
    if family is None:
        raise unsupported_family(kind)
    given = {**family.defaults, **known(config)}
    try:
        if kinds := given.get("layers_block_type"):
            given.setdefault("num_hidden_layers", len(kinds))
        for name in ("num_hidden_layers", *SIZE_NAMES.values()):
            size = given.get(name)
            if size is not None and (not isinstance(size, int | float) or size != int(size)):
                raise ValueError(f"{name}: {size!r}; expected a whole number")
        if not 0 < (layers := int(given["num_hidden_layers"])) <= LAYERS_MAX:
            raise ValueError(f"num_hidden_layers: {layers}; expected 1 to {LAYERS_MAX}")
        return family.read(given)
    except KeyError as missing:
        raise ModelError("corrupt", f"config.json has no {missing.args[0]}") from missing
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError("corrupt", f"config.json: {error}.") from error


def unsupported_family(kind: str) -> ModelError:
    """Return the error for a family that does not run, with the reason where it is known."""
    if kind in FAMILIES:
        return ModelError(
            "unsupported",
            f"GGUF files of {kind} are not supported; expected its folder of safetensors",
        )
    if kind in REFUSED:
        return ModelError("unsupported", f"unsupported model type: {kind!r}: {REFUSED[kind]}")
    names = ", ".join(sorted(FAMILIES))
    return ModelError("unsupported", f"unsupported model type: {kind!r}; expected one of {names}")


_GEMMA_DEFAULTS: Config = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",  # Gemma 1 says gelu in `hidden_act`, and means this
}


_QWEN_HYBRID: Config = {"partial_rotary_factor": 0.25, "norm_topk_prob": True}


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2, 3 to 3.3, SmolLM 1 and 2", llama, "llama", gguf_interleaved=True),
    "mistral": Family("Mistral 7B, Small, Nemo", mistral, "llama", gguf_interleaved=True),
    "ministral3": Family("Ministral 3", ministral3, "mistral3", gguf_interleaved=True),
    "qwen2": Family("Qwen 2, 2.5", qwen2, "qwen2"),
    "qwen3": Family("Qwen 3 dense", qwen3, "qwen3"),
    "phi3": Family("Phi-3, 3.5, 4", phi3, "phi3", gguf_names=GGUF_FUSED_NAMES),
    "smollm3": Family("SmolLM 3", smollm3, "smollm3", gguf_interleaved=True),
    "olmo2": Family("OLMo 2", olmo2, "olmo2", folder_names=SANDWICH_NAMES),
    "olmo3": Family(
        "OLMo 3", olmo3, "olmo2", folder_names=SANDWICH_NAMES, defaults={"rope_theta": 500_000.0}
    ),
    "granite": Family("Granite 3", granite, "granite", gguf_interleaved=True),
    **{
        kind: Family(
            models, granite_moe, "granitemoe", gguf_interleaved=True,
            folder_names=GRANITE_HYBRID_NAMES, defaults={"rope_theta": 10_000.0},
        )
        for kind, models in (
            ("granitemoe", "Granite 3 MoE"), ("granitemoeshared", "Granite 3 MoE, shared experts"),
        )
    },
    "granitemoehybrid": Family(
        "Granite 4", granite_hybrid, "granitehybrid", gguf_interleaved=True,
        folder_names=GRANITE_HYBRID_NAMES, gguf_names=GGUF_MAMBA_NAMES,
        defaults={"rope_theta": 10_000.0},
    ),
    "gemma": Family("Gemma 1", gemma, "gemma", defaults=_GEMMA_DEFAULTS),
    "gemma2": Family(
        "Gemma 2", gemma2, "gemma2", folder_names=SANDWICH_NAMES, defaults=_GEMMA_DEFAULTS
    ),
    "gemma3_text": Family(
        "Gemma 3", gemma3, "gemma3", folder_names=SANDWICH_NAMES,
        defaults={
            **_GEMMA_DEFAULTS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6,
        },
    ),
    "cohere2": Family(
        "Command R7B, Command A", cohere2, "cohere2", gguf_interleaved=True,
        defaults={"tie_word_embeddings": True},
    ),
    "glm4": Family(
        "GLM-4 dense", glm4, "glm4", gguf_interleaved=True,
        folder_names=GLM4_NAMES, gguf_names=GGUF_FUSED_NAMES,
        defaults={"head_dim": 128, "partial_rotary_factor": 0.5},
    ),
    "glm4_moe": Family(
        "GLM-4.5, 4.6", glm4_moe, "glm4moe", gguf_names=GGUF_NORM_NAMES,
        defaults={"partial_rotary_factor": 0.5},
    ),
    "mixtral": Family(
        "Mixtral", mixtral, "llama", gguf_interleaved=True, folder_names=MIXTRAL_NAMES
    ),
    "qwen2_moe": Family("Qwen 1.5 and 2 MoE", qwen2_moe, "qwen2moe"),
    "qwen3_moe": Family("Qwen 3 MoE", qwen3_moe, "qwen3moe"),
    "gpt_oss": Family(
        "gpt-oss", gpt_oss, "gpt-oss", folder_names=GPT_OSS_NAMES, gguf_names=GGUF_NORM_NAMES,
        defaults={"head_dim": 64, "rope_theta": 150_000.0, "attention_bias": True},
    ),
    "lfm2": Family(
        "LFM2", lfm2, "lfm2", folder_names=LFM2_NAMES, gguf_names=GGUF_LFM2_NAMES,
        defaults={"tie_word_embeddings": True, "rope_theta": 1e6},
    ),
    "lfm2_moe": Family(
        "LFM2 MoE", lfm2, "lfm2moe", folder_names=LFM2_NAMES, gguf_names=GGUF_LFM2_NAMES,
        defaults={"tie_word_embeddings": True, "rope_theta": 1e6},
    ),
    "qwen3_next": Family(
        "Qwen3-Next", qwen3_hybrid, "qwen3next", folder_names=DELTA_NAMES,
        gguf_names=GGUF_DELTA_NAMES, defaults=_QWEN_HYBRID,
    ),
    "qwen3_5_text": Family(
        "Qwen 3.5, 3.6 dense", qwen3_hybrid, "qwen35", gguf_values_in_turns=True,
        folder_names=DELTA_NAMES, gguf_names=GGUF_DELTA_NAMES, defaults=_QWEN_HYBRID,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen 3.5, 3.6 MoE", qwen3_hybrid, "qwen35moe", gguf_values_in_turns=True,
        folder_names=DELTA_NAMES, gguf_names=GGUF_DELTA_NAMES, defaults=_QWEN_HYBRID,
    ),
    "nemotron_h": Family(
        "Nemotron-H, Nemotron Nano 2", nemotron_h, "nemotron_h", folder_names=NEMOTRON_H_NAMES,
        gguf_names=GGUF_MAMBA_NAMES, defaults={"rope_theta": 10_000.0},
    ),
    "deepseek_v2": Family(
        "DeepSeek-V2, V2-Lite", deepseek_v2, "deepseek2", gguf_interleaved=True
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3's shape: Moonlight", deepseek_v3, "deepseek2", gguf_interleaved=True
    ),
    "glm4_moe_lite": Family("GLM-4.7-Flash", deepseek_v3, "deepseek2", gguf_interleaved=True),
}  # fmt: skip
"""Families by the `model_type` of their config.json."""
