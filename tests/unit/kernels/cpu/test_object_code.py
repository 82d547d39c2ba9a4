"""The hot loops of the compiled kernels: no sum may go through the stack.

A matrix tile holds up to 24 sums in registers. A compiler that runs out of registers stores some of
them in each step of the loop, which halves the speed and changes no result, so only the object code
shows it. gcc builds for several CPUs; the CPU that runs the test does not matter.

clang 20 stores up to half of the sums of 12 rows, and gcc 12 some of AVX2's 6 rows: both are left,
and `COMPILERS` prefers gcc.
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

FUNCTIONS = (
    *("tile_6_2", "tile_12_2", "tile_1_4", "score_rows", "value_rows"),
    *("int8_score_rows", "int8_scores", "int8_value_rows", "int8_values"),
)
"""Those of int8 only where a CPU has VNNI; gcc may put one of a pair into the other."""
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


@pytest.mark.parametrize("cpu", CPUS)
def test_hot_loops_store_no_sum_on_the_stack(cpu: str, tmp_path: Path) -> None:
    if not shutil.which("gcc") or not shutil.which("objdump"):
        pytest.skip("gcc or objdump is missing")
    library = tmp_path / "kernels.so"
    flags = [flag for flag in build.FLAGS if flag != "-march=native"]
    sources = [str(build.FOLDER / name) for name in build.SOURCES]
    command = ["gcc", *flags, f"-march={cpu}", "-o", str(library), *sources, "-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"gcc does not build for {cpu}: {built.stderr[:200]}")

    functions = disassemble(library)

    loops = [
        (name, body)
        for name in FUNCTIONS
        for body in inner_loops(functions.get(name, []))
        if sum(bool(MULTIPLY.match(text)) for text in body) >= 2
    ]
    assert loops, "the kernels have loops of products"
    spilled = [(name, text) for name, body in loops for text in body if STORE_TO_STACK.search(text)]
    assert not spilled
