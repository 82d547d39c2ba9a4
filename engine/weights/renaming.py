"""Turns tensors of published files into the engine's: renamed, split, stacked and reordered.

A family's tables (`engine.model_store.tensor_names`) say what each tensor of a file holds. Two
orders are settled here, so that no kernel knows them: rotating channels lie as rotation by halves
of the whole head reads them, and norm weights hold the factor itself. It reads no file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch

from engine.errors import ModelError
from engine.model_store import Architecture
from engine.model_store.architecture import Latent
from engine.model_store.tensor_names import Names, Source
from engine.weights.shapes import expected_shapes

Pieces = Iterator[tuple[str, torch.Tensor]]

_EXPERT = re.compile(r"(?<=\.experts\.)\d+")
_WHOLE_NAMES = ("self_attn.sinks", "mlp.gate.e_score_correction_bias")
"""Tensors without `.weight` or `.bias` behind their names."""
MXFP4_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""Values of a 4-bit float with 2 bits of exponent and 1 of mantissa, by their bits."""
_ROTATING = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Parts of grouped-query attention whose rows rotate."""


class TensorReader:
    """Takes the tensors of a file one by one and gives those of the model, in `dtype`.

    `names`: the common table and the family's own. Stacked experts are gathered, so a stack is
    given when its last expert has come.
    """

    def __init__(self, config: Architecture, names: Names, dtype: torch.dtype) -> None:
        self._config = config
        self._names = names
        self._dtype = dtype
        self._shapes = expected_shapes(config)
        self._stacks: dict[str, torch.Tensor] = {}
        self._missing: dict[str, set[int]] = {}
        self._packed: dict[str, torch.Tensor] = {}

    def take(self, layer: str, rest: str, tensor: torch.Tensor) -> Pieces:
        """Yield the model's tensors that this one completes.

        `layer`: the prefix of its layer in the model's names, empty outside layers. `rest`: its
        name in the file, behind the layer. Raises ModelError `corrupt` for a tensor that cannot be
        cut, stacked or unpacked into tensors of the expected shapes.
        """
        if rest.endswith(("_blocks", "_scales")):
            joined = self._unpacked(f"{layer}{rest[:-7]}", rest[-6:], tensor)
            if joined is None:
                return
            rest, tensor = f"{rest[:-7]}_blocks", joined
        number = _EXPERT.search(rest)
        pattern = _EXPERT.sub("*", rest)
        source, kind = self._names.get(pattern), "weight"
        if source is None:
            stem, _, kind = pattern.rpartition(".")
            source = self._names.get(stem)
        if source is None:
            yield from self._finish(f"{layer}{rest}", tensor)
            return
        names = [f"{layer}{_with_kind(part, kind)}" for part in source.parts]
        for name, piece in zip(names, self._split(source, names, tensor), strict=True):
            if number is None:
                yield from self._finish(name, piece)
            else:
                yield from self._stack(name, int(number[0]), piece)

    def _split(self, source: Source, names: list[str], tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts that a tensor holds."""
        form, count = source.form, len(names)
        if form in ("transposed", "in_turns_transposed"):
            tensor = tensor.mT
        if form in ("in_turns", "in_turns_transposed"):
            return [tensor[:, i::count] for i in range(count)]
        if form == "by_head":
            latent = self._config.latent
            if latent is None or tensor.numel() % (self._config.heads * latent.rank):
                return self._refuse(names, tensor)
            heads = tensor.reshape(self._config.heads, -1, latent.rank)
            return self._pieces(names, heads, 1)
        if count == 1:
            return [tensor]
        return self._pieces(names, tensor, 1 if form == "experts" else 0)

    def _pieces(self, names: list[str], tensor: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Cut a tensor along `dim` into parts of the expected sizes."""
        if any(name not in self._shapes for name in names):
            return self._refuse(names, tensor)
        sizes = [self._shapes[name][dim] for name in names]
        if tensor.dim() <= dim or sum(sizes) != tensor.shape[dim]:
            return self._refuse(names, tensor)
        return list(torch.split(tensor, sizes, dim))

    def _refuse(self, names: list[str], tensor: torch.Tensor) -> list[torch.Tensor]:
        raise ModelError(
            "corrupt",
            f"a tensor of shape {tuple(tensor.shape)} cannot hold {', '.join(names)}; expected"
            f" {[self._shapes.get(name) for name in names]}",
        )

    def _stack(self, name: str, expert: int, tensor: torch.Tensor) -> Pieces:
        """Put one expert into its stack; yield the stack when it is full."""
        shape = self._shapes.get(name)
        if shape is None or not expert < shape[0] or tuple(tensor.shape) != shape[1:]:
            raise ModelError(
                "corrupt",
                f"expert {expert} of {name} has shape {tuple(tensor.shape)}; expected {shape}",
            )
        if name not in self._stacks:
            self._stacks[name] = torch.empty(shape, dtype=self._dtype)
            self._missing[name] = set(range(shape[0]))
        self._stacks[name][expert] = tensor
        self._missing[name].discard(expert)
        if not self._missing[name]:
            yield name, self._stacks.pop(name)

    def _unpacked(self, name: str, half: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Keep one of blocks and scales; return the matrix when both have come."""
        other = self._packed.pop(name, None)
        if other is None:
            self._packed[name] = tensor
            return None
        blocks, scales = (tensor, other) if half == "blocks" else (other, tensor)
        if blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8:
            raise ModelError("corrupt", f"{name}: blocks {tuple(blocks.shape)} do not fit scales"
                             f" {tuple(scales.shape)}")  # fmt: skip
        return unpack_mxfp4(blocks, scales, self._dtype)

    def _finish(self, name: str, tensor: torch.Tensor) -> Pieces:
        """Yield a tensor in the engine's order."""
        shape = self._shapes.get(name)
        if shape is not None and tensor.shape != shape and tensor.numel() == math.prod(shape):
            tensor = tensor.reshape(shape)
        if shape is not None and tensor.shape == shape:
            tensor = self._ordered(name, tensor)
        if self._config.norms_less_one and name.endswith(("layernorm.weight", "norm.weight")):
            tensor = tensor.float() + 1.0
        yield name, tensor.to(self._dtype)

    def _ordered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return rows of q and k with their rotating channels where the kernels expect them."""
        config = self._config
        part = name.rpartition("self_attn.")[2].rpartition(".")[0]
        if config.latent is not None:
            return self._ordered_latents(part, config.latent, tensor)
        if part not in _ROTATING:
            return tensor
        rotating = next(iter(config.ropes.values())).dim
        order = head_order(config.head_dim, rotating, interleaved=config.interleaved)
        heads = tensor.reshape(-1, config.head_dim, *tensor.shape[1:])
        return heads[:, order].reshape(tensor.shape)

    def _ordered_latents(self, part: str, latent: Latent, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the rotating channels, which stand last in each query head and in a latent."""
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
        return tensor.reshape(-1, width, tensor.shape[1])[:, order].reshape(tensor.shape)


def head_order(head_dim: int, rotating: int, *, interleaved: bool) -> torch.Tensor:
    """Return which channel of a head in the file stands at each place in the engine, [D].

    The file's first `rotating` channels rotate, by neighbours if `interleaved`, else by halves. In
    the engine channel i rotates with channel i + D / 2, so the halves of the rotating channels
    begin the halves of the head. Scores do not change: q and k are reordered alike.
    """
    turning, still = torch.arange(rotating), torch.arange(rotating, head_dim)
    if interleaved:
        turning = torch.cat([turning[0::2], turning[1::2]])
    (first, second), (third, fourth) = turning.chunk(2), still.tensor_split(2)
    return torch.cat([first, third, second, fourth])


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [..., G * 32] of blocks [..., G, 16] uint8 and scales [..., G] uint8.

    A byte holds two 4-bit floats, the low one first; a scale is a power of two, biased by 127.
    """
    table = torch.tensor(MXFP4_VALUES, dtype=torch.float32)
    out = torch.empty(*blocks.shape[:-2], blocks.shape[-2] * 32, dtype=dtype)
    for at in range(len(blocks)):  # one expert at a time: a whole stack takes 8 bytes a weight
        pairs = torch.stack([table[(blocks[at] & 15).long()], table[(blocks[at] >> 4).long()]], -1)
        exponents = scales[at].to(torch.int32)[..., None] - 127
        out[at] = torch.ldexp(pairs.flatten(-2), exponents).flatten(-2)
    return out


def _with_kind(part: str, kind: str) -> str:
    """Return a part's name with `.weight` or `.bias`."""
    return part if part in _WHOLE_NAMES or part.endswith(".bias") else f"{part}.{kind}"
