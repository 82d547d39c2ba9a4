"""`trunkline bench` as a user runs it: it starts a server on a tiny model, and stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.models import tiny_config, write_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


def bench(model: Path, data: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gateway", "bench", "--data-dir", str(data)]
    command += ["--model", str(model), "--text", "--seed", "5", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def servers_of(model: Path) -> list[str]:
    """Return processes with the model's path in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue  # it ended while we looked
        if str(model) in words and "serve" in words:
            found.append(folder.name)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a tiny model with room for every workload in words."""
    return write_folder(tmp_path / "tiny", tiny_config(layers=1, context=16_384))


def test_bench_starts_measures_and_stops_a_server(model: Path, tmp_path: Path) -> None:
    """From an empty data directory to the table: it creates keys and tenants, measures the
    server's memory, and leaves no process."""
    process = bench(model, tmp_path / "data", "--workloads", "bc", "--repeats", "1", "--json")
    out, err = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 0, err
    report = json.loads(out)
    found = {(row["workload"], row["figure"]): row["median"] for row in report["rows"]}
    assert report["seed"] == 5
    assert 0 < found["start", "ready"] < found["start", "first token after readiness"]
    assert (
        found["all", "peak resident memory"] >= found["start", "resident memory at readiness"] > 50
    )
    assert found["c", "warm hit ratio"] > 50
    assert found["b", "first token"] > 0  # all text may come in one piece: then nothing was timed
    assert servers_of(model) == []


def test_sigterm_of_the_bench_stops_its_server(model: Path, tmp_path: Path) -> None:
    """Otherwise a time limit around the bench would leave a server behind."""
    process = bench(model, tmp_path / "data", "--workloads", "c", "--repeats", "100")
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first.startswith("c: run 1"), first + process.stderr.read()
    running = servers_of(model)

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)

    assert running
    assert process.returncode != 0
    until_s = time.monotonic() + PATIENCE_S
    while servers_of(model) and time.monotonic() < until_s:
        os.sched_yield()
    assert servers_of(model) == []


def test_error_quotes_the_log_of_a_server_that_does_not_start(tmp_path: Path) -> None:
    process = bench(tmp_path / "no-such-model", tmp_path / "data", "--repeats", "1")
    _, err = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 1
    assert "no-such-model" in err
    assert "Traceback" not in err
