"""The parts of configs that families share: sizes, rotation, windows, biases, experts by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec.structs import replace

from engine.errors import ModelError
from engine.model_store.architecture import FULL, Architecture, Layer, Rope
from engine.model_store.rope_parameters import Config, local_rope, read_rope, rope_parameters

LOCAL = "local"
"""Name of the rotary table of window layers, if they have one of their own."""


def decoder(
    c: Config,
    *,
    layers: tuple[Layer, ...] | None = None,
    ropes: dict[str, Rope] | None = None,
    **features: Any,
) -> Architecture:
    """Return the architecture of a config, Llama's unless the arguments say otherwise."""
    count, heads = int(c["num_hidden_layers"]), int(c["num_attention_heads"])
    context = int(c["max_position_embeddings"])
    layers = layers if layers is not None else (Layer(),) * count
    if len(layers) != count:
        raise ValueError(f"{len(layers)} layer types; expected {count}, one for each layer")
    if all(layer.window for layer in layers):
        # Within its window, sliding attention equals full attention, so the window is the context.
        context = min(context, *(layer.window for layer in layers))
        layers = tuple(replace(layer, window=0) for layer in layers)
    sizes = {
        "kv_heads": int(c.get("num_key_value_heads") or heads),
        "head_dim": _head_dim(c),
        "norm_eps": float(c.get("rms_norm_eps", 1e-6)),
        "activation": features.get("activation") or activation(c),
    }
    return Architecture(
        family=str(c["model_type"]),
        layers=layers,
        hidden=int(c["hidden_size"]),
        intermediate=int(c["intermediate_size"]),
        heads=heads,
        vocab=int(c["vocab_size"]),
        context=context,
        ropes=ropes or {FULL: read_rope(rope_parameters(c), _head_dim(c))},
        tie_embeddings=bool(c.get("tie_word_embeddings", False)),
        **{**sizes, **features},
    )


def _head_dim(c: Config) -> int:
    return int(c.get("head_dim") or int(c["hidden_size"]) // int(c["num_attention_heads"]))


def full_and_local(c: Config, local_theta: float) -> dict[str, Rope]:
    """Return the rotary tables of layers without and with a window."""
    head_dim = _head_dim(c)
    full = read_rope(rope_parameters(c), head_dim)
    return {FULL: full, LOCAL: local_rope(c, head_dim, local_theta)}


def activation(c: Config) -> Literal["silu", "gelu_tanh"]:
    named = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    if named in ("silu", "swish"):
        return "silu"
    if named in ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new"):
        return "gelu_tanh"
    raise ModelError(
        "unsupported", f"unsupported activation: {named!r}; expected silu or gelu_pytorch_tanh"
    )


def layer_windows(c: Config, default: Callable[[int], bool]) -> list[int]:
    """Return each layer's window, 0 for full attention; `default(i)` says which layers have one
    where the config does not."""
    count, window = int(c["num_hidden_layers"]), int(c.get("sliding_window") or 0)
    kinds = c.get("layer_types")
    if kinds is None:
        return [window if default(i) else 0 for i in range(count)]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ModelError(
            "unsupported",
            f"unsupported layer type: {unknown[0]!r}; expected full_attention or sliding_attention",
        )
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def biases(c: Config, *, output: bool = True) -> dict[str, Any]:
    """Return the features of `attention_bias`; `output`: the output projection has one too."""
    has_bias = bool(c.get("attention_bias", False))
    return {"qkv_bias": has_bias, "output_bias": has_bias and output}


def layer_mlps(c: Config, *, dense_first: int = 0) -> tuple[Literal["dense", "moe"], ...]:
    """Return which layers have experts."""
    count = int(c["num_hidden_layers"])
    kinds = c.get("mlp_layer_types")
    if kinds is not None:
        return tuple("moe" if kind == "sparse" else "dense" for kind in kinds)
    dense = set(c.get("mlp_only_layers") or ())
    step = int(c.get("decoder_sparse_step") or 1)
    return tuple(
        "moe" if i >= dense_first and i not in dense and (i + 1) % step == 0 else "dense"
        for i in range(count)
    )
