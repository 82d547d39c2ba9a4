"""Where the time of a step of the C kernels goes, by phase and number of threads.

    python -m tests.bench.cpu_phases [--threads 1,2] [--repeats N] [--spins 1500,20000]

Random weights in SmolLM2-135M's shape, as in `tests.bench.bench_step`, whose cases it runs. The
kernels are compiled a second time, with a clock around each phase of the thread pool
(`cpu_phases.c`). A phase's *wall* is its time, *busy* the share of the threads' time that was spent
in tasks: the rest is waiting, for a task or for the last thread. `--spins`: turns for which an idle
thread looks for work before it sleeps (the product's is the first). Medians of `repeats`, ms.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from kernels.cpu import build
from tests.bench.bench_step import BLOCKS, CASES, CPU, SHAPE, CpuSteps
from tests.bench.models import BLOCK
from tests.bench.results import print_line

SPINS = "#define SPINS 1500"
LAYER = ("norm", "qkv", "rope", "attention", "o", "norm", "gate_up", "down")
"""The phases of a layer, in their order."""


class Phase(ctypes.Structure):
    """`Phase` of `cpu_phases.c`."""

    _fields_ = (("wall_s", ctypes.c_double), ("busy_s", ctypes.c_double), ("tasks", ctypes.c_int64))


class Timing(NamedTuple):
    """Seconds of a run of a case, and of its phases: name, wall, busy of all threads."""

    total_s: float
    phases: list[tuple[str, float, float]]


def compile_timed(folder: Path, spins: int) -> Path:
    """Return the library with clocks around its phases. Raises where no compiler works."""
    for name in ("cpu.h", *build.SOURCES):
        text = (build.FOLDER / name).read_text()
        assert name != "cpu_threads.c" or SPINS in text, f"{name} has no {SPINS!r}"
        (folder / name).write_text(text.replace(SPINS, f"#define SPINS {spins}"))
    timer = Path(__file__).with_suffix(".c")
    target = folder / f"timed-{spins}.so"
    compiler = next(one for one in build.COMPILERS if not _fails([one, "--version"]))
    timed = [str(folder / name) for name in build.SOURCES if name != "cpu_threads.c"]
    plain = [str(folder / "cpu_threads.c"), str(timer)]
    flags = [flag for flag in build.FLAGS if flag != "-shared"]
    objects = []
    for source in (*timed, *plain):
        objects.append(str(folder / (Path(source).stem + ".o")))
        rename = ["-Dpool_run=timed_run"] if source in timed else []
        command = [compiler, *flags, *rename, f"-I{folder}", "-c", source, "-o", objects[-1]]
        subprocess.run(command, check=True, timeout=120)
    command = [compiler, "-shared", "-pthread", "-o", str(target), *objects, "-lm"]
    subprocess.run(command, check=True, timeout=120)
    return target


def _fails(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode != 0
    except OSError:
        return True


class Steps:
    """The cases of `bench_step` on one library with so many threads."""

    def __init__(self, library: Path, threads: int) -> None:
        self._kernels = build.Kernels(library, threads)
        self._c = ctypes.CDLL(str(library))
        layout = kv_format(SHAPE, torch.bfloat16, BLOCK, "panels")
        self._steps = CpuSteps(SHAPE, KvStorage(layout, BLOCKS, CPU), self._kernels)

    def close(self) -> None:
        self._kernels.close()

    def run(self, case: str) -> Timing:
        """Run a case once."""
        self._take()
        started_s = time.perf_counter()
        found: list[tuple[str, float, float]] = []
        for plan in CASES[case]:
            hidden = self._steps.forward(plan)
            forward = self._take()
            self._steps.model.logits(hidden)
            found += named(forward) + [("head", *one) for one in self._take()]
        return Timing(time.perf_counter() - started_s, found)

    def _take(self) -> list[tuple[float, float]]:
        out = ctypes.POINTER(Phase)()
        count = self._c.take_phases(ctypes.byref(out))
        return [(out[i].wall_s, out[i].busy_s) for i in range(count)]


def named(phases: list[tuple[float, float]]) -> list[tuple[str, float, float]]:
    """Return the phases of a forward with their names. The caller itself norms and rotates few
    rows."""
    layers = len(SHAPE.layers)
    alone = tuple(name for name in LAYER if name not in ("norm", "rope"))
    order = next(names for names in (LAYER, alone) if len(phases) // layers == len(names))
    names = [*order * layers, *("norm",) * (len(phases) - layers * len(order))]
    return [(name, *one) for name, one in zip(names, phases, strict=True)]


def report(case: str, threads: int, runs: list[Timing]) -> str:
    """Return a line: the case's time, then wall and busy share of each phase."""
    total = statistics.median(run.total_s for run in runs)
    names = list(dict.fromkeys(name for name, *_ in runs[0].phases))
    cells, inside = [], 0.0
    for name in names:
        wall = statistics.median(
            sum(wall for one, wall, _ in run.phases if one == name) for run in runs
        )
        busy = statistics.median(
            sum(busy for one, _, busy in run.phases if one == name) for run in runs
        )
        inside += wall
        cells.append(f"{name} {wall * 1e3:.2f} ({busy / threads / wall:.0%})")
    least = min(run.total_s for run in runs)
    return (
        f"{case:24} {threads:2} threads {total * 1e3:8.2f} (least {least * 1e3:.2f}): "
        + ", ".join(cells)
        + f", outside {(total - inside) * 1e3:.2f}"
    )


def main() -> None:
    """Print a line for each case, number of threads and number of spins."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default=str(os.cpu_count() or 1), help="with commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--spins", default="1500", help="with commas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        for spins in map(int, options.spins.split(",")):
            folder = Path(scratch) / str(spins)
            folder.mkdir()
            library = compile_timed(folder, spins)
            for threads in map(int, options.threads.split(",")):
                steps = Steps(library, threads)
                print(f"-- {threads} threads, {spins} spins")
                for case in CASES:
                    steps.run(case)
                    runs = [steps.run(case) for _ in range(options.repeats)]
                    print_line(report(case, threads, runs))
                steps.close()


if __name__ == "__main__":
    main()
