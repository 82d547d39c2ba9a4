"""Places that are being read: they are not used anew before their last reader has ended."""

from __future__ import annotations

from collections import Counter

from engine.storage.slabs.slabs import Place, SlabFiles


class PlaceHolds:
    """Who reads which place, and what is given back only then. One thread uses it."""

    def __init__(self, slabs: SlabFiles) -> None:
        self._slabs = slabs
        self._reading: Counter[Place] = Counter()
        self._deferred: set[Place] = set()
        self._bad: set[Place] = set()

    def hold(self, place: Place) -> None:
        """Note one more reader of a place."""
        self._reading[place] += 1

    def release(self, place: Place) -> None:
        """Note that a reader has ended; give the place back if that was wanted meanwhile."""
        self._reading[place] -= 1
        if not self._reading[place]:
            del self._reading[place]
            if place in self._deferred:
                self._deferred.discard(place)
                self._give_back(place)

    def mark_bad(self, place: Place) -> None:
        """Leave a place out of use from now on: it returned other bytes than it was given."""
        self._bad.add(place)

    def give_back(self, place: Place) -> None:
        """Make a place free, at once or when its last reader has ended."""
        if place in self._reading:
            self._deferred.add(place)
        else:
            self._give_back(place)

    def is_deferred(self, place: Place) -> bool:
        """Return whether a place will be given back when its last reader has ended. O(1)."""
        return place in self._deferred

    @property
    def out_of_use(self) -> set[Place]:
        """The places that are neither free nor of a record, until their last reader has ended."""
        return self._bad | self._deferred

    def _give_back(self, place: Place) -> None:
        if place in self._bad:
            self._bad.discard(place)
            self._slabs.retire(place)
        else:
            self._slabs.give_back(place)
