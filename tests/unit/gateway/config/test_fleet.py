"""Settings of engines elsewhere: what is wrong is said with the value and what would be right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.config.fleet import (
    FleetConfig,
    ReplicaAddress,
    ReplicaSettings,
    find_problem,
    parse_replicas,
)
from gateway.engines.elsewhere.directory import Read, reader_of


async def read_once(read: Read) -> None:
    await read()


def test_a_line_is_a_name_and_a_place() -> None:
    """Empty lines and comments count for nothing; an IPv6 address has brackets."""
    found = parse_replicas(["", "# rack 1", " e0=10.0.0.1:7443 ", "e-1.b=[fd00::1]:7443"])

    assert found == (
        ReplicaAddress("e0", "10.0.0.1", 7443),
        ReplicaAddress("e-1.b", "fd00::1", 7443),
    )
    assert [str(one) for one in found] == ["e0=10.0.0.1:7443", "e-1.b=[fd00::1]:7443"]
    assert str(ReplicaAddress("", "10.0.0.1", 7443)) == "10.0.0.1:7443"


@pytest.mark.parametrize(
    "line",
    ["e0", "e0=", "=h:1", "e0=h", "e0=:7443", "e0=h:0", "e0=h:65536", "e0=h:x",
     "e0=h:1²", "a_b=h"],
)  # fmt: skip
def test_a_wrong_line_is_quoted(line: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=HOST:PORT") as refused:
        parse_replicas([line])

    assert repr(line)[:100] in str(refused.value)


@pytest.mark.parametrize("name", ["E_0", "a b", "-e", "ë0", "e" * 64])
def test_a_wrong_name_is_said_to_be_it(name: str) -> None:
    """The rest of the line is as it should be."""
    expected = f"the name {name!r}; expected up to 63 letters, digits, dots and hyphens"
    with pytest.raises(ValueError, match=expected):
        parse_replicas([f"{name}=10.0.0.1:7443"])


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["e0=a:1", "e0=b:1"], "'e0' names two replicas; expected each name once"),
        (["e0=a:1", "e1=a:1"], "e1=a:1: another replica has this address; expected each once"),
    ],
)
def test_each_name_and_address_is_there_once(lines: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_replicas(lines)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (ReplicaSettings(replicas=("e0=a:1",), replicas_file="f"), "expected one of them"),
        (ReplicaSettings(replicas=("e0=a:1", "e0=b:1")), "'e0' names two replicas"),
        (ReplicaSettings(replicas_dns="engines"), "replicas_dns: 'engines'; expected HOST:PORT"),
    ],
)
def test_one_way_to_find_the_replicas(settings: ReplicaSettings, says: str) -> None:
    assert says in find_problem(FleetConfig(), [settings])


def test_a_gateway_s_name_fits_a_certificate() -> None:
    assert "letters, digits" in find_problem(FleetConfig(name="g 0"), [])
    assert find_problem(FleetConfig(name="g-0.east"), []) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no replica; expected lines of NAME=HOST:PORT"),
        ("# nobody\n\n", "names no replica; expected lines of NAME=HOST:PORT"),
        ("e0=a:1\ne0=b:1\n", "'e0' names two replicas; expected each name once"),
        ("e0=a:1\ne1\n", "'e1': expected NAME=HOST:PORT, such as e0=10.0.0.1:7443"),
        ("\0\0\n", "expected NAME=HOST:PORT"),
    ],
    ids=["empty", "comment", "twice", "no place", "no text"],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    """The reader of the log knows which file to mend."""
    file = tmp_path / "replicas"
    file.write_text(text)
    read, every_s = reader_of(ReplicaSettings(replicas_file=str(file)))
    with pytest.raises(ValueError, match=str(file)) as refused:
        asyncio.run(read_once(read))

    assert says in str(refused.value)
    assert every_s is not None


def test_a_file_of_other_bytes_is_named(tmp_path: Path) -> None:
    """As all that cannot be read: the last list stays."""
    file = tmp_path / "replicas"
    file.write_bytes(b"\xff\xfe")
    read, _ = reader_of(ReplicaSettings(replicas_file=str(file)))
    with pytest.raises(ValueError, match=str(file)):
        asyncio.run(read_once(read))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:6379/0", ""),
        ("redis://localhost:6379", ""),
        ("rediss://trunkline@valkey.internal:6379/1", ""),
        ("unix:///run/valkey/valkey.sock", ""),
        ("unix://run/valkey.sock", "or unix:///PATH"),
        ("unix:///", "or unix:///PATH"),
        ("redis://trunkline@valkey.internal:6379/1", "expected TLS and a user"),
        ("rediss://valkey.internal:6379", "expected TLS and a user"),
        ("rediss://trunkline:secret@valkey.internal:6379", "expected it in VALKEY_PASSWORD"),
        ("http://localhost:6379", "expected rediss://USER@HOST:PORT/NUMBER"),
        ("redis://localhost", "expected rediss://USER@HOST:PORT/NUMBER"),
        ("redis://localhost:6379/x", "expected rediss://USER@HOST:PORT/NUMBER"),
        ("redis://localhost:99999", "expected rediss://USER@HOST:PORT/NUMBER"),
        ("redis://localhost:6379?db=1", "expected rediss://USER@HOST:PORT/NUMBER"),
    ],
)
def test_an_address_of_shared_state_is_checked(url: str, says: str) -> None:
    """Counts of tenants cross no network in clear; a password is in no file that is printed."""
    problem = find_problem(FleetConfig(shared=url), [])

    assert says in problem
    assert "secret" not in problem
    assert bool(problem) == bool(says)
