"""Faults of a simulated fleet: replicas that die, slow down, tell late, or take nothing new."""

from __future__ import annotations

import math
import re
from typing import Literal, get_args

from msgspec import Struct

from gateway.bench.client import BenchError

FaultKind = Literal["kill", "slow", "late", "drain"]
KINDS: dict[str, FaultKind] = {kind: kind for kind in get_args(FaultKind)}
FORM = "kill@60:r3, kill@60-90:r3, slow@60-120:r3=5, late@0:all=2 or drain@60:r3"
_PATTERN = re.compile(
    r"(?P<kind>[a-z]+)@(?P<begin>\d+(\.\d+)?)(-(?P<end>\d+(\.\d+)?))?"
    r":(?P<where>all|r\d+)(=(?P<amount>\d+(\.\d+)?))?"
)
_TAKES_AMOUNT = {"slow": "how many times as long a step takes", "late": "by how many seconds"}


class Fault(Struct, frozen=True):
    """A fault of some replicas from `begins_s` to `ends_s`, seconds of the simulation.

    `kill`: the engine is gone with its cache, and its requests go on elsewhere; at the end an empty
    one takes its place. `slow`: steps take `amount` times as long. `late`: facts and reports come
    `amount` seconds late. `drain`: it takes no new requests.
    """

    kind: FaultKind
    begins_s: float
    ends_s: float
    replicas: tuple[int, ...]
    amount: float = 1.0


def parse_fault(text: str, replicas: int) -> Fault:
    """Return the fault that a text such as `kill@60:r3` names. Raises BenchError."""
    found = _PATTERN.fullmatch(text)
    kind = None if found is None else KINDS.get(found["kind"])
    if found is None or kind is None:
        raise BenchError(f"{text!r} is no fault; expected one such as {FORM}")
    amount = found["amount"]
    if (kind in _TAKES_AMOUNT) != (amount is not None):
        more = f"{kind}@…=N, N saying {_TAKES_AMOUNT[kind]}" if kind in _TAKES_AMOUNT else "no `=`"
        raise BenchError(f"fault {text!r}; expected {more}")
    if kind == "slow" and not float(amount):
        raise BenchError(f"fault {text!r} has steps that take no time; expected an amount above 0")
    begins_s, ends_s = float(found["begin"]), float(found["end"] or math.inf)
    if ends_s <= begins_s:
        raise BenchError(f"fault {text!r} ends before it begins; expected a later end")
    numbers = tuple(range(replicas)) if found["where"] == "all" else (int(found["where"][1:]),)
    if numbers[-1] >= replicas:
        known = f"r0 to r{replicas - 1}"
        raise BenchError(f"fault {text!r} names {found['where']}; expected one of {known}")
    return Fault(kind, begins_s, ends_s, numbers, float(amount or 1.0))
