"""Builds the C kernels on the machine they run on, once, and calls them through ctypes.

It knows tensors and C structs, but no model and no request. The structure classes mirror `cpu.h`,
which documents their fields.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from kernels.reference_weights import Packed

FOLDER = Path(__file__).parent
SOURCES = (
    "cpu_threads.c", "cpu_linear.c", "cpu_tiles.c", "cpu_attention.c", "cpu_mxfp4.c",
    "cpu_codes.c", "cpu_codes_avx2.c", "cpu_experts.c", "cpu_recurrent.c", "cpu_decoder.c",
    "cpu_kv_formats.c", "cpu_kv_int8.c",
)  # fmt: skip
COMPILERS = ("gcc", "cc", "clang")
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-shared", "-fPIC", "-pthread"),
    "-U_FORTIFY_SOURCE",  # else each vector that Ubuntu's gcc stores is a call that checks sizes
)
COMPILE_TIMEOUT_S = 60
COMPILER_MESSAGE_MAX = 2_000
"""Characters of a compiler's message that are logged."""

log = logging.getLogger("trunkline.engine")

WIDE, PAIRS, DOT, TILES, BYTES = 0, 1, 2, 3, 4
"""Kinds of storage and multiplication; see `cpu.h`. BYTES is only of KV."""

STORE, ADD, SILU, GELU, CLAMPED, SQUARED = 0, 1, 2, 3, 4, 5
"""Epilogues of a product; see `cpu.h`."""

NOT_PACKED, MXFP4, INT4, INT8, INT8_16 = 0, 1, 2, 3, 4
"""How a product's right-hand side is packed; see `cpu.h`."""

PANEL = 16
"""Columns of a weight panel."""

COLUMNS_STEP = 32
"""The number to whose multiples packed columns are padded: products compute two panels at once."""

MXFP4_GROUP = 32
"""Values of MXFP4 that share an exponent."""

CODE_PACKINGS = {("int4", 32): INT4, ("int8", 32): INT8, ("int8", 16): INT8_16}
"""Packings of codes by kind and group, the values that share a scale and a minimum."""

TILE_DEPTH = 32
"""The number of which the depth of a product of the kind TILES must be a multiple."""


class CProduct(ctypes.Structure):
    """`Product` of `cpu.h`."""

    _fields_ = (
        ("a", c_void_p), ("b", c_void_p), ("c", c_void_p), ("pairs", c_void_p),
        ("rows", c_int32), ("depth", c_int32), ("columns", c_int32), ("kind", c_int32),
        ("epilogue", c_int32), ("bias", c_void_p), ("packing", c_int32), ("has_pairs", c_int32),
        ("c_pairs", c_void_p),
    )  # fmt: skip


SCORES = ("softmax", "sigmoid", "chosen_softmax")
"""Scores of a router's logits, in the order of `cpu.h`."""


class CExperts(ctypes.Structure):
    """`Experts` of `cpu.h`."""

    _fields_ = (
        *((name, c_void_p) for name in (
            "router", "router_bias", "choice_bias", "gate_up", "down",
        )),
        ("gate_up_packing", c_int32), ("down_packing", c_int32),
        *((name, c_void_p) for name in (
            "gate_up_bias", "down_bias", "shared_gate_up", "shared_down", "shared_gate",
        )),
    )  # fmt: skip


RULES = ("", "conv", "delta", "mamba")
"""Mixers of recurrent layers, in the order of `cpu.h`."""

RECURRENT_STEP = 16
"""The number of which the channels of recurrent layers must be multiples, in each part."""


class CRecurrence(ctypes.Structure):
    """`Recurrence` of `cpu.h`."""

    _fields_ = (
        *((name, c_void_p) for name in (
            "taps", "taps_bias", "rate", "dt_bias", "through", "norm",
        )),
        ("inputs_at", c_int64), ("matrices_at", c_int64),
    )  # fmt: skip


class CLayer(ctypes.Structure):
    """`Layer` of `cpu.h`."""

    _fields_ = (
        *((name, c_void_p) for name in (
            "attention_norm", "mlp_norm", "qkv", "output", "gate_up", "down", "qkv_bias",
            "output_bias", "gate_up_bias", "down_bias", "q_norm", "k_norm", "sinks", "cos", "sin",
            "attention_output_norm", "mlp_output_norm",
        )),
        *((name, c_int32) for name in (
            "qkv_packing", "output_packing", "gate_up_packing", "down_packing", "window", "group",
            "kv_row",
        )),
        ("experts", POINTER(CExperts)),
        ("recurrence", POINTER(CRecurrence)),
        ("gate", c_void_p), ("gate_bias", c_void_p), ("gate_packing", c_int32),
    )  # fmt: skip


class CModel(ctypes.Structure):
    """`Model` of `cpu.h`."""

    _fields_ = (
        *((name, c_int32) for name in (
            "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab",
            "kind", "kv_kind", "gated", "kv_rows", "q_norm_width", "k_norm_width", "centred",
            "parallel", "growth_context", "head_packing",
        )),
        *((name, c_float) for name in (
            "eps", "stream_eps", "scale", "cap", "growth", "embed_scale",
        )),
        *((name, c_int32) for name in (
            "experts", "top_k", "expert_width", "shared_width", "expert_gated", "expert_score",
            "renormalise", "expert_groups", "expert_groups_kept",
        )),
        ("expert_scale", c_float),
        *((name, c_int32) for name in (
            "rule", "conv_width", "conv_channels", "reader_width", "rule_heads", "rule_groups",
            "rule_rows", "rule_columns",
        )),
        ("layer", POINTER(CLayer)),
        *((name, c_void_p) for name in ("embeddings", "norm", "head", "kv")),
    )  # fmt: skip


class CPlace(ctypes.Structure):
    """`Place` of `cpu.h`."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("tables", "slots", "bundle", "segment", "own_keys")
    )


class CWork(ctypes.Structure):
    """`Work` of `cpu.h`."""

    _fields_ = (
        ("tokens", c_int32), ("bundles", c_int32), ("token_ids", c_void_p),
        ("positions", c_void_p), ("place", POINTER(CPlace)),
        *((name, c_void_p) for name in (
            "hidden", "normed", "qkv", "attended", "activated", "pairs",
        )),
        ("expert_tokens", c_int32),
        *((name, c_void_p) for name in (
            "expert_of", "expert_row", "expert_token", "expert_weight", "expert_logits",
            "expert_rows", "expert_activated", "expert_pairs", "mixed", "shared",
            "shared_activated",
        )),
        ("rows", c_int32),
        *((name, c_void_p) for name in ("row_first", "row_drafts", "row_slot", "states")),
        ("state_bytes", c_int64), ("convolved", c_void_p), ("gates", c_void_p),
    )  # fmt: skip


class Kernels:
    """The compiled library with a pool of `threads` threads. Calls release the GIL.

    The pool serves one call at a time, so one thread owns an instance.
    """

    def __init__(self, library: Path, threads: int) -> None:
        self._c = ctypes.CDLL(str(library))
        signatures: dict[str, tuple[object, Sequence[object]]] = {
            "has_dot": (c_int32, ()),
            "multiplies_codes": (c_int32, ()),
            "bf16_kind": (c_int32, ()),
            "head_dim_step": (c_int32, ()),
            "pool_new": (c_void_p, (c_int32,)),
            "pool_free": (None, (c_void_p,)),
            "pack": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int32)),
            "pack_mxfp4": (c_int32, (c_void_p, c_void_p, c_void_p, c_int32, c_int32)),
            "product": (None, (c_void_p, POINTER(CProduct))),
            "decoder_forward": (None, (c_void_p, POINTER(CModel), POINTER(CWork))),
            "decoder_logits": (
                None, (c_void_p, POINTER(CModel), c_void_p, c_void_p, c_void_p, c_int32)
            ),
        }  # fmt: skip
        for name, (result, arguments) in signatures.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        self.has_dot = bool(self._c.has_dot())
        self.has_codes = bool(self._c.multiplies_codes())
        self.bf16_kind = int(self._c.bf16_kind())
        self.head_dim_step = int(self._c.head_dim_step())
        self._pool = self._c.pool_new(threads)
        if not self._pool:
            raise MemoryError("no memory for a thread pool")
        self._end = weakref.finalize(self, self._c.pool_free, self._pool)
        self._end.atexit = False  # at exit, an engine thread may be in the middle of a step

    def close(self) -> None:
        """End the threads; no other call may follow. Garbage collection of the instance does it
        too."""
        self._end()

    def pack(
        self,
        weight: torch.Tensor,
        columns: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return weight [N, K] (bf16, then K is even, or fp32) in the panels that products read,
        padded to 32 columns.

        `columns` int32: row of `weight` for each column (-1: zeros), already padded; None keeps the
        order. `out`: where to write them, [padded columns * K] of the weight's dtype.
        """
        rows, depth = weight.shape
        columns = _order(rows) if columns is None else columns
        weight = weight.contiguous()
        packed = torch.empty(len(columns) * depth, dtype=weight.dtype) if out is None else out
        words = len(columns) * depth * weight.dtype.itemsize // 4
        assert packed.dtype == weight.dtype, packed.dtype
        assert packed.nbytes == 4 * words, packed.shape
        self._c.pack(
            self._pool, weight.data_ptr(), packed.data_ptr(), columns.data_ptr(), len(columns),
            words // len(columns),
        )  # fmt: skip
        return packed

    def pack_mxfp4(
        self, weight: torch.Tensor, columns: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return weight [N, K] bf16 in panels of MXFP4, a little over a quarter of its size; None
        if that would change a value, or where K is no multiple of 32. `columns`: see `pack`."""
        rows, depth = weight.shape
        if weight.dtype != torch.bfloat16 or depth % MXFP4_GROUP:
            return None
        columns = _order(rows) if columns is None else columns
        weight = weight.contiguous()
        packed = torch.empty(len(columns) * depth // MXFP4_GROUP * 17, dtype=torch.uint8)
        is_exact = self._c.pack_mxfp4(
            weight.data_ptr(), packed.data_ptr(), columns.data_ptr(), len(columns), depth
        )
        return packed if is_exact else None

    def pack_codes(self, weight: Packed, columns: torch.Tensor | None = None) -> torch.Tensor:
        """Return weight [N, K] of one of `CODE_PACKINGS`, with minima, in panels of the words that
        cpu_codes.c describes; scales and minima are rounded to fp16. `columns`: see `pack`."""
        rows, depth = weight.shape
        columns = (_order(rows) if columns is None else columns).long()
        padded = weight.each(lambda part: part[columns.clamp(min=0)])
        codes, scales, minima = padded.parts
        scales, minima = scales.half(), minima.half()
        scales[columns < 0], minima[columns < 0] = 0, 0
        factors = torch.stack([scales, minima], -1).view(torch.int32)
        factors = factors.view(-1, PANEL, depth // weight.group, 1).permute(0, 2, 3, 1)
        if weight.kind == "int8":
            pairs = codes.view(-1, PANEL, depth // weight.group, weight.group // 2, 2)
            lines = pairs.permute(0, 2, 3, 1, 4).flatten(2).contiguous().view(torch.int32)
            words = lines.view(*factors.shape[:2], -1, PANEL)
        else:
            codes = torch.stack([codes & 15, codes >> 4], -1).view(len(columns), depth).int()
            # Of 8 codes, k and k + 1 are at nibbles k / 2 and k / 2 + 4.
            shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)
            words = (codes.view(-1, PANEL, depth // weight.group, 4, 8) << shifts).sum(-1).int()
            words = words.permute(0, 2, 3, 1)
        return torch.cat([factors, words], 2).flatten()

    def product(
        self, a: torch.Tensor, packed: torch.Tensor, out: torch.Tensor, epilogue: int, kind: int,
        packing: int = NOT_PACKED,
    ) -> None:  # fmt: skip
        """Write a x packed to out, or as `epilogue` says. a [T, K] fp32, out [T, N] fp32."""
        rows, depth = a.shape
        pairs = torch.empty(rows * depth, dtype=torch.int32)
        self._c.product(
            self._pool,
            CProduct(
                a.data_ptr(), packed.data_ptr(), out.data_ptr(), pairs.data_ptr(),
                rows, depth, out.shape[1], kind, epilogue, None, packing,
            ),
        )  # fmt: skip

    def forward(self, model: CModel, work: CWork) -> None:
        """Run one step through all layers; writes `work`'s scratch and the KV of its slots."""
        self._c.decoder_forward(self._pool, model, work)

    def logits(self, model: CModel, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Write the logits of hidden [T, C] to out [T, vocab] fp32."""
        pairs = torch.empty(hidden.numel(), dtype=torch.int32)
        self._c.decoder_logits(
            self._pool, model, hidden.data_ptr(), out.data_ptr(), pairs.data_ptr(), len(hidden)
        )


def padded_columns(rows: int) -> int:
    """Return the columns of a packed weight of `rows` rows."""
    return -(-rows // COLUMNS_STEP) * COLUMNS_STEP


def _order(rows: int) -> torch.Tensor:
    """Return the columns of a packed weight in the weight's own order, padded."""
    columns = torch.arange(padded_columns(rows), dtype=torch.int32)
    columns[rows:] = -1
    return columns


def compile_library(cache: Path | None = None) -> Path | None:
    """Return the path of the shared library for this CPU; compile it if `cache` does not have it.

    Returns None if no compiler works, and logs the compiler's message. The first call takes
    three seconds. The file's name contains a digest of the sources, the flags and the CPU's
    features; the file is written atomically.
    """
    digest = hashlib.sha256("\n".join((*FLAGS, _cpu())).encode())
    for name in ("cpu.h", *SOURCES):
        digest.update((FOLDER / name).read_bytes())
    name = f"kernels-{digest.hexdigest()[:24]}.so"
    for folder in _cache_folders(cache):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not (folder / name).exists():
                _compile(folder / name)
        except subprocess.CalledProcessError as error:
            message = error.stderr.decode(errors="replace").strip()
            log.warning("kernels_not_compiled: %s", message[:COMPILER_MESSAGE_MAX])
            return None  # another folder would get the same message
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("kernels_not_compiled: %s: %s", folder, error)
            continue
        return folder / name
    return None


def _cache_folders(cache: Path | None) -> Iterator[Path]:
    """Yield folders for the library: the user's cache, or a temporary folder of this process."""
    if cache is not None:
        yield cache
        return
    with contextlib.suppress(RuntimeError):  # the user has no home directory
        yield Path.home() / ".cache" / "trunkline"
    own = tempfile.mkdtemp(prefix="trunkline-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    yield Path(own)


def _compile(target: Path) -> None:
    """Compile the library. Raises OSError or SubprocessError if no compiler works."""
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        partial = Path(scratch) / target.name
        command = [compiler, *FLAGS, "-o", str(partial), *(str(FOLDER / name) for name in SOURCES)]
        command.append("-lm")
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        partial.replace(target)


def _cpu() -> str:
    """Return the CPU features that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    prefixes = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(prefixes)}))
