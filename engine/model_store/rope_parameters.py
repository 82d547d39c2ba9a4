"""Reads rotary parameters from a config, in the spellings that published configs have.

Configs of transformers 5 have `rope_parameters`, which may hold a set for each kind of layer; older
ones have `rope_theta`, `rope_scaling` and `partial_rotary_factor`. `families` calls it.
"""

from __future__ import annotations

import math
from typing import Any

from engine.errors import ModelError
from engine.model_store.architecture import Rope

Config = dict[str, Any]

_OUTSIDE = (
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "max_position_embeddings",
)
"""Parameters that are in the config itself if its rotary parameters lack them."""


def rope_parameters(c: Config) -> Config:
    """Return the parameters of layers with full attention, those that are null left out."""
    given = c.get("rope_parameters") or {}
    if isinstance(given.get("full_attention"), dict):
        given = given["full_attention"]
    outside = {name: c.get(name) for name in _OUTSIDE}
    return {**known(outside), **known(c.get("rope_scaling") or {}), **known(given)}


def known(config: Config) -> Config:
    """Return the fields that are not null."""
    return {name: value for name, value in config.items() if value is not None}


def local_rope(c: Config, head_dim: int, theta: float) -> Rope:
    """Return the table of window layers: by `theta`, unscaled, unless the config has parameters for
    them."""
    given = (c.get("rope_parameters") or {}).get("sliding_attention")
    return read_rope({"rope_theta": theta, **known(given or {})}, head_dim)


def read_rope(p: Config, head_dim: int) -> Rope:
    """Return the table of parameters `p` for heads of `head_dim` channels. Raises ModelError
    `unsupported` for an unknown scaling."""
    theta = float(p.get("rope_theta") or 10_000.0)
    dim = int(head_dim * float(p.get("partial_rotary_factor") or 1.0))
    kind = p.get("rope_type") or p.get("type") or "default"
    original = p.get("original_max_position_embeddings")
    if kind == "default":
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, "linear", factor=float(p["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            dim,
            "llama3",
            factor=float(p["factor"]),
            low_freq_factor=float(p.get("low_freq_factor", 1.0)),
            high_freq_factor=float(p.get("high_freq_factor", 4.0)),
            original_context=int(original or 8192),
        )
    if kind == "divisors":  # of a GGUF file
        return Rope(theta, dim, "divisors", divisors=tuple(p["divisors"]))
    if kind not in ("yarn", "longrope", "su"):
        raise ModelError(
            "unsupported",
            f"unsupported rotary scaling: {kind!r}; expected linear, llama3, yarn or longrope",
        )
    context = int(p.get("max_position_embeddings") or 0)
    original = int(original or context)
    factor = float(p.get("factor") or context / original)
    if kind == "yarn":
        return Rope(
            theta,
            dim,
            "yarn",
            factor=factor,
            original_context=original,
            beta_fast=float(p.get("beta_fast") or 32.0),
            beta_slow=float(p.get("beta_slow") or 1.0),
            truncate=bool(p.get("truncate", True)),
            amplitude=_yarn_amplitude(p, factor),
        )
    longer = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        theta,
        dim,
        "divisors",
        divisors=tuple(map(float, p["short_factor"])),
        long_divisors=tuple(map(float, p["long_factor"])),
        original_context=original,
        amplitude=float(p.get("attention_factor") or longer),
    )


def _yarn_amplitude(p: Config, factor: float) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    one, every = p.get("mscale"), p.get("mscale_all_dim")
    if one and every:
        return yarn_scale(factor, float(one)) / yarn_scale(factor, float(every))
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, weight: float) -> float:
    """Return YaRN's amplitude for a context of `factor` times the original's; configs name the
    weight `mscale`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
