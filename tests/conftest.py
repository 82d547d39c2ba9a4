"""What every test may rely on: hypothesis profiles, `--sim-seed`, markers that skip by reason, and
temporary files in memory.

Profiles: `quick` (the default), `full` (four times the examples of a property: CI), `long` (eight
times, and four times the runs of a state machine: `make nightly`), `deep` (others each time).
HYPOTHESIS_PROFILE names one. All but `deep` try the same examples each time: what they find is what
a change did.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.examples import FULL
from tests.unit.tenancy.storage.postgres_server import own_server

# Tests start hundreds of processes. Without bytecode, which images of containers turn off, each
# compiles hundreds of modules: a gateway starts with 2.1 CPU-seconds, not 1.0.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before anything imports one, in any order of tests.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # unset, Triton warns, and warnings are errors

IN_MEMORY = Path("/dev/shm")
IN_MEMORY_BYTES_MIN = 4 << 30
"""Free room with which temporary files are put there. A container often has 64 MiB."""

if (
    "TMPDIR" not in os.environ
    and os.access(IN_MEMORY, os.W_OK)
    and shutil.disk_usage(IN_MEMORY).free >= IN_MEMORY_BYTES_MIN
):
    # Every change of a store waits for its disk: 5 ms each, thousands of times. What a test starts
    # inherits it; `tempfile` has read it once already, for pytest.
    os.environ["TMPDIR"] = str(IN_MEMORY)
    tempfile.tempdir = None

TESTS = Path(__file__).parent
FOLDER_MARKERS = ("e2e", "crash", "attacks")
"""Folders of tests whose name is a marker of every test in them."""
KERNEL_TESTS = (
    TESTS / "unit/kernels",
    *(TESTS / "unit/engine" / name for name in ("encoder", "models", "runner", "sampling")),
)
"""Folders of tests that compile kernels, or run them slowly in an interpreter."""
PLANTED_TESTS = (TESTS / "property", TESTS / "sim")
"""Folders whose slow tests plant a fault, which a state machine or a simulation must find."""

SLOW_HOST = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
NOON_NS = 1_781_524_800 * 10**9
"""Of the 15th of June 2026."""

settings.register_profile(
    "quick",
    max_examples=FULL // 8,
    deadline=None,
    derandomize=True,
    phases=PHASES,
    suppress_health_check=SLOW_HOST,
)
settings.register_profile(
    "full",
    max_examples=FULL // 2,
    deadline=None,
    derandomize=True,
    print_blob=True,
    phases=PHASES,
    suppress_health_check=SLOW_HOST,
)
settings.register_profile("long", settings.get_profile("full"), max_examples=FULL)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=SLOW_HOST)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


postgres_server = pytest.fixture(scope="session")(own_server)
"""One PostgreSQL server for all tests that do not harm it."""


@pytest.fixture(autouse=True, scope="session")
def patient_stores() -> Generator[None, None, None]:
    """Let a store wait a minute behind other writers, not five seconds: writers of a busy machine
    take that long. Tests of the wait itself shorten it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenancy.storage.postgres.LOCK_WAIT", "60s")
        patch.setattr("tenancy.storage.sqlite.BUSY_TIMEOUT_MS", 60_000)
        yield


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes on from the noon of a month's fifteenth day, in this process: what is
    booked within the test lies in one minute, hour, day and month."""
    began_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "time_ns", lambda: NOON_NS + time.monotonic_ns() - began_ns)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the running event loop's clock forward by so many seconds: what is due runs in its next
    turn. A deadline that a busy machine cannot miss passes in no time."""
    passed_s = 0.0

    def move(seconds: float) -> None:
        nonlocal passed_s
        loop = asyncio.get_running_loop()
        if not passed_s:
            clock = loop.time
            monkeypatch.setattr(loop, "time", lambda: clock() + passed_s)
        passed_s += seconds

    return move


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--sim-seed N` replays one simulation."""
    parser.addoption("--sim-seed", type=int, default=None, help="replay this simulation alone")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, which looked at all of them again and again,
    and leave modules and tests, which stay, out of its later rounds: 10 ms each, not 300."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Quicken Triton's interpreter where a test has imported it."""
    if "triton.runtime.interpreter" in sys.modules and not torch.cuda.is_available():
        from tests.quick_interpreter import quicken

        quicken()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Compute with one thread: beside other workers, threads that wait for one another are slower.
    A runner that a test builds may have set another number."""
    torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect garbage after each file: what it left open fails its own last test, and not one of
    another file, long after. What stays is left out of later collections, which took two of five
    seconds of a whole run."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how to replay the order of a run that failed; `--quiet` leaves out the first lines."""
    seed = config.getoption("randomly_seed", None)
    if seed is not None and terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"in the order of --randomly-seed={seed}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by folder and fixtures; skip those that need a device where there is none. Slow
    ones come first: at the end no worker waits for another's last one."""
    for item in items:
        for name in _markers_of(item.path):
            item.add_marker(name)
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
        if _needs_postgres(item):
            item.add_marker("postgres")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@cache
def _markers_of(file: Path) -> tuple[str, ...]:
    """Return the markers of all tests of a file: by its folder or its name."""
    folder = file.relative_to(TESTS).parts[0]
    found = {
        folder: folder in FOLDER_MARKERS,
        "kernels": any(file.is_relative_to(path) for path in KERNEL_TESTS),
        "dashboard": file.name.startswith("test_dashboard"),
        "planted": any(file.is_relative_to(path) for path in PLANTED_TESTS),
    }
    return tuple(name for name, is_marked in found.items() if is_marked)


def _needs_postgres(item: pytest.Item) -> bool:
    """Whether a test asks for a server, or is the variant of a test that does."""
    if not isinstance(item, pytest.Function):
        return False
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return "postgres_server" in item.fixturenames or "postgres" in values


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`sim_seed` is each of ten fixed seeds and all that ever failed, or the one asked for."""
    if "sim_seed" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--sim-seed")
    seeds = [*range(10), *_recorded()] if chosen is None else [chosen]
    metafunc.parametrize("sim_seed", seeds)


def _recorded() -> list[int]:
    """Seeds that once failed: tests/sim/seeds.txt, one a line, with what it was after a #."""
    lines = (Path(__file__).parent / "sim" / "seeds.txt").read_text().splitlines()
    seeds = (line.split("#")[0].strip() for line in lines)
    return [int(seed) for seed in seeds if seed]
