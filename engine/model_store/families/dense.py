"""Families without experts and without recurrent layers: config to architecture."""

from __future__ import annotations

import math
from typing import Any

from engine.errors import ModelError
from engine.model_store.architecture import FULL, Architecture, Layer
from engine.model_store.families.decoder import (
    LOCAL,
    biases,
    decoder,
    full_and_local,
    layer_windows,
)
from engine.model_store.rope_parameters import Config, rope_parameters


def llama(c: Config) -> Architecture:
    return decoder(c, mlp_bias=bool(c.get("mlp_bias", False)), **biases(c))


def mistral(c: Config) -> Architecture:
    layers = tuple(Layer(window=w) for w in layer_windows(c, lambda _: True))
    return decoder(c, layers=layers, **biases(c))


def ministral3(c: Config) -> Architecture:
    parameters = rope_parameters(c)
    beta = float(parameters.get("llama_4_scaling_beta") or 0.0)
    growth = (beta, int(parameters["original_max_position_embeddings"])) if beta else None
    layers = tuple(Layer(window=w) for w in layer_windows(c, lambda _: True))
    return decoder(c, layers=layers, query_growth=growth)


def qwen2_windows(c: Config) -> list[int]:
    if not c.get("use_sliding_window", False):
        return [0] * int(c["num_hidden_layers"])
    return layer_windows(c, lambda i: i >= int(c.get("max_window_layers", 28)))


def qwen2(c: Config) -> Architecture:
    layers = tuple(Layer(window=w) for w in qwen2_windows(c))
    return decoder(c, layers=layers, qkv_bias=True)


def qwen3(c: Config) -> Architecture:
    layers = tuple(Layer(window=w) for w in qwen2_windows(c))
    return decoder(c, layers=layers, qk_norm="head", **biases(c))


def phi3(c: Config) -> Architecture:
    return decoder(c, layers=tuple(Layer(window=w) for w in layer_windows(c, lambda _: True)))


def smollm3(c: Config) -> Architecture:
    interval = int(c.get("no_rope_layer_interval") or 4)
    count = int(c["num_hidden_layers"])
    rotates = c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(count)]
    windows = [0] * count
    if c.get("use_sliding_window", False):
        windows = layer_windows(c, lambda i: not rotates[i])
    layers = tuple(
        Layer(window=w, rope=FULL if r else "") for w, r in zip(windows, rotates, strict=True)
    )
    return decoder(c, layers=layers, mlp_bias=bool(c.get("mlp_bias", False)), **biases(c))


def olmo2(c: Config) -> Architecture:
    return decoder(c, place="post", qk_norm="whole", **biases(c))


def olmo3(c: Config) -> Architecture:
    windows = layer_windows(c, lambda i: (i + 1) % 4 != 0)
    ropes = full_and_local(c, float(c["rope_theta"]))
    layers = tuple(Layer(window=w, rope=LOCAL if w else FULL) for w in windows)
    return decoder(c, layers=layers, ropes=ropes, place="post", qk_norm="whole", **biases(c))


def granite(c: Config) -> Architecture:
    return decoder(c, mlp_bias=bool(c.get("mlp_bias", False)), **granite_features(c))


def granite_features(c: Config) -> dict[str, Any]:
    return {
        "embed_scale": float(c.get("embedding_multiplier") or 1.0),
        "residual_scale": float(c.get("residual_multiplier") or 1.0),
        "logit_scale": 1.0 / float(c.get("logits_scaling") or 1.0),
        "score_scale": float(c.get("attention_multiplier") or 0.0),
        **biases(c),
    }


def _gemma_features(c: Config) -> dict[str, Any]:
    return {
        "embed_scale": math.sqrt(int(c["hidden_size"])),
        "norms_less_one": True,
        **biases(c),
    }


def _later_gemma_features(c: Config) -> dict[str, Any]:
    return {
        "place": "sandwich",
        # The root of a negative number is complex, which is no float: the config is corrupt.
        "score_scale": float(float(c.get("query_pre_attn_scalar") or 256) ** -0.5),
        "score_cap": float(c.get("attn_logit_softcapping") or 0.0),
        "logit_cap": float(c.get("final_logit_softcapping") or 0.0),
        **_gemma_features(c),
    }


def gemma(c: Config) -> Architecture:
    return decoder(c, **_gemma_features(c))


def gemma2(c: Config) -> Architecture:
    layers = tuple(Layer(window=w) for w in layer_windows(c, lambda i: i % 2 == 0))
    return decoder(c, layers=layers, **_later_gemma_features(c))


def gemma3(c: Config) -> Architecture:
    if c.get("use_bidirectional_attention"):
        raise ModelError(
            "unsupported", "bidirectional attention is not supported; expected a causal model"
        )
    pattern = int(c.get("sliding_window_pattern") or 6)
    windows = layer_windows(c, lambda i: (i + 1) % pattern != 0)
    return decoder(
        c,
        layers=tuple(Layer(window=w, rope=LOCAL if w else FULL) for w in windows),
        ropes=full_and_local(c, float(c.get("rope_local_base_freq") or 10_000.0)),
        qk_norm="head",
        **_later_gemma_features(c),
    )


def cohere2(c: Config) -> Architecture:
    pattern = int(c.get("sliding_window_pattern") or 4)
    windows = layer_windows(c, lambda i: (i + 1) % pattern != 0)
    return decoder(
        c,
        layers=tuple(Layer(window=w, rope=FULL if w else "") for w in windows),
        place="parallel",
        norm="mean",
        norm_eps=float(c.get("layer_norm_eps", 1e-5)),
        interleaved=True,
        logit_scale=float(c.get("logit_scale") or 1.0),
        **biases(c),
    )


def glm4(c: Config) -> Architecture:
    return decoder(c, place="sandwich", interleaved=True, **biases(c, output=False))
