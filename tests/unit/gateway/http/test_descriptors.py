"""The limit of descriptors, and the connections that fit below it."""

from __future__ import annotations

import resource

import pytest

from gateway.http import descriptors


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1_024, 524_288), (524_288, 524_288)),
        ((1_024, resource.RLIM_INFINITY), (2**20, resource.RLIM_INFINITY)),
        ((1_024, 1_024), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_soft_limit_is_raised_to_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: tuple[int, int] | None
) -> None:
    """As service managers start a process: soft 1,024, hard far above."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, found: given.append(found))
    descriptors.raise_descriptor_limit()

    assert given == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(
    ("soft", "allowed"), [(2**20, 4_096), (1_024, 784), (resource.RLIM_INFINITY, 4_096), (64, 16)]
)
def test_connections_stop_short_of_the_limit(
    monkeypatch: pytest.MonkeyPatch, soft: int, allowed: int
) -> None:
    """A process without a free descriptor cannot accept, nor start an engine."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    monkeypatch.setattr(descriptors, "open_descriptors", lambda: 40)

    assert descriptors.connections_allowed(4_096) == allowed


def test_open_descriptors_are_counted() -> None:
    assert descriptors.open_descriptors() > 2
