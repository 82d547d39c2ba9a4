"""Turns tensors of published files into the engine's: renamed, split, stacked and reordered.

A family's tables (`engine.model_store.tensors`) say what each tensor of a file holds. Three
orders are settled here, so that no kernel knows them: rotating channels lie as rotation by halves
of the whole head reads them, the delta rule's heads of values lie by the heads of keys that they
belong to, and norm weights hold the factor itself. It reads no file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial

import torch

from engine.errors import ModelError
from engine.model_store import Architecture
from engine.model_store.architecture import Delta, Latent
from engine.model_store.tensors import Names, Source, expected_shapes
from kernels.reference_weights import Packed, Weight, each

Pieces = Iterator[tuple[str, Weight]]

_EXPERT = re.compile(r"(?<=\.experts\.)\d+")
WIDE_NAMES = (
    "linear_attn.A_log", "linear_attn.dt_bias", "mamba.A_log", "mamba.dt_bias", "mamba.D"
)  # fmt: skip
"""Tensors of recurrent rules that stay in 32 bits: a decay is an exponential of them."""
_WHOLE_NAMES = ("self_attn.sinks", "mlp.gate.e_score_correction_bias", *WIDE_NAMES)
"""Tensors without `.weight` or `.bias` behind their names."""
_ROTATING = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Parts of grouped-query attention with rows that rotate."""


class TensorReader:
    """Takes the weights of a file one by one and gives those of the model, in `dtype` or packed as
    they are.

    `names`: the common table and the family's own. Stacked experts are gathered, so a stack is
    given when its last expert has come.
    """

    def __init__(self, config: Architecture, names: Names, dtype: torch.dtype) -> None:
        self._config = config
        self._names = names
        self._dtype = dtype
        self._shapes = expected_shapes(config)
        self._stacks: dict[str, Weight] = {}
        self._missing: dict[str, set[int]] = {}

    def take(self, layer: str, rest: str, tensor: Weight) -> Pieces:
        """Yield the model's tensors that this one completes.

        `layer`: the prefix of its layer in the model's names, empty outside layers. `rest`: its
        name in the file, behind the layer. Raises ModelError `corrupt` for a tensor that cannot be
        cut or stacked into tensors of the expected shapes.
        """
        number = _EXPERT.search(rest)
        pattern = _EXPERT.sub("*", rest)
        source, kind = self._names.get(pattern), "weight"
        if source is None:
            stem, _, kind = pattern.rpartition(".")
            source = self._names.get(stem)
        if source is None:
            yield from self._finish(f"{layer}{rest}", tensor)
            return
        names = [self._own(f"{layer}{_with_kind(part, kind)}") for part in source.parts]
        for name, piece in zip(names, self._split(source, names, tensor), strict=True):
            if number is None:
                yield from self._finish(name, piece)
            else:
                yield from self._stack(name, int(number[0]), piece)

    def _own(self, name: str) -> str:
        """Return the model's name of a tensor: in a layer without experts, the MLP that all tokens
        take is the layer's."""
        return name if name in self._shapes else name.replace("mlp.shared_expert.", "mlp.")

    def _split(self, source: Source, names: list[str], tensor: Weight) -> list[Weight]:
        """Return the parts that a tensor holds."""
        form, count = source.form, len(names)
        if form in ("transposed", "in_turns_transposed"):
            if isinstance(tensor, Packed):
                return self._refuse(names, tensor)
            tensor = tensor.mT
        if form == "decay" and isinstance(tensor, torch.Tensor):
            return [tensor.neg().log()]
        if form in ("in_turns", "in_turns_transposed"):
            return [each(tensor, partial(_every, count, i)) for i in range(count)]
        if form in ("rows_by_head", "rows_by_key_head"):
            return self._rows_by_head(form, names, tensor)
        if form == "by_head":
            count = self._config.heads
            if tensor.shape[0] % count:
                return self._refuse(names, tensor)
            heads = each(tensor, lambda part: part.reshape(count, -1, part.shape[-1]))
            return self._pieces(names, heads, 1)
        if count == 1:
            return [tensor]
        return self._pieces(names, tensor, 1 if form == "experts" else 0)

    def _pieces(self, names: list[str], tensor: Weight, dim: int) -> list[Weight]:
        """Cut a tensor along `dim` into parts of the expected sizes."""
        if any(name not in self._shapes for name in names):
            return self._refuse(names, tensor)
        sizes = [self._shapes[name][dim] for name in names]
        if len(tensor.shape) <= dim or sum(sizes) != tensor.shape[dim]:
            return self._refuse(names, tensor)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [
            each(tensor, partial(torch.narrow, dim=dim, start=end - size, length=size))
            for end, size in zip(ends, sizes, strict=True)
        ]

    def _rows_by_head(self, form: str, names: list[str], tensor: Weight) -> list[Weight]:
        """Return the parts of rows that hold all parts of one head, then those of the next."""
        delta = self._config.delta
        heads = self._config.heads
        if form == "rows_by_key_head" and delta is not None:
            heads = delta.key_heads
        rows = [self._shapes[name][0] for name in names if name in self._shapes]
        if len(rows) < len(names) or sum(rows) != tensor.shape[0]:
            return self._refuse(names, tensor)
        sizes, found, start = [count // heads for count in rows], list[Weight](), 0
        for size in sizes:
            at = partial(_rows_of_heads, heads, start, size)
            found.append(each(tensor, at))
            start += size
        return found

    def _refuse(self, names: list[str], tensor: Weight) -> list[Weight]:
        raise ModelError(
            "corrupt",
            f"a tensor of shape {tuple(tensor.shape)} cannot hold {', '.join(names)}; expected"
            f" {[self._shapes.get(name) for name in names]}",
        )

    def _stack(self, name: str, expert: int, tensor: Weight) -> Pieces:
        """Put one expert into its stack; yield the stack when it is full."""
        shape = self._shapes.get(name)
        if shape is None or not expert < shape[0] or tuple(tensor.shape) != shape[1:]:
            raise ModelError(
                "corrupt",
                f"expert {expert} of {name} has shape {tuple(tensor.shape)}; expected {shape}",
            )
        if name not in self._stacks:
            count, dtype = shape[0], None if isinstance(tensor, Packed) else self._dtype
            self._stacks[name] = each(tensor, lambda part: _stack_like(part, count, dtype))
            self._missing[name] = set(range(count))
        _put(self._stacks[name], expert, tensor, name)
        self._missing[name].discard(expert)
        if not self._missing[name]:
            yield name, self._stacks.pop(name)

    def _finish(self, name: str, tensor: Weight) -> Pieces:
        """Yield a tensor in the engine's order."""
        shape = self._shapes.get(name)
        if shape is not None and isinstance(tensor, torch.Tensor):
            tensor = tensor.reshape(shape) if tensor.numel() == math.prod(shape) else tensor
        if shape is not None and tuple(tensor.shape) == shape:
            tensor = self._ordered(name, tensor)
        if isinstance(tensor, Packed):
            yield name, tensor
            return
        is_norm = name.endswith(("layernorm.weight", "norm.weight"))
        if self._config.norms_less_one and is_norm and "linear_attn." not in name:
            tensor = tensor.float() + 1.0
        yield name, tensor.to(torch.float32 if name.endswith(WIDE_NAMES) else self._dtype)

    def _ordered(self, name: str, tensor: Weight) -> Weight:
        """Return a tensor with its channels and heads where the kernels expect them."""
        config = self._config
        if config.values_in_turns and config.delta is not None and "linear_attn." in name:
            return _values_by_key_head(name.rpartition("linear_attn.")[2], config.delta, tensor)
        part = name.rpartition("self_attn.")[2].rpartition(".")[0]
        if config.latent is not None:
            return self._ordered_latents(part, config.latent, tensor)
        if part not in _ROTATING:
            return tensor
        rotating = next(iter(config.ropes.values())).dim
        order = head_order(config.head_dim, rotating, interleaved=config.interleaved)
        return each(tensor, lambda rows: _reordered(rows, order))

    def _ordered_latents(self, part: str, latent: Latent, tensor: Weight) -> Weight:
        """Reorder the rotating channels, which are last in each query head and in a latent."""
        widths = {
            "q_proj": latent.nope + latent.rope,
            "q_b_proj": latent.nope + latent.rope,
            "kv_a_proj_with_mqa": latent.rank + latent.rope,
        }
        if part not in widths:
            return tensor
        width = widths[part]
        order = torch.arange(width)
        turned = head_order(latent.rope, latent.rope, interleaved=self._config.interleaved)
        order[width - latent.rope :] = turned + width - latent.rope
        return each(tensor, lambda rows: _reordered(rows, order))


def head_order(head_dim: int, rotating: int, *, interleaved: bool) -> torch.Tensor:
    """Return which channel of a head in the file is at each place in the engine, [D].

    The file's first `rotating` channels rotate, by neighbours if `interleaved`, else by halves. In
    the engine channel i rotates with channel i + D / 2, so the halves of the rotating channels
    begin the halves of the head. Scores do not change: q and k are reordered alike.
    """
    turning, still = torch.arange(rotating), torch.arange(rotating, head_dim)
    if interleaved:
        turning = torch.cat([turning[0::2], turning[1::2]])
    (first, second), (third, fourth) = turning.chunk(2), still.tensor_split(2)
    return torch.cat([first, third, second, fourth])


def _values_by_key_head(part: str, delta: Delta, tensor: Weight) -> Weight:
    """Return a tensor whose heads of values lie in turns over the heads of keys with those of one
    head of keys side by side. Packed columns are unpacked where a head cuts a group of them."""
    order = torch.arange(delta.value_heads).view(-1, delta.key_heads).T.reshape(-1)
    if part.startswith(("norm", "q_proj", "k_proj")):
        return tensor
    if part.startswith("out_proj"):
        if isinstance(tensor, Packed) and any(p.shape[-1] % len(order) for p in tensor.parts):
            tensor = tensor.dense(torch.float32)
        if isinstance(tensor, Packed):
            return tensor.with_parts(*(_columns_in(order, part) for part in tensor.parts))
        return _columns_in(order, tensor)
    keys = 2 * delta.keys if part.startswith("conv") else 0
    return each(tensor, lambda rows: torch.cat([rows[:keys], _heads_in(order, rows[keys:])]))


def _heads_in(order: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of as many heads as `order` has with the heads in this order."""
    return rows.reshape(len(order), -1)[order].reshape(rows.shape)


def _columns_in(order: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return columns of as many heads as `order` has with the heads in this order."""
    return columns.reshape(len(columns), len(order), -1)[:, order].reshape(columns.shape)


def _reordered(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return rows with those of each head in another order."""
    return rows.reshape(-1, len(order), *rows.shape[1:])[:, order].reshape(rows.shape)


def _rows_of_heads(heads: int, start: int, size: int, rows: torch.Tensor) -> torch.Tensor:
    """Return `size` rows of each head, from number `start` of it on."""
    by_head = rows.reshape(heads, -1, *rows.shape[1:])
    return by_head[:, start : start + size].reshape(-1, *rows.shape[1:])


def _every(count: int, first: int, stacked: torch.Tensor) -> torch.Tensor:
    return stacked[:, first::count]


def _stack_like(part: torch.Tensor, count: int, dtype: torch.dtype | None) -> torch.Tensor:
    return part.new_empty((count, *part.shape), dtype=dtype)


def _put(stack: Weight, expert: int, weight: Weight, name: str) -> None:
    """Put one expert's weight into the stack of all."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    if isinstance(stack, Packed) and isinstance(weight, Packed) and stack.kind == weight.kind:
        pairs = list(zip(stack.parts, weight.parts, strict=False))
    elif isinstance(stack, torch.Tensor) and isinstance(weight, torch.Tensor):
        pairs = [(stack, weight)]
    if not pairs or any(whole.shape[1:] != part.shape for whole, part in pairs):
        raise ModelError("corrupt", f"experts of {name} are of unlike kinds; expected one kind")
    for whole, part in pairs:
        whole[expert] = part


def _with_kind(part: str, kind: str) -> str:
    """Return a part's name with `.weight` or `.bias`."""
    return part if part in _WHOLE_NAMES or part.endswith(".bias") else f"{part}.{kind}"
