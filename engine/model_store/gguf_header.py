"""The GGUF header reader: metadata and tensor offsets. It reads no weights.

The `gguf` package's reader is not used, because start-up time matters: this one reads a model's
49,152 tokens and merges in about 0.1 s. Every size is checked against the size of the file before
memory is allocated, so a damaged or hostile file ends in a ModelError, never in a crash or a giant
allocation. The format is GGUF versions 2 and 3, little-endian (ggml's docs/gguf.md).
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path

import msgspec
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
_KEY_BYTES_MAX, _STRING_BYTES_MAX = 65_535, 1 << 26
_VALUES_MAX = 1 << 24
"""Most values in all arrays together: a list takes ten times its size in the file."""


_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Name of a shard of a split file, as llama.cpp names them: counted from 1, of how many."""


class TensorInfo(Struct, frozen=True):
    """One tensor. `shape` as GGUF writes it, fastest dimension first. `offset` in bytes from the
    start of its shard."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    shard: int = 0


class GgufHeader(Struct, frozen=True):
    """Metadata and tensor table of a file, or of all its shards."""

    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]

    def string(self, key: str) -> str | None:
        """Return a string of the metadata, or None."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """Return an integer of the metadata, or None."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> float | None:
        """Return a number of the metadata, or None."""
        value = self.metadata.get(key)
        return float(value) if isinstance(value, int | float) else None

    def numbers(self, key: str) -> list[float]:
        """Return a list of numbers, empty if the key is missing. Raises ModelError `corrupt` for
        any other value."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(n, int | float) for n in value):
            raise ModelError("corrupt", f"{key} is not a list of numbers.")
        return [float(n) for n in value if isinstance(n, int | float)]

    def strings(self, key: str) -> list[str]:
        """Return a list of strings, empty if the key is missing. Raises ModelError `corrupt` for
        any other value."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError("corrupt", f"{key} is not a list of strings.")
        return [str(item) for item in value]


class _Cursor:
    """Bounded reads from a buffer."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.size = len(data)
        self.position = 0
        self.values_left = _VALUES_MAX

    def take(self, count: int) -> int:
        """Advance by `count` bytes; return the offset before. Raises ModelError at the end."""
        if count > self.size - self.position:
            raise ModelError("corrupt", f"the file ends inside its header, after {self.size} bytes")
        start = self.position
        self.position += count
        return start

    def unpack(self, format_: str, size: int) -> tuple[int | float | bool, ...]:
        """Read values of a `struct` format that takes `size` bytes."""
        return struct.unpack_from("<" + format_, self.data, self.take(size))

    def integer(self, format_: str, size: int) -> int:
        """Read one integer of a `struct` format."""
        return int(self.unpack(format_, size)[0])

    def string(self, longest: int = _STRING_BYTES_MAX) -> str:
        """Read a length-prefixed string of at most `longest` bytes."""
        length = self.integer("Q", 8)
        if length > longest:
            raise ModelError("corrupt", f"string of {length} bytes; limit {longest}")
        start = self.take(length)
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError("corrupt", f"the string at byte {start} is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Value:
        """Read a metadata value of a GGUF type; `depth`: nesting of arrays around it."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise ModelError("corrupt", f"unknown value type {kind} at byte {self.position}")
        format_, size = _SCALARS[kind]
        return self.unpack(format_, size)[0]

    def _array(self, depth: int) -> list[Value]:
        if depth >= _NESTING_MAX:
            raise ModelError("corrupt", f"arrays are nested more than {_NESTING_MAX} deep")
        kind, count = self.integer("I", 4), self.integer("Q", 8)
        if count > self.values_left:
            raise ModelError("corrupt", f"arrays have more than {_VALUES_MAX} values")
        self.values_left -= count
        if kind in _SCALARS:
            format_, size = _SCALARS[kind]
            if count > (self.size - self.position) // size:
                raise ModelError("corrupt", f"an array of {count} values is larger than the file")
            return list(self.unpack(f"{count}{format_}", count * size))
        if count > (self.size - self.position) // 8:  # a string or an array takes at least 8 bytes
            raise ModelError("corrupt", f"an array of {count} values is larger than the file")
        return [self.value(kind, depth + 1) for _ in range(count)]


def gguf_shards(path: Path) -> tuple[Path, ...]:
    """Return the files that a GGUF file consists of by its name: itself, or the shards of the split
    file to which it belongs. Raises ModelError `not_found` for a shard that is missing."""
    named = _SHARD.fullmatch(path.name)
    if named is None:
        return (path,)
    stem, count = named[1], int(named[3])
    shards = [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [one.name for one in shards if not one.is_file()]
    if missing or not shards:
        raise ModelError(
            "not_found", f"{path} is one of {count} shards; expected {', '.join(missing[:3])} too"
        )
    return tuple(shards)


def shard_stem(path: Path) -> str:
    """Return the name of a GGUF file without its ending and without a shard's number."""
    named = _SHARD.fullmatch(path.name)
    return path.stem if named is None else named[1]


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table of a file, or of all shards of a split one: the metadata is
    the first shard's. Raises ModelError: not_found, corrupt or unsupported."""
    shards = gguf_shards(path)
    first, *others = (_read_shard(one) for one in shards)
    count = first.integer("split.count") or 1
    if count != len(shards):
        raise ModelError(
            "corrupt",
            f"{path} is one of {count} shards; expected files named NAME-00001-of-{count:05}.gguf",
        )
    tensors = list(first.tensors)
    for shard, header in enumerate(others, 1):
        tensors += (msgspec.structs.replace(one, shard=shard) for one in header.tensors)
    total = first.integer("split.tensors.count")
    if len({one.name for one in tensors}) < len(tensors) or total not in (None, len(tensors)):
        raise ModelError(
            "corrupt",
            f"{path}: its {len(shards)} shards have {len(tensors)} tensors; expected {total}, each"
            " once",
        )
    return GgufHeader(first.metadata, tuple(tensors))


def _read_shard(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_header(data)
    except OSError as error:
        raise ModelError("not_found", f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError("corrupt", f"{path} is empty.") from error
    except ModelError as error:
        raise ModelError(error.code, f"{path}: {error.message}") from error


def parse_header(data: mmap.mmap | bytes) -> GgufHeader:
    """Read the header from a whole file's bytes. Raises ModelError: corrupt or unsupported."""
    cursor = _Cursor(data)
    if data[cursor.take(4) : 4] != b"GGUF":
        raise ModelError("corrupt", "not a GGUF file: expected the magic GGUF")
    version = cursor.integer("I", 4)
    if version not in (2, 3):
        raise ModelError("unsupported", f"unsupported GGUF version: {version}; expected 2 or 3")
    tensors, keys = cursor.integer("Q", 8), cursor.integer("Q", 8)
    if tensors > _TENSORS_MAX or keys > _KEYS_MAX:
        raise ModelError("corrupt", f"too many entries: {tensors} tensors and {keys} metadata keys")
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = cursor.string(_KEY_BYTES_MAX)
        if key in metadata:
            raise ModelError("corrupt", f"duplicate metadata key: {key!r}")
        metadata[key] = cursor.value(cursor.integer("I", 4))
    infos = [_tensor(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 65_536:
        raise ModelError("corrupt", f"invalid general.alignment: {alignment}; expected 1 to 65536")
    data_offset = -(-cursor.position // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    for info in infos:
        offset = data_offset + info.offset
        if offset > cursor.size or info.name in placed:
            raise ModelError("corrupt", f"tensor {info.name} is outside the file or duplicate")
        placed[info.name] = msgspec.structs.replace(info, offset=offset)
    return GgufHeader(metadata, tuple(placed.values()))


def _tensor(cursor: _Cursor) -> TensorInfo:
    """Read an entry of the tensor table; its offset is counted from the first tensor's data."""
    name = cursor.string(_KEY_BYTES_MAX)
    dimensions = cursor.integer("I", 4)
    if dimensions > _DIMENSIONS_MAX:
        raise ModelError(
            "corrupt", f"tensor {name} has {dimensions} dimensions; limit {_DIMENSIONS_MAX}"
        )
    shape = tuple(cursor.integer("Q", 8) for _ in range(dimensions))
    type_id, offset = cursor.integer("I", 4), cursor.integer("Q", 8)
    return TensorInfo(name, shape, type_id, offset)
