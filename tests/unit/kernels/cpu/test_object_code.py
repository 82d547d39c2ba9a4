"""The hot loops of the compiled kernels: no sum may go through the stack.

A matrix tile holds up to 24 sums in registers. A compiler that runs out of registers stores some of
them in each step of the loop, which halves the speed and changes no result, so only the object code
shows it. gcc builds for several CPUs; the CPU that runs the test does not matter.

clang 20 stores up to half of the sums of 12 rows, which is left: `COMPILERS` prefers gcc. For AVX2,
gcc 12 also stores one of 12 sums of `value_rows`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import build

CPUS = ("skylake-avx512", "cooperlake", "sapphirerapids")
"""AVX-512; the same with bf16 products; the same beside AMX."""

AVX2_CPUS = ("haswell", "alderlake", "znver3")
"""16 registers, of which a tile of 6 rows needs 15; gcc orders a loop's instructions by the CPU."""

FUNCTIONS = (
    *("tile_6_2", "tile_12_2", "tile_1_4", "score_rows", "value_rows"),
    *("int8_score_rows", "int8_scores", "int8_value_rows", "int8_values"),
)
"""Those of int8 only where a CPU has VNNI; gcc may put one of a pair into the other."""
TILES = ("tile_1_8", "tile_1_4", "tile_2_4", "tile_3_2", "tile_4_2", "tile_5_2", "tile_6_2")
"""The products of AVX2, by rows and vectors of 8 columns."""

MULTIPLY = re.compile(r"vdpbf16ps|vpdpbusd|vfmadd")
STORE_TO_STACK = re.compile(r"%[yz]mm\d+,-?(0x)?[0-9a-f]*\(%r[sb]p\)")
JUMP = re.compile(r"j\w+\s+([0-9a-f]+)")
INSTRUCTION = re.compile(r"\s+([0-9a-f]+):\s+(.*)")

Instructions = list[tuple[int, str]]


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


def build_for(cpu: str, target: Path, sources: tuple[str, ...], *more: str) -> None:
    """Build a library for a CPU; skip the test where the tools or the CPU are unknown."""
    if not shutil.which("gcc") or not shutil.which("objdump"):
        pytest.skip("gcc or objdump is missing")
    flags = [flag for flag in build.FLAGS if flag != "-march=native"]
    paths = [str(build.FOLDER / name) for name in sources]
    command = ["gcc", *flags, f"-march={cpu}", *more, "-o", str(target), *paths, "-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"gcc does not build for {cpu}: {built.stderr[:200]}")


def product_loops(library: Path, names: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Return the innermost loops of these functions that multiply."""
    functions = disassemble(library)
    loops = [
        (name, body)
        for name in names
        for body in inner_loops(functions.get(name, []))
        if sum(bool(MULTIPLY.match(text)) for text in body) >= 2
    ]
    assert loops, "the kernels have loops of products"
    return loops


def spilled(loops: list[tuple[str, list[str]]]) -> list[tuple[str, str]]:
    """Return the instructions that store a sum on the stack."""
    return [(name, text) for name, body in loops for text in body if STORE_TO_STACK.search(text)]


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
def test_hot_loops_store_no_sum_on_the_stack(cpu: str, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    build_for(cpu, library, build.SOURCES)

    assert not spilled(product_loops(library, FUNCTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("cpu", AVX2_CPUS)
def test_products_fit_the_registers_of_avx2(cpu: str, tmp_path: Path) -> None:
    """Four spilled sums of 12 took a third of the speed, and one row's took as much."""
    library = tmp_path / "linear.so"
    build_for(cpu, library, ("cpu_linear.c",))

    loops = product_loops(library, TILES)

    assert {name for name, _ in loops} == set(TILES)
    assert not spilled(loops)


def test_spilled_sums_are_found(tmp_path: Path) -> None:
    """The planted fault: a build that may not use four of the registers."""
    library = tmp_path / "linear.so"
    taken = [f"-ffixed-xmm{number}" for number in range(12, 16)]
    build_for("haswell", library, ("cpu_linear.c",), *taken)

    assert spilled(product_loops(library, TILES))
