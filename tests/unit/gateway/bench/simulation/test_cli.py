"""`trunkline simulate` as a command."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from gateway.bench.client import BenchError
from gateway.bench.simulation.cli import SimulationReport, add_simulate_arguments, run_simulate
from tests.tables import each_row
from tests.unit.gateway.bench.scripted_endpoint import MOONCAKE, write_trace

SMALL = ("tenants", "--limit", "60", "--tenants", "4", "--system-tokens", "256")


def simulate(*arguments: str) -> SimulationReport:
    """Run the command's part."""
    parser = argparse.ArgumentParser()
    add_simulate_arguments(parser)
    return run_simulate(parser.parse_args(arguments), lambda part, done, total: None)


def test_policies_stand_side_by_side() -> None:
    report = simulate(*SMALL, "--policy", "all", "--replicas", "2", "--fault", "kill@1-2:r1")
    names = [one.policy for one in report.policies]
    lines = report.text().splitlines()

    assert names == [
        *(
            "seconds",
            "apart",
            "round-robin",
            "least-requests",
            "llm-d",
            "dynamo",
            "sglang",
            "conductor",
        )
    ]
    assert [line.split()[0] for line in lines if line.split()[:1] in [[n] for n in names]] == names
    assert "fault kill@1-2:r1" in lines
    assert "blocks of 128" in report.text()
    assert all((one.hits or 1) <= report.endless_hits for one in report.policies)


def test_the_same_seed_gives_the_same_bytes() -> None:
    one, same, other = (
        msgspec.json.encode(simulate(*SMALL, "--seed", seed)) for seed in ("1", "1", "2")
    )

    assert one == same != other


def test_a_trace_runs_at_another_speed(tmp_path: Path) -> None:
    path = str(write_trace(tmp_path, "m.jsonl", MOONCAKE))
    report = simulate(path, "--speed", "5", "--policy", "seconds", "--block-tokens", "16")

    assert (report.requests, report.span_s) == (2, 0.1)
    assert report.policies[0].done == 2
    assert report.policies[0].cached_tokens == 512


def test_engines_have_the_shape_that_was_asked_for() -> None:
    report = simulate(
        *SMALL, "--blocks", "50", "--prefill-rate", "999", "--step-ms", "7", "--row-ms", "2",
        "--context-ms", "3", "--sequences", "5", "--policy", "round-robin",
    )  # fmt: skip
    shape = report.fleet.shape

    assert (shape.kv_tokens, shape.prefill_tokens_per_s, shape.sequences_max) == (6400, 999, 5)
    assert (shape.step_s, shape.row_s, shape.context_token_s) == (0.007, 0.002, 3e-6)


@each_row(
    "arguments",
    [
        ("--policy", "luck"),
        ("--replicas", "65"),
        ("--replicas", "0"),
        ("--block-tokens", "48"),
        ("--report-ms", "-1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    """Exit status 2."""
    with pytest.raises(SystemExit) as caught:
        simulate("tenants", *arguments)

    assert caught.value.code == 2


def test_errors_say_what_would_be_right(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="not readable"):
        simulate(str(tmp_path / "none.csv"))
    with pytest.raises(BenchError, match="--rate"):
        simulate("tenants", "--speed", "2")
    with pytest.raises(BenchError, match="r0 to r7"):
        simulate("tenants", "--fault", "kill@1:r8")
