"""A keeper that reads its host: what it lacks is its reason, until an operator mends it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.fleet.seat_keeper import SeatKeeper, seat_config
from gateway.fleet.seats import KeeperReport, Seat
from tests.unit.engine.server.fleet_certificates import certificate

PATIENCE_S = 60.0


def reported(keeper: SeatKeeper, is_so: Callable[[KeeperReport], bool]) -> KeeperReport:
    """Return a keeper's report as soon as it is so."""
    began_s = time.monotonic()
    while not is_so(report := keeper.report()):
        assert time.monotonic() - began_s < PATIENCE_S, report
        time.sleep(0.01)
    return report


def test_what_a_host_lacks_is_the_reason(tmp_path: Path) -> None:
    """Here the certificate, and the keeper leaves at once when it is asked to."""
    keeper = SeatKeeper(Seat("e0", str(tmp_path / "data")), "127.0.0.1", time.monotonic)
    failed = reported(keeper, lambda one: one.state == "failed")
    keeper.leave()

    assert failed.reason.startswith(f"{tmp_path}/data/fleet/engine-e0/authority.pem: No such file")
    assert failed.address == ""
    assert keeper.report().state == "ended"


def test_a_reason_changes_as_the_host_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate came; now the model is missing."""
    monkeypatch.setattr("gateway.fleet.seat_keeper.AGAIN_S", 0.01)
    folder = tmp_path / "tls"
    folder.mkdir()
    seat = Seat("e0", str(tmp_path / "data"), tls=str(folder), model=str(tmp_path / "none"))
    keeper = SeatKeeper(seat, "127.0.0.1", time.monotonic)
    reported(keeper, lambda one: "engine-e0/authority.pem" in one.reason)
    (folder / "engine-e0").symlink_to(certificate("engine/e0"))
    mended = reported(keeper, lambda one: "authority.pem" not in one.reason)
    keeper.leave()

    assert str(tmp_path / "none") in mended.reason


def test_engines_of_one_host_have_folders_of_their_own(tmp_path: Path) -> None:
    """Two on one folder of the disk level would refuse each other."""
    file = tmp_path / "host.toml"
    file.write_text("[engine.levels]\ndisk_gib = 1.0\n")
    first, second = (
        seat_config(Seat(name, str(tmp_path / "data"), str(file))) for name in ("e0", "e1")
    )

    assert first.engine.levels.dir == str(tmp_path / "data" / "levels" / "e0")
    assert second.engine.levels.dir == str(tmp_path / "data" / "levels" / "e1")
    assert first.data == second.data


def test_a_seat_says_its_role_or_its_host_does(tmp_path: Path) -> None:
    """As with the model."""
    file = tmp_path / "host.toml"
    file.write_text('[engine]\nrole = "decode"\n')
    data = str(tmp_path / "data")
    found = [
        seat_config(Seat("e0", data, str(file), role=role)).engine.role
        for role in (None, "prefill", "any")
    ]

    assert found == ["decode", "prefill", "any"]


def test_a_range_without_a_free_port_is_the_reason(tmp_path: Path) -> None:
    """It names the range and the address."""
    from tests.models import write_folder

    model = write_folder(tmp_path / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tls = tmp_path / "tls"
        tls.mkdir()
        (tls / "engine-e0").symlink_to(certificate("engine/e0"))
        seat = Seat(
            "e0", str(tmp_path / "data"), tls=str(tls), model=str(model), ports=(port, port)
        )
        keeper = SeatKeeper(seat, "127.0.0.1", time.monotonic)
        failed = reported(keeper, lambda one: one.state == "failed")
        keeper.leave()

    assert failed.reason == (
        f"no port of {port}-{port} at 127.0.0.1 can be listened on: Address already in use;"
        " expected a free one"
    )
