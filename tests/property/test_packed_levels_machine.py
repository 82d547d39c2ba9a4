"""The core with packed copies below the device: an exact request never meets a lossy one.

One namespace asks for exact copies, one allows near ones, one rough ones, over host memory whose
slabs change their format. Planted faults show that the machine would see a lossy copy in the wrong
place, wrong sums, and a wrong word to the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis.stateful import invariant
from msgspec.structs import replace

from engine.api import FIDELITIES, Fidelity, Request
from engine.levels.copy_formats import CopyFormats
from engine.levels.host.accounts import HostAccounts
from engine.levels.levels import Levels
from engine.moves import SlotFormat
from tests.checkers import expect
from tests.fake_levels import PACKED, packed_whole_of
from tests.property.machine_runs import case
from tests.property.planted import Plant, planted
from tests.property.test_levels_machine import KeptMachine, LevelsMachine

ASKED: dict[bytes, Fidelity] = {b"north": "exact", b"south": "near", b"east": "rough"}


class PackedMachine(LevelsMachine):
    """The machine of levels, whose namespaces allow copies of different fidelity."""

    formats: Sequence[SlotFormat] = PACKED
    unpackable = 0.1

    def submit(self, request: Request) -> None:
        """Submit a request that allows what its namespace does."""
        grant = replace(request.grant, fidelity=ASKED[request.grant.namespace])
        super().submit(replace(request, grant=grant))

    @invariant()
    def copies_are_as_exact_as_was_asked(self) -> None:
        """In slots, on disk, in what was moved, and in what requests are told."""
        if not hasattr(self, "world"):
            return
        expect(b"north" not in self.memory.packed, "an exact block was packed or unpacked")
        for copy in self.levels.places:
            most = FIDELITIES.index(ASKED[copy.namespace])
            if copy.slot >= 0:
                name = self.memory.written[copy.slot]
                form = next(one for one in self.formats if one.name == name)
                expect(FIDELITIES.index(form.fidelity) <= most, "a slot", copy.namespace, name)
        for record in self.records.values():
            most = FIDELITIES.index(ASKED[record.namespace])
            expect(FIDELITIES.index(record.form.fidelity) <= most, "a record", record.namespace)
        for stream in self.world.streams.values():
            if (started := stream.started) is not None:
                asked = FIDELITIES.index(ASKED[stream.request.grant.namespace])
                expect(FIDELITIES.index(started.fidelity) <= asked, "laxer than asked for")
                is_told = started.cached_tokens > 0 or started.fidelity == "exact"
                expect(is_told, "what was computed is exact")


class KeptPackedMachine(PackedMachine, KeptMachine):
    """The same in host memory that outlives the engine."""


class WindowPackedMachine(PackedMachine):
    """The same for a model with two window groups, whose copies of all groups are packed too."""

    windows = (3, 5)
    formats = packed_whole_of(3)
    slots = 30


class KeptWindowPackedMachine(WindowPackedMachine, KeptMachine):
    """The same in host memory that outlives the engine."""


def always_the_smallest(original: Any) -> Any:
    """Every namespace gets the smallest format."""
    return lambda self, namespace, **kind: original(self, b"east", **kind)


def any_is_whole(original: Any) -> Any:
    """A packed copy of group 0 is taken for one of all groups."""
    return lambda self, form: True


def bytes_are_not_counted(original: Any) -> Any:
    """A payer's packed copies count as if they were plain ones."""

    def release(self: Any, slot: int) -> None:
        share = self._owner[slot]
        before = share.used
        original(self, slot)
        if share.used != before:
            share.used = before - self.pool.formats[0].slot_bytes

    return release


def never_told(original: Any) -> Any:
    """What was read is told to be laxer than was asked for."""
    return lambda self, namespace: "rough"


@pytest.mark.slow
@planted(
    Plant(PackedMachine, CopyFormats, "of", always_the_smallest),
    Plant(PackedMachine, HostAccounts, "release", bytes_are_not_counted),
    Plant(PackedMachine, Levels, "read_fidelity", never_told),
    Plant(WindowPackedMachine, CopyFormats, "of", always_the_smallest, seed=3),
    Plant(WindowPackedMachine, CopyFormats, "is_whole", any_is_whole, seed=6),
)
def test_planted_faults_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends a run of the machine."""
    plant.check(monkeypatch)


TestPackedMachine = case(PackedMachine)
TestKeptPackedMachine = case(KeptPackedMachine)
TestWindowPackedMachine = case(WindowPackedMachine)
TestKeptWindowPackedMachine = case(KeptWindowPackedMachine)
