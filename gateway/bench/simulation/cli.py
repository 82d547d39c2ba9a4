"""Arguments of `trunkline simulate`, and its run. This module prints nothing."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from gateway.bench.client import BenchError
from gateway.bench.report import columns
from gateway.bench.simulation.engine_shape import SHAPES, EngineShape
from gateway.bench.simulation.faults import FORM, Fault, parse_fault
from gateway.bench.simulation.figures import PolicyFigures, figures_of
from gateway.bench.simulation.policies import APART, MODELS, OURS, POLICIES
from gateway.bench.simulation.simulation import SimulatedFleet, Simulation
from gateway.bench.simulation.traffic import (
    SimulatedRequest,
    TenantTraffic,
    draw_tenants,
    endless_hits,
    trace_requests,
)
from gateway.bench.trace import read_trace
from gateway.routing.prefix_directory import MAX_REPLICAS

TENANTS = "tenants"
"""In place of a file: drawn traffic."""
BLOCK_TOKENS = (16, 32, 64, 128)
"""Sizes of blocks; a stride of 128 tokens is a number of whole ones."""
Show = Callable[[str, int, int], None]


class SimulationReport(Struct, frozen=True):
    """What was asked of which fleet, and a row of figures for each policy."""

    traffic: str
    requests: int
    prompt_tokens: int
    span_s: float
    endless_hits: float
    """The hits of one endless cache: no fleet has more."""
    fleet: SimulatedFleet
    seed: int
    faults: list[str]
    policies: list[PolicyFigures]

    def text(self) -> str:
        """Return the report for people."""
        fleet, shape = self.fleet, self.fleet.shape
        rate = self.prompt_tokens / self.span_s if self.span_s else 0.0
        lines = [
            f"{self.traffic}: {self.requests:,} requests, {self.prompt_tokens / 1e6:.1f} M prompt"
            f" tokens in {self.span_s:,.0f} s ({rate / 1e3:,.0f}k a second);"
            f" one endless cache would find {self.endless_hits:.3f} of them",
            f"{fleet.replicas} replicas of shape {shape.name}: {shape.prefill_tokens_per_s:,.0f}"
            f" prompt tokens/s, steps of {shape.step_s * 1e3:g} ms and {shape.row_s * 1e3:g} ms a"
            f" row, KV of {shape.kv_tokens:,} tokens in blocks of {fleet.block_tokens};"
            f" seed {self.seed}",
        ]
        lines += [f"fault {fault}" for fault in self.faults]
        rows = [HEADING, *(_row(one) for one in self.policies)]
        lines += ["", columns(rows, range(1, len(HEADING)))]
        if any(one.policy in MODELS for one in self.policies):
            lines += ["", f"{', '.join(MODELS)}: models of other routers, as we read them."]
        return "\n".join(lines)


HEADING = (
    *("policy", "hits", "first p50 s", "p90", "p99", "under 2 s", "gap p99 ms"),
    *("imbalance", "done", "moved", "apart", "not served"),
)


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trunkline simulate`."""
    text = "trace (.jsonl or .csv), an exported ledger (.csv), or `tenants` for drawn traffic"
    parser.add_argument("traffic", metavar="FILE|tenants", help=text)
    parser.add_argument("--replicas", type=_replicas, default=8, help="engines (default: 8)")
    text = f"with commas, of {', '.join(POLICIES)}; or `all` (default: {OURS},round-robin)"
    parser.add_argument("--policy", type=_policies, default=(OURS, "round-robin"), help=text)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fault", action="append", default=[], metavar="FAULT", help=f"repeatable: {FORM}"
    )
    parser.add_argument("--speed", type=_positive, default=1.0, help="of a trace (default: 1)")
    parser.add_argument("--limit", type=_count, help="most requests (default: all; tenants: 10000)")
    parser.add_argument(
        "--report-ms", type=_not_negative, default=50.0,
        help="least time between two reports of an engine's queue (default: 50)",
    )  # fmt: skip
    text = f"so many replicas compute long prompts for the others, by policy {APART} (default: 0)"
    parser.add_argument("--prefill", type=_prefill, default=0, metavar="N", help=text)
    text = "GB a second at which a replica fetches prefixes of others (default: 0, none)"
    parser.add_argument("--fetch-gb-s", type=_not_negative, default=0.0, metavar="GB", help=text)
    _add_shape(parser)
    _add_tenants(parser)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engines")
    engine.add_argument(
        "--shape", choices=sorted(SHAPES), default="8b", help="an engine's constants (default: 8b)"
    )
    engine.add_argument("--blocks", type=_count, help="blocks of KV of each engine")
    engine.add_argument(
        "--block-tokens", type=int, choices=BLOCK_TOKENS, default=128,
        help="tokens of a block; engines have 16, which takes longer (default: 128)",
    )  # fmt: skip
    engine.add_argument("--prefill-rate", type=_positive, help="prompt tokens a second")
    engine.add_argument("--step-ms", type=_positive, help="a step's fixed time")
    engine.add_argument("--row-ms", type=_not_negative, help="what each sequence adds to a step")
    text = "what each 1,000 tokens that are read add to a step (default: 0)"
    engine.add_argument("--context-ms", type=_not_negative, help=text)
    engine.add_argument("--sequences", type=_count, help="most sequences at once")


def _add_tenants(parser: argparse.ArgumentParser) -> None:
    usual = TenantTraffic()
    drawn = parser.add_argument_group("drawn tenants")
    drawn.add_argument("--tenants", type=_count, default=usual.tenants, help="(default: 150)")
    text = "requests a second (default: 60)"
    drawn.add_argument("--rate", type=_positive, default=usual.per_s, help=text)
    for name, what, tokens in (
        ("--system-tokens", "of each tenant's system prompt", usual.system_tokens),
        ("--question-tokens", "of each turn's question", usual.question_tokens),
        ("--answer-tokens", "of each answer", usual.answer_tokens),
    ):
        drawn.add_argument(name, type=_count, default=tokens, help=f"{what} (default: {tokens})")
    text = "of a conversation (default: 5)"
    drawn.add_argument("--turns", type=_count, default=usual.turns, help=text)


def run_simulate(options: argparse.Namespace, show: Show) -> SimulationReport:
    """Run the traffic by each policy, one after the other. Blocks. Raises BenchError."""
    faults = [parse_fault(text, options.replicas) for text in options.fault]
    shape = _shape(options)
    if options.prefill >= options.replicas:
        raise BenchError(
            f"--prefill {options.prefill} of {options.replicas}: none is left to answer"
        )
    what = options.replicas, shape, options.block_tokens, options.report_ms / 1e3
    fleet = SimulatedFleet(*what, options.prefill, options.fetch_gb_s * 1e9)
    name, requests = _traffic(options)
    with _without_collector():
        found = [_run(policy, requests, fleet, faults, show) for policy in options.policy]
    return SimulationReport(
        traffic=name,
        requests=len(requests),
        prompt_tokens=sum(one.prompt_tokens for one in requests),
        span_s=round(requests[-1].at_s, 3),
        endless_hits=round(endless_hits(requests), 6),
        fleet=fleet,
        seed=options.seed,
        faults=list(options.fault),
        policies=found,
    )


def _run(
    policy: str,
    requests: list[SimulatedRequest],
    fleet: SimulatedFleet,
    faults: list[Fault],
    show: Show,
) -> PolicyFigures:
    run = Simulation(requests, fleet, POLICIES[policy], faults)
    run.run(lambda done: show(policy, done, len(requests)))
    run.check()
    return figures_of(*(policy, run.outcomes, run.gaps, run.busy_s, run.computed_tokens), run.apart)


def _traffic(options: argparse.Namespace) -> tuple[str, list[SimulatedRequest]]:
    if options.traffic != TENANTS:
        path = Path(options.traffic)
        requests = trace_requests(
            read_trace(path, options.limit), speed=options.speed, seed=options.seed
        )
        return f"{path.name} at speed {options.speed:g}", requests
    if options.speed != 1.0:
        raise BenchError("--speed is of a trace; expected --rate for drawn tenants")
    drawn = TenantTraffic(
        requests=options.limit or TenantTraffic().requests,
        per_s=options.rate,
        tenants=options.tenants,
        system_tokens=options.system_tokens,
        question_tokens=options.question_tokens,
        answer_tokens=options.answer_tokens,
        turns=options.turns,
    )
    return drawn.name, draw_tenants(drawn, options.seed)


def _shape(options: argparse.Namespace) -> EngineShape:
    given = {
        "kv_tokens": options.blocks and options.blocks * options.block_tokens,
        "prefill_tokens_per_s": options.prefill_rate,
        "step_s": _seconds(options.step_ms),
        "row_s": _seconds(options.row_ms),
        "context_token_s": _seconds(options.context_ms, per=1e6),
        "sequences_max": options.sequences,
    }
    changed = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(SHAPES[options.shape], **changed)


def _seconds(ms: float | None, per: float = 1e3) -> float | None:
    return None if ms is None else ms / per


@contextmanager
def _without_collector() -> Iterator[None]:
    """Turn the garbage collector off: a simulation makes no cycles, and its passes over millions of
    blocks would take a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _row(one: PolicyFigures) -> tuple[str, ...]:
    return (
        one.policy,
        _shown(one.hits, 3),
        _shown(one.first_token_p50_s, 3),
        _shown(one.first_token_p90_s, 2),
        _shown(one.first_token_p99_s, 2),
        _shown(one.under_2_s, 3),
        _shown(None if one.gap_p99_s is None else one.gap_p99_s * 1e3, 1),
        _shown(one.imbalance, 2),
        str(one.done),
        str(one.moved),
        str(one.apart),
        str(one.too_long + one.no_replica),
    )


def _shown(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(POLICIES) if text == "all" else tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        known = ", ".join(POLICIES)
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {known}, or all")
    return names


def _replicas(text: str) -> int:
    number = _count(text)
    if number > MAX_REPLICAS:
        raise argparse.ArgumentTypeError(f"{text}: expected at most {MAX_REPLICAS}")
    return number


def _prefill(text: str) -> int:
    return 0 if text == "0" else _replicas(text)


def _count(text: str) -> int:
    number = int(text)
    if not 0 < number < 1 << 40:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return number
