"""What a fleet is asked for: names, ports, GPUs, and a cluster that others may use."""

from __future__ import annotations

import pytest

from gateway.fleet.errors import FleetError
from gateway.fleet.seats import (
    RayNode,
    check_authentication,
    check_room,
    parse_ports,
    seat_names,
)
from tests.tables import each_row


def never() -> bool:
    raise AssertionError("asked")


def test_engines_are_named_in_order_or_as_asked() -> None:
    """The names are those of their certificates."""
    assert seat_names(3, "") == ["e0", "e1", "e2"]
    assert seat_names(0, "west, east") == ["west", "east"]


@each_row(
    ("replicas", "names", "message"),
    [
        (0, "", "0 engines; expected 1 to 64"),
        (65, "", "65 engines; expected 1 to 64"),
        (0, "e0,e1,e0", "'e0' names two engines; expected each name once"),
        (0, "e0,,e1", "'': expected a name of letters, digits, dots and hyphens"),
        (0, "e/0", "'e/0': expected a name of letters, digits, dots and hyphens"),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_be_right(
    replicas: int, names: str, message: str
) -> None:
    """Before anything is started."""
    with pytest.raises(FleetError) as refused:
        seat_names(replicas, names)

    assert str(refused.value) == message


@each_row(
    ("gpus_of_nodes", "engines", "gpus", "message"),
    [
        (
            (4, 2),
            4,
            2,
            "4 engines of 2 GPUs each: the cluster's nodes have 4, 2; expected at most 3",
        ),
        ((3, 3), 3, 2, "expected at most 2"),
        ((4, 2), 1, 5, "--gpus 5: the largest node has 4"),
        ((0, 0), 1, 1, "--gpus 1: no node of the cluster has a GPU"),
        ((), 1, 1, "--gpus 1: no node of the cluster has a GPU"),
        ((4,), 1, -1, "--gpus: -1; expected 0 or more"),
    ],
)
def test_a_gpu_too_many_is_refused(
    gpus_of_nodes: tuple[int, ...], engines: int, gpus: int, message: str
) -> None:
    """Ray would let such an engine wait for ever. GPUs of two nodes make no engine."""
    nodes = [RayNode("127.0.0.1", count) for count in gpus_of_nodes]
    with pytest.raises(FleetError) as refused:
        check_room(nodes, engines, gpus)

    assert message in str(refused.value)


def test_what_fits_is_not_refused() -> None:
    """Up to the last GPU; engines on processors need none."""
    nodes = [RayNode("127.0.0.1", 4), RayNode("127.0.0.1", 2)]

    check_room(nodes, 3, 2)
    check_room(nodes, 6, 1)
    check_room([], 64, 0)


@pytest.mark.parametrize("address", ["10.0.0.5", "2001:db8::5", "head.example.org"])
def test_a_cluster_that_anyone_may_use_is_refused(address: str) -> None:
    """Who reaches a Ray cluster without a token can run code on it."""
    nodes = [RayNode("127.0.0.1", 1), RayNode(address, 1)]
    with pytest.raises(FleetError, match=f"the cluster at {address} has no authentication") as no:
        check_authentication(nodes, lambda: True)

    assert "RAY_AUTH_MODE=token" in str(no.value)
    check_authentication(nodes, lambda: False)


def test_a_cluster_on_loopback_needs_no_token() -> None:
    """To try it on one machine."""
    check_authentication([RayNode("127.0.0.2", 1), RayNode("::1", 1)], never)


def test_ports_are_one_or_a_range() -> None:
    """As a firewall lets them through."""
    assert parse_ports("7443") == (7443, 7443)
    assert parse_ports("7443-7450") == (7443, 7450)


@each_row("text", ["", "7450-7443", "0-5", "7443-", "70000", "a-b", "-5"])
def test_wrong_ports_are_refused(text: str) -> None:
    """With an example of right ones."""
    with pytest.raises(FleetError, match=r"--ports: .*; expected FIRST-LAST, such as 7443-7450"):
        parse_ports(text)
