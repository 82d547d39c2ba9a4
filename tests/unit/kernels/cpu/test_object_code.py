"""The hot loops of the compiled kernels: no sum may go through the stack.

A matrix tile holds up to 24 sums in registers. A compiler that runs out of registers stores some of
them in each step of the loop, which halves the speed and changes no result, so only the object code
shows it. Compilers differ in it from version to version, so each that is installed is asked; each
builds for several CPUs, and the CPU that runs the test does not matter.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import build

NAMES = ("gcc", "gcc-12", "gcc-13", "gcc-14", "clang", "clang-18", "clang-19")
COMPILERS = {Path(path).resolve(): name for name in NAMES if (path := shutil.which(name))}
"""The names of the installed compilers, each once, by the file behind the name."""

CPUS = ("haswell", "sapphirerapids")
"""AVX2, whose 16 registers a tile of 6 rows just fits; AVX-512 with bf16 products, beside AMX."""
OTHER_CPUS = ("skylake-avx512", "cooperlake", "alderlake", "znver3")
"""CPUs with instructions of these, which compilers order by the CPU."""

TILES = {"tile_1_4", "tile_6_2"}
"""Functions with loops of products on every CPU. Those of attention may be put into callers."""

NO_SUMS = {"finish", "mxfp4_product"}
"""Functions whose loops store other things: constants, and the exponents of a group."""

MULTIPLY = re.compile(r"vdpbf16ps|vpdpbusd|vpmaddwd|vfmadd")
STORE_TO_STACK = re.compile(r"%[yz]mm\d+,-?(0x)?[0-9a-f]*\(%r[sb]p\)")
JUMP = re.compile(r"j\w+\s+([0-9a-f]+)")
INSTRUCTION = re.compile(r"\s+([0-9a-f]+):\s+(.*)")

Instructions = list[tuple[int, str]]

pytestmark = pytest.mark.compiled


def disassemble(library: Path) -> dict[str, Instructions]:
    """Return the instructions of each function, with their addresses."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions: dict[str, Instructions] = {}
    name = ""
    for line in text.splitlines():
        if head := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            name = head[1].partition(".")[0]
        elif name and (found := INSTRUCTION.match(line)):
            functions.setdefault(name, []).append((int(found[1], 16), found[2]))
    return functions


def inner_loops(code: Instructions) -> list[list[str]]:
    """Return the bodies of the loops that contain no other loop."""
    at = {address: index for index, (address, _) in enumerate(code)}
    loops = [
        (at[target], index)
        for index, (_, text) in enumerate(code)
        if (jump := JUMP.match(text)) and at.get(target := int(jump[1], 16), index + 1) <= index
    ]
    return [
        [text for _, text in code[first : last + 1]]
        for first, last in loops
        if not any(
            other != (first, last) and first <= other[0] and other[1] <= last for other in loops
        )
    ]


def build_for(
    compiler: str,
    cpu: str,
    target: Path,
    *more: str,
    before: tuple[str, ...] = (),
    sources: tuple[str, ...] = build.SOURCES,
) -> None:
    """Build the library for a CPU; skip the test where the compiler does not know the CPU.

    `before`, `more`: flags before and after the product's. `sources`: a planted fault shows in one
    file, and attention alone takes half of the compiler's time."""
    if not shutil.which("objdump"):
        pytest.skip("objdump is missing")
    machine = [compiler, f"-march={cpu}"]
    if subprocess.run([*machine, "-E", "-xc", "/dev/null"], capture_output=True).returncode:
        pytest.skip(f"{compiler} does not build for {cpu}")
    flags = [flag for flag in build.FLAGS if flag != "-march=native"]
    paths = [str(build.FOLDER / name) for name in sources]
    command = [*machine, *before, *flags, *more, "-o", str(target), *paths, "-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert not built.returncode, built.stderr


def product_loops(library: Path) -> list[tuple[str, list[str]]]:
    """Return the innermost loops that multiply, with the names of their functions."""
    return [
        (name, body)
        for name, code in disassemble(library).items()
        for body in inner_loops(code)
        if name not in NO_SUMS and sum(bool(MULTIPLY.match(text)) for text in body) >= 2
    ]


def calls(loops: list[tuple[str, list[str]]]) -> list[tuple[str, str]]:
    """Return the calls of other functions."""
    return [(name, text) for name, body in loops for text in body if text.startswith("call")]


def spilled(loops: list[tuple[str, list[str]]]) -> list[tuple[str, str]]:
    """Return the instructions that store a sum on the stack."""
    return [(name, text) for name, body in loops for text in body if STORE_TO_STACK.search(text)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cpu", [*CPUS, *(pytest.param(cpu, marks=pytest.mark.nightly) for cpu in OTHER_CPUS)]
)
@pytest.mark.parametrize("compiler", COMPILERS.values())
def test_hot_loops_store_no_sum_on_the_stack(compiler: str, cpu: str, tmp_path: Path) -> None:
    """For AVX2, gcc 13 stored 2 of 12 sums and took 2.2 times as long; clang 19 up to half of 24
    for AVX-512."""
    library = tmp_path / "kernels.so"
    build_for(compiler, cpu, library)

    loops = product_loops(library)

    assert {name for name, _ in loops} >= TILES
    assert not spilled(loops)


@pytest.mark.slow
def test_hot_loops_call_nothing_with_a_distributions_own_flags(tmp_path: Path) -> None:
    """Ubuntu's gcc checks the size of each `memcpy`: one call for a vector of probabilities."""
    if not (compiler := shutil.which("gcc")):
        pytest.skip("gcc is missing")
    library = tmp_path / "kernels.so"
    checked = ("-D_FORTIFY_SOURCE=3", "-fstack-protector-strong", "-fstack-clash-protection")

    build_for(compiler, "skylake-avx512", library, before=checked)
    assert not calls(product_loops(library))
    assert not spilled(product_loops(library))

    planted = ("cpu_recurrent.c",)
    build_for(compiler, "skylake-avx512", library, *checked, sources=planted)
    assert calls(product_loops(library))


@pytest.mark.slow
def test_spilled_sums_are_found(tmp_path: Path) -> None:
    """The planted fault: a build that may not use four of the registers."""
    if not (compiler := shutil.which("gcc")):
        pytest.skip("gcc is missing")
    library = tmp_path / "kernels.so"
    taken = [f"-ffixed-xmm{number}" for number in range(12, 16)]
    build_for(compiler, "haswell", library, *taken, sources=("cpu_linear.c",))

    assert spilled(product_loops(library))
