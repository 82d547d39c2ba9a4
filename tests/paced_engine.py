"""A device and a bus that take the time they are told, by a clock that they alone advance.

Nothing is computed and nothing copied: what is exercised is the engine's thread, and when things
come. A step takes time by its tokens, a move by the blocks of its direction that go before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import SampledToken
from engine.moves import Move, Moved, SlotFormat, SlotLayout, stride_of
from engine.plan import StepPlan, StepResult, TokensBySequence
from tests.fakes import FakeClock

SLAB_BLOCKS = 16
"""Slots of a slab, as `engine.server.levels_below` makes them."""


@dataclass
class Speeds:
    """Seconds of a step, of each prompt token and row in it, and of a block each way; `turn_s`:
    what the engine's thread takes for a turn. As measured with an 8B model on an H200.

    Zeros make everything end at once.
    """

    step_s: float = 0.0075
    prompt_token_s: float = 26e-6
    row_s: float = 30e-6
    load_s: float = 40e-6
    offload_s: float = 80e-6
    turn_s: float = 0.001


AT_ONCE = Speeds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class PacedRunner:
    """`engine.plan.Runner` that samples the same token for every sequence, and takes its time."""

    def __init__(self, clock: FakeClock, speeds: Speeds) -> None:
        self.prompt_tokens = 0
        self.steps = 0
        self._clock, self._speeds = clock, speeds
        self._results: deque[tuple[float, StepResult]] = deque()
        self._ends_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        """Begin a step behind those that are under way."""
        speeds, token = self._speeds, SampledToken(1)
        prompt = sum(row.count for row in plan.rows if row.count > 1)
        took_s = speeds.step_s + prompt * speeds.prompt_token_s + len(plan.rows) * speeds.row_s
        self._ends_s = max(self._ends_s, self._clock()) + took_s
        drawn: TokensBySequence = {s: (token,) for row in plan.rows for s in row.samples}
        result = StepResult(step=plan.step, sampled=drawn, elapsed_s=took_s)
        self._results.append((self._ends_s, result))
        self.prompt_tokens += prompt
        self.steps += 1

    def collect(self) -> StepResult:
        """Wait for the oldest step."""
        ends_s, result = self._results.popleft()
        self._clock.advance(max(0.0, ends_s - self._clock()))
        return result


class PacedTransfer:
    """`engine.moves.TransferEngine` with a line for each direction, whose moves never fail.

    `longest`: most moves that were under way, by direction.
    """

    unusable_bytes = 0
    bytes_per_s = 25e9

    def __init__(
        self,
        clock: FakeClock,
        speeds: Speeds,
        slots: int,
        *,
        slot_bytes: int = 2 * 2**20,
        loads_max: int = 4096,
        offloads_max: int = 512,
    ) -> None:
        self.formats: tuple[SlotFormat, ...] = (SlotFormat("", slot_bytes),)
        stride = stride_of(slot_bytes)
        self.layout = SlotLayout(slots * stride, SLAB_BLOCKS * stride, slot_bytes)
        self.loads_max, self.offloads_max = loads_max, offloads_max
        self.longest: dict[str, int] = {"offload": 0, "load": 0}
        self._clock = clock
        self._seconds = {"offload": speeds.offload_s, "load": speeds.load_s}
        self._ends_s = {"offload": 0.0, "load": 0.0}
        self._lines: dict[str, deque[tuple[float, Move]]] = {"offload": deque(), "load": deque()}

    def submit(self, moves: Sequence[Move]) -> None:
        """Queue moves behind those of their direction."""
        for move in moves:
            kind = move.kind
            self._ends_s[kind] = max(self._ends_s[kind], self._clock()) + self._seconds[kind]
            self._lines[kind].append((self._ends_s[kind], move))
        for name, line in self._lines.items():
            self.longest[name] = max(self.longest[name], len(line))

    def poll(self) -> list[Moved]:
        """Return the moves that have ended by now."""
        found, now_s = list[Moved](), self._clock()
        for kind, line in self._lines.items():
            seconds = self._seconds[kind]
            while line and line[0][0] <= now_s:
                _, move = line.popleft()
                check = move.check or b"0123456789abcdef"
                found.append(Moved(move.move_id, is_done=True, check=check, seconds=seconds))
        return found

    def close(self) -> None:
        """End."""
