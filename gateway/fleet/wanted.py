"""How many engines the work of the last minutes asks for; pure, over a gateway's own metrics.

Work is what has to be computed: prompt tokens that no cache had, and the rows that answers take. A
full cache is no work, and a queue of cached prompts hardly any, so neither counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from gateway.fleet.errors import FleetError

LOAD_MAX: Final = 0.75
"""The share of its engines' time that a fleet should be busy: queues grow without bound near 1."""
SHARE: Final = 0.9
"""Of requests, whose wait is judged."""


class GatewayCounts(Struct, frozen=True):
    """A gateway's counters at an instant; those of one run of it never fall."""

    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    answers: float
    """Answers of more than one token, and the sum of their mean times between tokens."""
    answers_s: float
    waits: Mapping[float, float]
    """Requests that waited at most so many seconds for their first step; the last is all."""
    engines: int
    """Engines that take requests."""
    prefill_tokens_per_s: float
    """The sum of their measured rates."""


class WantedEngines(Struct, frozen=True):
    """How many engines are wanted, and the terms that say so."""

    engines: int
    present: int
    uncached_tokens_per_s: float
    engine_tokens_per_s: float
    prefill_load: float
    """Engines that compute prompts all the time."""
    output_tokens_per_s: float
    mean_rows: float
    """Answers that run at once, in the mean."""
    decode_load: float
    """Engines whose rows are all taken."""
    wait_s: float
    """That nine of ten requests do not exceed; by buckets, so at most one too long."""
    wait_max_s: float


def read_counts(exposition: str) -> GatewayCounts:
    """Return the counters of a page in Prometheus' text format. Raises FleetError."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise FleetError(f"no metrics in Prometheus' text format: {error}") from error

    if "trunkline_engine_ready" not in found:
        raise FleetError(
            "no trunkline_engine_ready; expected /metrics of a gateway's admin listener"
        )

    def total(name: str) -> float:
        """Return a sum over labels; what has not happened yet has none."""
        return sum(value for _, value in found.get(f"trunkline_{name}", ()))

    models = {labels.get("model", "") for labels, _ in found["trunkline_engine_ready"]}
    if len(models) > 1:
        raise FleetError(f"the gateway serves {len(models)} models; expected one")
    waits: dict[float, float] = {}
    for labels, value in found.get("trunkline_queue_seconds_bucket", ()):
        edge = float(labels["le"])
        waits[edge] = waits.get(edge, 0.0) + value
    elsewhere = found.get("trunkline_replica_ready", ())
    return GatewayCounts(
        prompt_tokens=total("prompt_tokens_total"),
        cached_tokens=total("cached_tokens_total"),
        output_tokens=total("output_tokens_total"),
        answers=total("time_per_output_token_seconds_count"),
        answers_s=total("time_per_output_token_seconds_sum"),
        waits=dict(sorted(waits.items())),
        engines=int(sum(value for _, value in elsewhere) if elsewhere else total("engine_ready")),
        prefill_tokens_per_s=total("engine_prefill_tokens_per_second"),
    )


def count_wanted(
    before: GatewayCounts, after: GatewayCounts, seconds: float, rows: int, wait_max_s: float
) -> WantedEngines:
    """Return the smallest number of engines whose load is at most `LOAD_MAX`; one more than there
    are, at least, where requests waited too long.

    `seconds`: between the counts. `rows`: that an engine runs at once. Raises FleetError for counts
    of two runs of a gateway, and where no engine takes requests.
    """
    if after.prompt_tokens < before.prompt_tokens or after.answers < before.answers:
        raise FleetError("the gateway has begun anew between its two counts; expected one run")
    present = after.engines
    if not present:
        raise FleetError("no engine takes requests; expected one at least, to measure")
    prompt = after.prompt_tokens - before.prompt_tokens
    uncached_per_s = max(0.0, prompt - (after.cached_tokens - before.cached_tokens)) / seconds
    rate = after.prefill_tokens_per_s / present
    prefill_load = uncached_per_s / rate if rate else 0.0
    output_per_s = (after.output_tokens - before.output_tokens) / seconds
    answers = after.answers - before.answers
    token_s = (after.answers_s - before.answers_s) / answers if answers else 0.0
    mean_rows = output_per_s * token_s
    decode_load = mean_rows / rows
    wanted = max(1, math.ceil((prefill_load + decode_load) / LOAD_MAX - 1e-9))
    wait_s = quantile(before.waits, after.waits)
    if wait_s > wait_max_s:
        wanted = max(wanted, present + 1)
    return WantedEngines(
        engines=wanted,
        present=present,
        uncached_tokens_per_s=uncached_per_s,
        engine_tokens_per_s=rate,
        prefill_load=prefill_load,
        output_tokens_per_s=output_per_s,
        mean_rows=mean_rows,
        decode_load=decode_load,
        wait_s=wait_s,
        wait_max_s=wait_max_s,
    )


def quantile(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """Return the edge of the bucket in which `SHARE` of the waits between two counts end; 0 without
    any."""
    counts = {edge: count - before.get(edge, 0.0) for edge, count in after.items()}
    wanted = SHARE * max(counts.values(), default=0.0)
    if not wanted:
        return 0.0
    return next(edge for edge, count in counts.items() if count >= wanted)


def wanted_text(wanted: WantedEngines) -> str:
    """Return the number and its terms for people."""
    load = wanted.prefill_load + wanted.decode_load
    late = " (too long: one more than there are)" if wanted.wait_s > wanted.wait_max_s else ""
    return "\n".join(
        (
            f"{wanted.engines} engines wanted, {wanted.present} there",
            f"prompts: {wanted.uncached_tokens_per_s:,.1f} uncached tokens/s at"
            f" {wanted.engine_tokens_per_s:,.0f} an engine: {wanted.prefill_load:.3f} engines",
            f"answers: {wanted.output_tokens_per_s:,.1f} tokens/s in {wanted.mean_rows:.1f} rows:"
            f" {wanted.decode_load:.3f} engines",
            f"load: {load:.3f}, at most {LOAD_MAX} an engine",
            f"wait: 90 % of requests within {wanted.wait_s:g} s, at most {wanted.wait_max_s:g} s"
            f"{late}",
        )
    )
