"""The header of a GGUF file: metadata and where each tensor lies. No weights are read.

Written by hand because start-up is part of the product: a model's 49,152 tokens and merges are read
in about 0.1 s. Everything is bounded by the size of the file before anything is allocated, so a
damaged or hostile file ends in a ModelError, never in a crash or a giant allocation. The format is
GGUF versions 2 and 3, little-endian (ggml's docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from msgspec import Struct

from engine.errors import ModelError

Value = int | float | bool | str | list["Value"]

_SCALARS = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    7: ("?", 1),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
_STRING, _ARRAY = 8, 9
_KEYS_MAX, _TENSORS_MAX, _DIMENSIONS_MAX, _NESTING_MAX = 65_536, 1_000_000, 8, 2
_KEY_BYTES_MAX, _TEXT_BYTES_MAX = 65_535, 1 << 26
_VALUES_MAX = 1 << 24
"""In all arrays together: a list is ten times as large in memory as in the file."""


class TensorInfo(Struct, frozen=True):
    """`shape` as GGUF writes it, fastest dimension first. `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GgufHeader(Struct, frozen=True):
    """`data_offset`: where tensor data begins."""

    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int

    def text(self, key: str) -> str | None:
        """A string of the metadata, or None."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def whole(self, key: str) -> int | None:
        """A whole number of the metadata, or None."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> float | None:
        """A number of the metadata, or None."""
        value = self.metadata.get(key)
        return float(value) if isinstance(value, int | float) else None

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty if it is missing. Raises ModelError if it is something else."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError("corrupt", f"{key} is not a list of strings.")
        return [str(item) for item in value]


class _Cursor:
    """Bounded reads from a buffer."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0
        self.values_left = _VALUES_MAX

    def take(self, count: int) -> int:
        """Move on by `count` bytes; where they began."""
        if count > self.size - self.at:
            raise ModelError("corrupt", f"The file ends at {self.size} bytes, inside its header.")
        start = self.at
        self.at += count
        return start

    def unpack(self, form: str, size: int) -> tuple[int | float | bool, ...]:
        return struct.unpack_from("<" + form, self.data, self.take(size))

    def whole(self, form: str, size: int) -> int:
        return int(self.unpack(form, size)[0])

    def text(self, longest: int = _TEXT_BYTES_MAX) -> str:
        length = self.whole("Q", 8)
        if length > longest:
            raise ModelError("corrupt", f"A text of {length} bytes; at most {longest} are read.")
        start = self.take(length)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError("corrupt", f"Text at byte {start} is not UTF-8.") from error

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise ModelError("corrupt", f"Value type {kind} at byte {self.at} does not exist.")
        form, size = _SCALARS[kind]
        return self.unpack(form, size)[0]

    def _array(self, depth: int) -> list[Value]:
        if depth >= _NESTING_MAX:
            raise ModelError("corrupt", f"Arrays nested more than {_NESTING_MAX} deep.")
        kind, count = self.whole("I", 4), self.whole("Q", 8)
        if count > self.values_left:
            raise ModelError("corrupt", f"Arrays of more than {_VALUES_MAX} values.")
        self.values_left -= count
        if kind in _SCALARS:
            form, size = _SCALARS[kind]
            if count > (self.size - self.at) // size:
                raise ModelError("corrupt", f"An array of {count} does not fit the file.")
            return list(self.unpack(f"{count}{form}", count * size))
        if count > (self.size - self.at) // 8:  # a string or an array takes at least 8 bytes
            raise ModelError("corrupt", f"An array of {count} does not fit the file.")
        return [self.value(kind, depth + 1) for _ in range(count)]


def read_header(path: Path) -> GgufHeader:
    """Metadata and tensor table. Raises ModelError: not_found, corrupt or unsupported."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except OSError as error:
        raise ModelError("not_found", f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError("corrupt", f"{path} is empty.") from error
    except ModelError as error:
        raise ModelError(error.code, f"{path}: {error.message}") from error


def parse_header(data: bytes) -> GgufHeader:
    """The same from bytes in memory."""
    return _parse(_Cursor(data))


def _parse(cursor: _Cursor) -> GgufHeader:
    if cursor.data[cursor.take(4) : 4] != b"GGUF":
        raise ModelError("corrupt", "This is not a GGUF file: it does not begin with GGUF.")
    version = cursor.whole("I", 4)
    if version not in (2, 3):
        raise ModelError("unsupported", f"GGUF version {version}; versions 2 and 3 are supported.")
    tensors, keys = cursor.whole("Q", 8), cursor.whole("Q", 8)
    if tensors > _TENSORS_MAX or keys > _KEYS_MAX:
        raise ModelError("corrupt", f"{tensors} tensors and {keys} metadata keys.")
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = cursor.text(_KEY_BYTES_MAX)
        if key in metadata:
            raise ModelError("corrupt", f"The metadata key {key!r} is there twice.")
        metadata[key] = cursor.value(cursor.whole("I", 4))
    infos = [_tensor(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 65_536:
        raise ModelError("corrupt", f"An alignment of {alignment}.")
    data_offset = -(-cursor.at // alignment) * alignment
    placed = []
    names: set[str] = set()
    for info in infos:
        offset = data_offset + info.offset
        if offset > cursor.size or info.name in names:
            raise ModelError("corrupt", f"Tensor {info.name} lies outside the file or is twice.")
        names.add(info.name)
        placed.append(TensorInfo(info.name, info.shape, info.type_id, offset))
    return GgufHeader(metadata, tuple(placed), data_offset)


def _tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.text(_KEY_BYTES_MAX)
    dimensions = cursor.whole("I", 4)
    if dimensions > _DIMENSIONS_MAX:
        raise ModelError("corrupt", f"Tensor {name} has {dimensions} dimensions.")
    shape = tuple(cursor.whole("Q", 8) for _ in range(dimensions))
    type_id, offset = cursor.whole("I", 4), cursor.whole("Q", 8)
    return TensorInfo(name, shape, type_id, offset)
