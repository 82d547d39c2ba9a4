"""BERT as an encoder of texts: token ids in, vectors of length 1 out, in fp32 on the CPU.

    texts ── packed rows [tokens, hidden] ── layers ── mean of each text's rows ── length 1
                       └─ attention: one call for the texts of one length

Rows of all texts lie one behind the other, so that nothing is computed for padding, and the texts
of one length share a call of attention, so that none needs a mask. A text's vector depends on the
other texts of its batch only by rounding. It knows no text and no process; `process` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch.nn import functional as F

from engine.encoder.card import BertShape, EncoderCard
from engine.errors import ModelError

Tensors = dict[str, torch.Tensor]

_EMBEDDINGS = "embeddings"
_UNUSED = ("pooler.", "embeddings.position_ids", "cls.")
"""How the names of tensors begin that no vector depends on."""


class _Linear(Struct, frozen=True):
    """A matrix [out, in] and a bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)


class _Norm(Struct, frozen=True):
    """Layer normalisation with weight and bias [hidden]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)


class _Layer(Struct, frozen=True):
    """One layer; `qkv` holds the three projections one behind the other."""

    qkv: _Linear
    out: _Linear
    out_norm: _Norm
    up: _Linear
    down: _Linear
    down_norm: _Norm


class _Group(Struct, frozen=True):
    """Texts of one length: their rows begin at `start`."""

    start: int
    texts: int
    tokens: int

    @property
    def end(self) -> int:
        return self.start + self.texts * self.tokens


class BertEncoder:
    """A loaded encoder. Not thread-safe."""

    def __init__(self, card: EncoderCard, tensors: Tensors) -> None:
        """`tensors`: as `load_tensors` returns them."""
        self.card = card
        shape = card.shape
        self._heads = shape.num_attention_heads
        self._words = tensors[f"{_EMBEDDINGS}.word_embeddings.weight"]
        # All tokens are of the first type, so that its row belongs to each position.
        types = tensors[f"{_EMBEDDINGS}.token_type_embeddings.weight"]
        self._places = tensors[f"{_EMBEDDINGS}.position_embeddings.weight"] + types[0]
        self._norm = _norm(tensors, f"{_EMBEDDINGS}.LayerNorm", shape)
        self._layers = [_layer(tensors, n, shape) for n in range(shape.num_hidden_layers)]

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the vectors of texts, [texts, hidden] fp32, each of length 1, in their order.

        `texts`: token ids, each text with 1 to `card.tokens_max` of them, all in the vocabulary.
        Cost: some 2 * 12 * hidden² operations for each layer and token. Changes nothing.
        """
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        groups = list(_groups([len(texts[number]) for number in order]))
        ids = torch.tensor([token for number in order for token in texts[number]])
        places = torch.cat([torch.arange(one.tokens).repeat(one.texts) for one in groups])
        rows = self._norm(self._words[ids] + self._places[places])
        for layer in self._layers:
            rows = self._run(layer, rows, groups)
        vectors = torch.empty(len(texts), self.card.dimensions)
        vectors[torch.tensor(order)] = torch.cat([self._pool(rows, one) for one in groups])
        return F.normalize(vectors, dim=1)

    def _run(self, layer: _Layer, rows: torch.Tensor, groups: Sequence[_Group]) -> torch.Tensor:
        """Return the rows after a layer; [tokens, hidden] in and out."""
        qkv = layer.qkv(rows).view(len(rows), 3, self._heads, -1)
        mixed = torch.empty_like(rows)
        for one in groups:
            parts = qkv[one.start : one.end].view(one.texts, one.tokens, 3, self._heads, -1)
            query, key, value = parts.permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(query, key, value)
            mixed[one.start : one.end] = found.transpose(1, 2).reshape(-1, rows.shape[1])
        rows = layer.out_norm(rows + layer.out(mixed))
        return layer.down_norm(rows + layer.down(F.gelu(layer.up(rows))))

    def _pool(self, rows: torch.Tensor, group: _Group) -> torch.Tensor:
        """Return one row for each text of a group, [texts, hidden]."""
        found = rows[group.start : group.end].view(group.texts, group.tokens, -1)
        return found.mean(dim=1) if self.card.pooling == "mean" else found[:, 0]


def _groups(lengths: Sequence[int]) -> Iterator[_Group]:
    """Yield the groups of sorted lengths."""
    start = 0
    for tokens, same in groupby(lengths):
        group = _Group(start, len(list(same)), tokens)
        yield group
        start = group.end


def load_tensors(card: EncoderCard) -> Tensors:
    """Read an encoder's tensors in fp32, checked against its shape.

    Raises ModelError with the first missing, unexpected or misshaped tensor.
    """
    expected = expected_tensors(card.shape)
    found: Tensors = {}
    try:
        with safe_open(Path(card.weights), framework="pt") as file:
            for stored in list(file.keys()):
                name = stored.removeprefix("bert.")
                if not name.startswith(_UNUSED):
                    found[name] = file.get_tensor(stored).to(torch.float32)
    except (OSError, SafetensorError) as error:
        raise ModelError("corrupt", f"{card.weights} cannot be read: {error}.") from error
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise ModelError("corrupt", f"{card.weights} has no tensor {name}")
        if name not in expected:
            raise ModelError("unsupported", f"{card.weights} has an unexpected tensor {name}")
        if tuple(found[name].shape) != expected[name]:
            shape = tuple(found[name].shape)
            message = f"{card.weights}: {name} has shape {shape}; expected {expected[name]}"
            raise ModelError("corrupt", message)
    return found


def expected_tensors(shape: BertShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an encoder's tensors by Hugging Face name."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    found: dict[str, tuple[int, ...]] = {
        f"{_EMBEDDINGS}.word_embeddings.weight": (shape.vocab_size, hidden),
        f"{_EMBEDDINGS}.position_embeddings.weight": (shape.max_position_embeddings, hidden),
        f"{_EMBEDDINGS}.token_type_embeddings.weight": (shape.type_vocab_size, hidden),
    }
    norms, linears = [f"{_EMBEDDINGS}.LayerNorm"], []
    for number in range(shape.num_hidden_layers):
        layer = f"encoder.layer.{number}"
        linears += [
            (f"{layer}.attention.self.{part}", hidden, hidden) for part in ("query", "key", "value")
        ]
        linears += [
            (f"{layer}.attention.output.dense", hidden, hidden),
            (f"{layer}.intermediate.dense", inner, hidden),
            (f"{layer}.output.dense", hidden, inner),
        ]
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name in norms:
        found |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    for name, rows, columns in linears:
        found |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    return found


def _norm(tensors: Tensors, name: str, shape: BertShape) -> _Norm:
    return _Norm(tensors[f"{name}.weight"], tensors[f"{name}.bias"], shape.layer_norm_eps)


def _linear(tensors: Tensors, *names: str) -> _Linear:
    """Return the projections of these names one behind the other."""
    weights = torch.cat([tensors[f"{name}.weight"] for name in names])
    return _Linear(weights, torch.cat([tensors[f"{name}.bias"] for name in names]))


def _layer(tensors: Tensors, number: int, shape: BertShape) -> _Layer:
    name = f"encoder.layer.{number}"
    parts = (f"{name}.attention.self.{part}" for part in ("query", "key", "value"))
    return _Layer(
        qkv=_linear(tensors, *parts),
        out=_linear(tensors, f"{name}.attention.output.dense"),
        out_norm=_norm(tensors, f"{name}.attention.output.LayerNorm", shape),
        up=_linear(tensors, f"{name}.intermediate.dense"),
        down=_linear(tensors, f"{name}.output.dense"),
        down_norm=_norm(tensors, f"{name}.output.LayerNorm", shape),
    )
