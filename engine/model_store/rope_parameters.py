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


def rope_parameters(c: Config) -> Config:
    """Return the parameters of layers with full attention."""
    given = c.get("rope_parameters") or {}
    if isinstance(given.get("full_attention"), dict):
        given = given["full_attention"]
    return {**(c.get("rope_scaling") or {}), **given}


def local_rope(c: Config, head_dim: int, theta: float) -> Rope:
    """Return the table of window layers: by `theta`, unscaled, unless the config has parameters for
    them."""
    given = (c.get("rope_parameters") or {}).get("sliding_attention")
    if isinstance(given, dict):
        return read_rope(given, {}, head_dim, theta=theta)
    return Rope(theta, head_dim)


def read_rope(
    p: Config, c: Config, head_dim: int, *, theta: float = 10_000.0, share: float = 1.0
) -> Rope:
    """Return the table of parameters `p` in a config `c`; `theta` and `share` (of the channels that
    rotate) are the family's defaults. Raises ModelError `unsupported` for an unknown scaling."""
    theta = float(p.get("rope_theta") or c.get("rope_theta") or theta)
    share = float(p.get("partial_rotary_factor") or c.get("partial_rotary_factor") or share)
    dim = int(head_dim * share)
    kind = p.get("rope_type") or p.get("type") or "default"
    original = p.get("original_max_position_embeddings") or c.get(
        "original_max_position_embeddings"
    )
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
    context = int(c.get("max_position_embeddings") or 0)
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
        return _mscale(factor, float(one)) / _mscale(factor, float(every))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
