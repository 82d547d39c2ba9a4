"""Certificates of engines, and connections to them: what is refused, and what is told."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from engine.client import tls_wire
from engine.client.tls_files import TlsError, check_certificate, tls_context
from engine.client.tls_wire import TlsWire
from tests.unit.engine.server.fleet_certificates import certificate, expired


def test_a_holder_s_own_certificate_is_checked_as_the_others_do(tmp_path: Path) -> None:
    """Its file is named, with what is wrong and what would be right."""
    check_certificate(certificate("engine/e0"), "engine/e0")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name, of in (
        ("certificate.pem", "ours"), ("key.pem", "ours"), ("authority.pem", "theirs")
    ):  # fmt: skip
        (mixed / name).write_bytes((certificate("engine/e0", of) / name).read_bytes())
    wrong = {
        expired("engine/e0"): "certificate has expired; expected one that is valid today",
        certificate("engine/e1"): "names 'engine/e1'; expected 'engine/e0'",
        certificate("gateway/e0"): "names 'gateway/e0'; expected 'engine/e0'",
        mixed: "expected one of the authority in authority.pem",
    }
    for folder, says in wrong.items():
        with pytest.raises(TlsError, match=re.escape(f"{folder / 'certificate.pem'}: ")) as refused:
            check_certificate(folder, "engine/e0")
        assert says in refused.value.message


async def test_an_address_that_accepts_and_never_answers_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A keeper listens while its engine is drained, or loads its model."""
    monkeypatch.setattr(tls_wire, "HANDSHAKE_S", 0.05)
    context = tls_context(certificate("gateway/g0"), is_server=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(
            TimeoutError, match=r"no engine has answered for .*: it is drained, or still"
        ),
    ):
        await TlsWire().dial("127.0.0.1", silent.getsockname()[1], context)
