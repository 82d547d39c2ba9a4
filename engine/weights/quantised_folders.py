"""Reads packed weights from folders: gathers the tensors that one weight consists of.

A layout of `engine.model_store.Quantisation` keeps codes, scales and zeros in tensors of their own,
in any order and perhaps in different files. What comes out has the weight's name, and is by rows as
`kernels.reference_weights.Packed` says. It knows no family and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from msgspec import Struct

from engine.errors import ModelError
from engine.model_store.architecture import Quantisation
from kernels.reference_weights import GROUP, Packed, Weight

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where column i of eight lies in a word of AWQ, in steps of 4 bits."""

BLOCK = 128
"""Rows and columns of a weight that share a scale, where blocks do."""

_IGNORED = (
    "input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale",
    "weight_shape", "g_idx", "input_zero_point",
)  # fmt: skip
"""Tensors beside weights that are not needed: scales of activations and KV measured beforehand,
shapes, and the groups of columns that lie in order."""

Parts = dict[str, torch.Tensor]


class _Form(Struct, frozen=True):
    """How a layout names the tensors of a weight, and what makes them one."""

    endings: tuple[str, ...]
    """The endings of their names, those in brackets where the weight has zeros."""
    read: Callable[[Parts, Quantisation], Packed]
    zeros: str = ""
    name: str = "weight"
    """What takes the place of the ending in the weight's name."""


class PackedReader:
    """Takes the tensors of a folder one by one, and gives whole weights."""

    def __init__(self, quantisation: Quantisation | None) -> None:
        self._quantisation = quantisation
        self._form = None if quantisation is None else _FORMS[quantisation.layout]
        self._waiting: dict[str, Parts] = {}

    def take(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Weight]]:
        """Yield the weight that this tensor completes. Raises ModelError `corrupt` where the parts
        of a weight do not fit each other."""
        form, quantisation = self._form, self._quantisation
        stem, ending = _cut(name, form)
        if form is None or quantisation is None or not ending:
            if form is None or not name.endswith(_IGNORED):
                yield name, tensor
            elif name.endswith("g_idx") and bool((tensor.diff() < 0).any()):
                raise ModelError("corrupt", f"{name}: its columns are reordered by their groups")
            return
        if ending == "weight" and tensor.dtype.itemsize > 1:  # one that is left as it was
            yield name, tensor
            return
        parts = self._waiting.setdefault(stem, {})
        parts["scale" if "scale" in ending else ending] = tensor
        wanted = len(form.endings) + bool(form.zeros and quantisation.has_zeros)
        if len(parts) < wanted:
            return
        del self._waiting[stem]
        try:
            packed = form.read(parts, quantisation)
        except (RuntimeError, KeyError, ValueError) as error:
            shapes = {part: tuple(one.shape) for part, one in parts.items()}
            told = f"{stem[:-1]}: its parts do not fit each other: {shapes}: {error}."
            raise ModelError("corrupt", told) from error
        yield f"{stem}{form.name}", packed

    def check(self) -> None:
        """Raise ModelError `corrupt` if a weight lacks a part."""
        for stem, parts in self._waiting.items():
            told = f"{stem[:-1]}: it has {', '.join(parts)}, and the rest of its parts is missing"
            raise ModelError("corrupt", told)


def _cut(name: str, form: _Form | None) -> tuple[str, str]:
    """Return a name without the ending that a layout knows, and the ending."""
    endings = () if form is None else (*form.endings, form.zeros)
    for ending in sorted(filter(None, endings), key=len, reverse=True):
        for written in (ending, f"{ending}_inv") if ending.endswith("scale") else (ending,):
            if name.endswith(written) and name[-len(written) - 1] in "._":
                return name.removesuffix(written), ending
    return name, ""


# --- layouts --------------------------------------------------------------------------------------


def _bytes(parts: Parts, quantisation: Quantisation) -> Packed:
    """Read fp8 or int8: a scale for the whole matrix, for each row, or for blocks of 128."""
    codes, scale = parts["weight"], parts["scale"].float()
    kind = "fp8" if quantisation.layout == "fp8" else "int8"
    if codes.dtype != {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[kind]:
        raise ValueError(f"codes are {codes.dtype}")
    rows, columns = codes.shape[-2:]
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    if scale.dim() == 2 and scale.shape == blocks and blocks != (rows, 1):
        scales = scale.repeat_interleave(BLOCK, 0)[:rows]
        return Packed("fp8" if kind == "fp8" else "int8", codes, scales.contiguous(), BLOCK)
    scales = scale.reshape(-1, 1).expand(rows, 1).contiguous()
    return Packed("fp8" if kind == "fp8" else "int8", codes, scales, columns)


def _blocks(parts: Parts, quantisation: Quantisation) -> Packed:
    """Read gpt-oss's experts: blocks [E, N, K / 32, 16] and scales [E, N, K / 32]."""
    blocks, scales = parts["blocks"], parts["scale"]
    if blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8:
        raise ValueError("expected 16 bytes for each scale")
    return Packed("mxfp4", blocks.flatten(-2), scales, GROUP)


def _mxfp4_rows(parts: Parts, quantisation: Quantisation) -> Packed:
    codes, scales = parts["weight_packed"], parts["scale"]
    if codes.shape[-1] * 2 != scales.shape[-1] * GROUP or scales.dtype != torch.uint8:
        raise ValueError("expected 16 bytes for each scale")
    return Packed("mxfp4", codes, scales, GROUP)


def _unpacked(
    words: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))
) -> torch.Tensor:
    """Return the eight codes of each word along `dim`."""
    codes = [((words >> (4 * place)) & 15).to(torch.uint8) for place in order]
    return torch.stack(codes, dim + 1).flatten(dim, dim + 1)


def _int4(
    quantisation: Quantisation, codes: torch.Tensor, scales: torch.Tensor,
    zeros: torch.Tensor | int,
) -> Packed:  # fmt: skip
    """Return rows of codes [N, K], with scales [N, G] and zeros like them, packed."""
    rows, columns = codes.shape
    scales, group = scales.float(), quantisation.group or columns
    if scales.shape != (rows, columns // group) or columns % group or columns % 2:
        raise ValueError("scales do not fit the codes")
    minima = -scales * zeros
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return Packed("int4", pairs, scales.contiguous(), group, minima.contiguous())


def _awq(parts: Parts, quantisation: Quantisation) -> Packed:
    """Read AWQ: words [K, N / 8], zeros [G, N / 8], scales [G, N]."""
    codes = _unpacked(parts["qweight"], 1, _AWQ_ORDER).T
    zeros = _unpacked(parts["qzeros"], 1, _AWQ_ORDER).T
    return _int4(quantisation, codes, parts["scale"].T, zeros)


def _gptq(parts: Parts, quantisation: Quantisation) -> Packed:
    """Read GPTQ: words [K / 8, N], zeros [G, N / 8], which its first version holds less 1, scales
    [G, N]."""
    codes = _unpacked(parts["qweight"], 0).T
    zeros = _unpacked(parts["qzeros"], 1).T.int()
    return _int4(quantisation, codes, parts["scale"].T, zeros + (quantisation.layout == "gptq"))


def _packed_rows(parts: Parts, quantisation: Quantisation) -> Packed:
    """Read compressed-tensors: words [N, K / 8], scales [N, G], zeros [N / 8, G]; without zeros 8
    means zero."""
    codes = _unpacked(parts["weight_packed"], 1)
    zeros = parts.get("weight_zero_point")
    return _int4(quantisation, codes, parts["scale"], 8 if zeros is None else _unpacked(zeros, 0))


_FORMS = {
    "fp8": _Form(("weight", "weight_scale"), _bytes),
    "int8": _Form(("weight", "weight_scale"), _bytes),
    "mxfp4": _Form(("blocks", "scales"), _blocks, name="blocks"),
    "mxfp4_rows": _Form(("weight_packed", "weight_scale"), _mxfp4_rows),
    "awq": _Form(("qweight", "scales"), _awq, zeros="qzeros"),
    "gptq": _Form(("qweight", "scales"), _gptq, zeros="qzeros"),
    "gptq_v2": _Form(("qweight", "scales"), _gptq, zeros="qzeros"),
    "packed_rows": _Form(
        ("weight_packed", "weight_scale"), _packed_rows, zeros="weight_zero_point"
    ),
}
