"""The architecture of a decoder, as data: every model that runs is one of these values.

`engine.model_store.families` makes an `Architecture` from a model's files, `engine.models.decoder`
runs it. It knows no tensor, file or device. Sizes are in channels, heads or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from engine.errors import ModelError

SIZE_MAX = 2**31
Size = Annotated[int, Meta(ge=1, le=SIZE_MAX)]
SIZE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab": "vocab_size",
        "context": "max_position_embeddings",
    }
)
"""What a config.json calls the sizes of an `Architecture`."""

CONV_WIDTH_MAX = 64
FULL = "full"
"""Name of the rotary table of families that have one."""


class Layer(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One decoder layer."""

    mixer: Literal["gqa", "mla", "conv", "delta", "mamba", "none"] = "gqa"
    """Grouped-query attention, attention over latents, a gated short convolution, whose state is
    its last inputs, or the gated delta rule or Mamba-2, whose state is a matrix for each head.
    `none`: the layer is an MLP alone."""
    window: int = 0
    """A query at position p sees keys above p - window; 0: all keys up to p."""
    rope: str = FULL
    """Name of a table in `Architecture.ropes`; empty: no rotation."""
    ffn: Literal["dense", "moe", "none"] = "dense"
    """`none`: the layer is a mixer alone."""


class Rope(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A rotary table: `dim` channels rotate by theta ** (-2i / dim), scaled as `kind` says.

    `linear`: divided by `factor`. `llama3`: Llama 3's bands. `yarn`: a ramp between dimensions that
    make `beta_fast` and `beta_slow` turns in the original context. `amplitude` multiplies cos and
    sin.
    """

    theta: float
    dim: Size
    kind: Literal["plain", "linear", "llama3", "yarn", "divisors"] = "plain"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    """Divided one by one; where the engine serves more than `original_context`, by `long_divisors`,
    if there are any."""
    long_divisors: tuple[float, ...] = ()
    amplitude: float = 1.0


class Moe(Struct, frozen=True, forbid_unknown_fields=True):
    """A mixture of experts: each token goes to `top_k` of `experts` gated MLPs.

    `groups` and `groups_kept`: experts are chosen in the best groups only; a group's score is its
    best expert's, or with `choose_by_bias` the sum of its best two.
    """

    experts: Size
    top_k: Size
    intermediate: Size
    score: Literal["softmax", "sigmoid", "chosen_softmax"] = "softmax"
    """How the router's logits become weights; `chosen_softmax` takes the softmax over only the
    chosen logits."""
    choose_by_bias: bool = False
    """A bias is added for the choice and not for the weight."""
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    shared: Literal["", "add", "gated"] = ""
    """An MLP of `shared_intermediate` channels that all tokens take, added, or times the sigmoid of
    a gate."""
    shared_intermediate: int = 0
    expert: Literal["gated", "clamped"] = "gated"
    """`clamped` is gpt-oss's, with biases."""


class Latent(Struct, frozen=True, forbid_unknown_fields=True):
    """Multi-head latent attention: a token's KV is one latent of `rank` channels, which all heads
    expand, and `rope` rotated channels.

    A head's query has `nope` channels without rotation and `rope` with; its value has `value`.
    """

    rank: Size
    nope: Size
    rope: Size
    value: Size
    query_rank: int = 0
    """Rank of the query's own latent; 0: none."""
    norm_eps: float = 1e-6


class Delta(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers of the gated delta rule (Gated DeltaNet, arXiv:2412.06464): `value_heads` states of
    `key_dim` x `value_dim`; each key head serves as many consecutive value heads.

    Queries, keys and values pass a short convolution of `Architecture.conv_width` inputs.
    """

    key_heads: Size
    value_heads: Size
    key_dim: Size
    value_dim: Size

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def heads(self) -> int:
        """States of a layer."""
        return self.value_heads

    @property
    def groups(self) -> int:
        """Heads of keys, each of which serves as many value heads."""
        return self.key_heads

    @property
    def inner(self) -> int:
        """Channels that all heads read."""
        return self.values

    @property
    def channels(self) -> int:
        """Channels of the short convolution."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of a layer's matrices."""
        return self.value_heads, self.key_dim, self.value_dim


class Mamba(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers of Mamba-2 (arXiv:2405.21060): `heads` states of `head_dim` x `state_dim`; what is
    written into them and where they are read is given for each of `groups` of consecutive heads.

    Inputs and both of these pass a short convolution of `Architecture.conv_width` inputs.
    """

    heads: Size
    head_dim: Size
    state_dim: Size
    groups: Size

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the short convolution."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of a layer's matrices."""
        return self.heads, self.head_dim, self.state_dim


Packing = Literal["fp8", "int8", "mxfp4", "mxfp4_rows", "awq", "gptq", "gptq_v2", "packed_rows"]


class Quantisation(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How linear maps lie in a folder."""

    layout: Packing
    group: int = 0
    """Columns of a row that share a scale; 0: as the scales' shape says."""
    has_zeros: bool = False
    """Each group has a zero of its own."""


class Architecture(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Shape and arithmetic of a decoder.

    MHA, GQA or MQA by `kv_heads`; with `latent`, one KV head of the latent's width. `query_growth`
    (beta, original context): queries at position p are multiplied by 1 + beta * ln(1 + floor(p /
    original)).

    Three fields say how files hold weights, which the loader undoes: `interleaved` (neighbouring
    channels rotate, not halves of a head), `norms_less_one` (norm weights minus 1) and
    `values_in_turns` (of the delta rule's heads of values, the first of each head of keys, then the
    second of each, and so on).
    """

    family: str
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=4096)]
    hidden: Size
    intermediate: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    vocab: Size
    context: Size
    ropes: dict[str, Rope]
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """The output head shares the embedding's weights."""
    norm: Literal["rms", "mean"] = "rms"
    """RMS, or `mean`, which takes the mean off first."""
    place: Literal["pre", "post", "sandwich", "parallel", "single"] = "pre"
    """Norms before mixer and MLP, after them, both, or one norm before both side by side. `single`:
    a layer has one of both, with a norm before it."""
    qk_norm: Literal["", "head", "whole"] = ""
    """Over each head's channels, or over all heads at once."""
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """Of gates of MLPs. `relu2`, the square of what is above 0, is of MLPs without a gate."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    score_scale: float = 0.0
    """Factor of the scores; 0: 1 / sqrt(head_dim)."""
    score_cap: float = 0.0
    """Scores s become cap * tanh(s / cap)."""
    sinks: bool = False
    """Each head has a logit that takes part in the softmax and has no value."""
    query_growth: tuple[float, int] | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    moe: Moe | None = None
    latent: Latent | None = None
    delta: Delta | None = None
    mamba: Mamba | None = None
    output_gate: bool = False
    """What attention reads is multiplied by the sigmoid of a gate, a channel each."""
    conv_width: int = 0
    """Inputs that an output of a short convolution reads, its own among them."""
    conv_bias: bool = False
    """Short convolutions have biases, and so have the linear maps of those that are a mixer."""
    conv_channels: int = 0
    """Channels of short convolutions that are a mixer; 0: `hidden`, of which a lane has a part."""
    interleaved: bool = False
    norms_less_one: bool = False
    values_in_turns: bool = False

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers that keep a state of the sequence instead of KV. O(layers)."""
        return tuple(i for i, la in enumerate(self.layers) if la.mixer in _RECURRENT)

    @property
    def layers_without_kv(self) -> tuple[int, ...]:
        """Layers that keep no KV: recurrent ones, and those that are an MLP alone. O(layers)."""
        return tuple(i for i, la in enumerate(self.layers) if la.mixer not in _ATTENTION)

    @property
    def rule(self) -> Delta | Mamba | None:
        """What recurrent layers with a matrix for each head compute."""
        return self.delta or self.mamba

    @property
    def convolved(self) -> int:
        """Channels of a short convolution."""
        return self.conv_channels or self.hidden if self.rule is None else self.rule.channels

    @property
    def run_up(self) -> int:
        """Cached tokens that are run again, without writing KV, where a sequence resumes.

        From states of zeros, a convolution of W inputs has exact outputs W - 1 tokens after its
        inputs are exact, so behind all of them the states are those of the whole sequence. The
        delta rule and Mamba-2 forget nothing: with them there is no run-up, and states are kept.
        """
        if self.rule is not None:
            return 0
        return len(self.recurrent_layers) * max(0, self.conv_width - 1)

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Names of a layer's norms before, between and after its blocks, as `place` says."""
        return _LAYER_NORMS[self.place]

    @property
    def fits_c_kernels(self) -> bool:
        """Whether the C kernels compute the whole model: everything but latents."""
        # The C path folds the residual's factor into the stream, which a block must norm then.
        is_foldable = self.place != "post" or self.residual_scale == 1.0
        # Biases of an MLP are known to C but those of one beside experts.
        has_biased_share = self.mlp_bias and self.moe is not None and self.moe.shared != ""
        return self.latent is None and is_foldable and not has_biased_share


_RECURRENT, _ATTENTION = ("conv", "delta", "mamba"), ("gqa", "mla")
_BEFORE, _BETWEEN = "input_layernorm", "post_attention_layernorm"
_AFTER = ("attention_output_layernorm", "mlp_output_layernorm")
_LAYER_NORMS = {
    "pre": (_BEFORE, _BETWEEN),
    "post": _AFTER,
    "sandwich": (_BEFORE, _BETWEEN, *_AFTER),
    "parallel": (_BEFORE,),
    "single": (_BEFORE,),
}


def check_architecture(
    architecture: Architecture, names: Mapping[str, str] = SIZE_NAMES
) -> Architecture:
    """Return `architecture`. Raises ModelError if its sizes cannot be those of a model. `names`:
    what the model's files call them."""
    a = architecture
    for field, name in names.items():
        if not 1 <= (size := getattr(a, field)) <= SIZE_MAX:
            raise ModelError("corrupt", f"{name}: {size}; expected 1 to {SIZE_MAX}")
    try:
        msgspec.convert(msgspec.to_builtins(a), Architecture)
    except msgspec.ValidationError as error:
        problem, _, steps = str(error).partition(" - at `$.")
        raise ModelError("corrupt", f"{steps.rstrip('`')}: {problem}") from error
    if not (math.isfinite(a.norm_eps) and a.norm_eps > 0):
        raise ModelError(
            "corrupt", f"rms_norm_eps or layer_norm_eps: {a.norm_eps}; expected a number above 0"
        )
    if a.heads % a.kv_heads:
        expected = f"a multiple of {names['kv_heads']}, {a.kv_heads}"
        raise ModelError("corrupt", f"{names['heads']}: {a.heads}; expected {expected}")
    if a.head_dim % 2:
        odd = f"{names['head_dim']}: {a.head_dim}; expected an even number"
        raise ModelError("unsupported", odd)
    for name in {layer.rope for layer in a.layers} - {""}:
        if name not in a.ropes:
            known = ", ".join(a.ropes)
            raise ModelError(
                "corrupt", f"unknown rotary table of a layer: {name!r}; expected one of {known}"
            )
    for rope in a.ropes.values():
        _check_rope(rope, a.head_dim)
    shortest = min(layer.window for layer in a.layers)
    if shortest < 0:
        raise ModelError("corrupt", f"invalid window of a layer: {shortest}; expected 0 or more")
    blocks = {(layer.mixer != "none") + (layer.ffn != "none") for layer in a.layers}
    if blocks != {1 if a.place == "single" else 2}:
        raise ModelError("corrupt", f"blocks of a layer: {sorted(blocks)}; place is {a.place}")
    if a.moe is not None:
        _check_moe(a.moe)
        if a.activation == "relu2":
            raise ModelError("unsupported", "experts without a gate are not computed")
    if a.recurrent_layers:
        _check_recurrence(a)
    return a


def _check_recurrence(a: Architecture) -> None:
    name = "mamba_d_conv" if a.mamba else "linear_conv_kernel_dim" if a.delta else "conv_L_cache"
    if not 2 <= a.conv_width <= CONV_WIDTH_MAX:
        raise ModelError("corrupt", f"{name}: {a.conv_width}; expected 2 to {CONV_WIDTH_MAX}")
    if len(a.layers_without_kv) == len(a.layers):
        raise ModelError(
            "unsupported", "no layer has attention; the nearest that runs is lfm2, which mixes both"
        )
    if any(layer.window for layer in a.layers):
        raise ModelError(
            "unsupported",
            "recurrent layers beside sliding windows are not supported; the nearest that runs is"
            " lfm2, whose attention reads all tokens",
        )
    mixers = {layer.mixer for layer in a.layers} - {"none"}
    has_rules = {"delta": a.delta is not None, "mamba": a.mamba is not None}
    unlike = any((mixer in mixers) != has_rule for mixer, has_rule in has_rules.items())
    if unlike or len(mixers.intersection(_RECURRENT)) > 1:
        raise ModelError(
            "unsupported",
            f"mixers {', '.join(sorted(mixers))} in one model are not supported; the nearest that"
            " runs is qwen3_next",
        )
    if a.delta is not None and a.delta.value_heads % a.delta.key_heads:
        raise ModelError(
            "corrupt",
            f"linear_num_value_heads: {a.delta.value_heads}; expected a multiple of"
            f" linear_num_key_heads, {a.delta.key_heads}",
        )
    if a.mamba is not None and a.mamba.heads % a.mamba.groups:
        raise ModelError(
            "corrupt",
            f"mamba_n_heads: {a.mamba.heads}; expected a multiple of mamba_n_groups,"
            f" {a.mamba.groups}",
        )


def _check_rope(rope: Rope, head_dim: int) -> None:
    if not (math.isfinite(rope.theta) and rope.theta > 0):
        raise ModelError("corrupt", f"invalid rope_theta: {rope.theta}; expected a number above 0")
    numbers = (
        rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.beta_fast, rope.beta_slow,
        rope.amplitude, *rope.divisors, *rope.long_divisors,
    )  # fmt: skip
    if not all(math.isfinite(n) and n > 0 for n in numbers) or rope.original_context < 1:
        raise ModelError("corrupt", "invalid rotary scaling: expected numbers above 0")
    if rope.dim % 2 or rope.dim > head_dim:
        raise ModelError(
            "corrupt",
            f"{rope.dim} rotating channels; expected an even number up to head_dim {head_dim}",
        )
    counts = [len(rope.divisors)] if rope.kind == "divisors" else []
    counts += [len(rope.long_divisors)] if rope.long_divisors else []
    if any(count != rope.dim // 2 for count in counts):
        raise ModelError(
            "corrupt",
            f"{counts[0]} rotary divisors; expected {rope.dim // 2} for {rope.dim} channels",
        )


def _check_moe(moe: Moe) -> None:
    if moe.top_k > moe.experts:
        raise ModelError("corrupt", f"{moe.top_k} experts a token; expected at most {moe.experts}")
    if moe.groups < 1 or moe.experts % moe.groups or not 1 <= moe.groups_kept <= moe.groups:
        raise ModelError(
            "corrupt",
            f"{moe.experts} experts in {moe.groups} groups, {moe.groups_kept} kept; expected groups"
            " of equal size",
        )
    if moe.top_k > moe.experts // moe.groups * moe.groups_kept:
        raise ModelError(
            "corrupt", f"{moe.top_k} experts a token are more than the kept groups have"
        )


_STATES = "the rule of its recurrent layers is not computed; the nearest that runs is"
_SPARSE = "sparse attention with an index of its own is not supported; the nearest that runs is"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("falcon_h1", "jamba", "bamba"), f"{_STATES} granitemoehybrid"),
    **dict.fromkeys(("mamba", "mamba2", "rwkv"),
                    "a model without attention is not supported; the nearest that runs is"
                    " granitemoehybrid"),
    "olmo_hybrid": f"{_STATES} qwen3_next",
    "kimi_linear": "its recurrent layers decay each channel of a key by its own factor, which the"
    " kernels of the gated delta rule do not; the nearest that runs is qwen3_next",
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), f"{_SPARSE} deepseek_v3"),
    **dict.fromkeys(
        ("gemma4", "gemma4_text", "gemma3n", "gemma3n_text"),
        "layers of unlike head sizes and per-layer embeddings are not supported; the nearest that"
        " runs is gemma3_text",
    ),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        "chunked attention is not supported; the nearest that runs is mixtral",
    ),
    **dict.fromkeys(
        ("bert", "roberta", "t5"), "it is no causal decoder; the nearest that runs is llama"
    ),
}  # fmt: skip
"""Why well-known model types do not run, and the nearest that does."""
