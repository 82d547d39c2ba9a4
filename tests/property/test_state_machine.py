"""Engines over models with recurrent layers under hypothesis: rule *State*.

The engine machine, with a state of two blocks. The token oracle knows what each state was computed
from: a row that goes on from another one, or a state read after it was overwritten, fails.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from msgspec.structs import replace

from engine.api import MARKS_MAX
from engine.cache import PrefixCache
from tests.checkers import World
from tests.property.machine_runs import case
from tests.property.test_engine_machine import EngineMachine
from tests.strategies import tokens


class StateEngineMachine(EngineMachine):
    """The engine machine with states of two blocks, kept at every position that is worth it."""

    def make_world(self, *args: Any, **settings: Any) -> World:
        make_cache = partial(PrefixCache, state_blocks=2, state_spacing=1)
        settings["blocks"] *= 2
        return World(*args, **settings, make_cache=make_cache)

    @precondition(lambda self: self.world.streams)
    @rule(
        data=st.data(), more=tokens, cut=st.sampled_from([0, 0, 1, 4]), rests=st.booleans(),
        marks=st.lists(st.integers(0, 18), max_size=MARKS_MAX).map(tuple),
    )  # fmt: skip
    def come_back(
        self, data: st.DataObject, more: tuple[int, ...], cut: int, rests: bool,
        marks: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Go on with an earlier prompt and its answer, or part from it near its end."""
        if rests:
            self.world.settle()
        name = data.draw(st.sampled_from(sorted(self.world.streams)))
        stream = self.world.streams[name]
        before = (*stream.request.tokens, *stream.outputs[0])
        longer = (*before[: len(before) - cut], *more)[:16]
        grant = replace(stream.request.grant, read=True, write=True)
        again = replace(stream.request, tokens=longer, grant=grant, prompt_logprobs=None)
        self.submit(replace(again, marks=marks))


TestStateEngineMachine = case(StateEngineMachine, 60)
