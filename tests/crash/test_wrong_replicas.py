"""Replicas that may not serve: one line says what, where and what would be right; others serve on.

Real engine processes beside ends that answer wrongly, over real sockets.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import Tokens
from engine.client.request_stream import RequestStream
from engine.protocol import Rejected, Welcome, encode, encode_step
from engine.statistics import Stats
from engine.wire import FRAME_BYTES_MAX
from gateway.config.fleet import ReplicaSettings
from tests.crash.false_engine import fake_info, false_engine
from tests.crash.fleet import CONFIG, PATIENCE_S, Fleet, Proxy, fleet_of
from tests.crash.test_replicas import GREEDY, LONG, PROMPT, ids, request, rest, until
from tests.fakes import solo_output
from tests.unit.engine.server.fake_engine_process import VOCAB
from tests.unit.engine.server.fleet_certificates import certificate, expired

pytestmark = pytest.mark.slow

WHOLE = solo_output(PROMPT, GREEDY, 0, LONG, VOCAB)
TOO_LONG = struct.pack("<I", FRAME_BYTES_MAX + 1)
NO_MESSAGE = struct.pack("<I", 3) + b"abc"
(LATER_FRAME,) = encode_step(7, 0, (Stats(),))
OTHERS_PROTOCOL = encode(Rejected("unsupported", "Unsupported protocol version: 15; expected 14."))


async def answers_of(fleet: Fleet, count: int = 4) -> list[list[int]]:
    """Return short answers to the same prompt."""
    return [ids(await rest(fleet.replicas.submit(request(f"r{n}", 4)))) for n in range(count)]


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        (lambda: certificate("engine/e1", "another"), "expected one of the authority in authority"),
        (lambda: expired("engine/e1"), "certificate has expired; expected one that is valid today"),
        (lambda: certificate("engine/e7"), "names 'engine/e7'; expected 'engine/e1'"),
        (lambda: certificate("gateway/e1"), "names 'gateway/e1'; expected 'engine/e1'"),
    ],
    ids=["foreign", "expired", "name", "gateway"],
)
async def test_a_replica_with_a_wrong_certificate_is_told_and_left_out(tls: Any, says: str) -> None:
    """The others serve on."""
    wrong: Path = tls()
    async with fleet_of("e0", "e1", certificates={"e1": wrong}, waits=False) as fleet:
        told = await fleet.has_told("replica_wrong", "e1")
        await fleet.has_told("replica_ready", "e0")
        answers = await answers_of(fleet)
        state = fleet.replica("e1").state

    assert says in told["reason"]
    assert state == "wrong"
    assert answers == [WHOLE[:4]] * 4
    assert len(fleet.told("replica_wrong")) == 1


async def test_a_replica_of_another_model_is_told_and_left_out() -> None:
    async with fleet_of("e0", model="another", waits=False) as fleet:
        told = await fleet.has_told("replica_wrong", "e0")
        is_ready = fleet.replicas.ready()

    assert told["reason"].startswith("It serves the model fake of digest fake; expected another")
    assert not is_ready


async def test_an_address_that_answers_with_something_else_is_told() -> None:
    """A web server, say: one line, and it is asked again."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with fleet_of("e0", proxied=("e0",)) as fleet:
        proxy = fleet.proxies["e0"]
        proxy.lead_to(server.sockets[0].getsockname()[1])
        proxy.cut()
        told = await fleet.has_told("replica_wrong", "e0")
    server.close()

    assert told["address"] == f"e0=127.0.0.1:{proxy.port}"
    assert "speaks no TLS 1.3" in told["reason"]
    assert told["reason"].endswith("expected an engine")


async def test_a_gateway_whose_certificate_is_refused_says_so() -> None:
    """Under TLS 1.3 it has shaken hands by then, and sees an end; the engine has the reason."""
    refused = certificate("gateway/g0", "another"), certificate("engine/e0")
    mixed = refused[0].parent / "mixed"
    mixed.mkdir(exist_ok=True)
    for name in ("certificate.pem", "key.pem"):
        (mixed / name).write_bytes((refused[0] / name).read_bytes())
    (mixed / "authority.pem").write_bytes((refused[1] / "authority.pem").read_bytes())
    async with fleet_of("e0", waits=False, tls=mixed) as fleet:
        told = await fleet.has_told("replica_unreachable", "e0")

    assert told["reason"].startswith("It ended the connection without an answer")
    assert told["reason"].endswith("it does not accept the certificate of gateway/g0.")


async def test_a_replica_of_other_blocks_is_told_and_left_out() -> None:
    """Their KV differs, and so would what a prefix costs."""
    async with fleet_of("e0", "e1", faults={"e1": "wide"}, waits=False) as fleet:
        while not (wrong := fleet.told("replica_wrong")) or not fleet.told("replica_ready"):
            await fleet.changed()
        answers = await answers_of(fleet)

    assert wrong[0]["reason"] in (
        "Its KV is of fake-wide; expected fake, as that of e0.",
        "Its KV is of fake; expected fake-wide, as that of e1.",
    )
    assert answers == [WHOLE[:4]] * 4


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (OTHERS_PROTOCOL, "Unsupported protocol version: 15; expected 14."),
        (TOO_LONG, f"frame of {FRAME_BYTES_MAX + 1} bytes; limit {FRAME_BYTES_MAX}"),
        (NO_MESSAGE, "frame of 3 bytes is not a valid message"),
        (LATER_FRAME, "a Frame before the Welcome"),
    ],
    ids=["version 14", "64 MiB", "no message", "no Welcome"],
)
async def test_an_engine_that_answers_wrongly_is_told_and_left_out(
    answer: bytes, says: str
) -> None:
    """What it says first is no Welcome of this protocol."""
    async with (
        false_engine("e1", answer) as false,
        fleet_of("e0", others={"e1": false.port}, waits=False) as fleet,
    ):
        told = await fleet.has_told("replica_wrong", "e1")
        await fleet.has_told("replica_ready", "e0")
        answers = await answers_of(fleet)
        state = fleet.replica("e1").state

    assert told["address"] == f"e1=127.0.0.1:{false.port}"
    assert told["reason"] == says
    assert state == "wrong"
    assert answers == [WHOLE[:4]] * 4


@pytest.mark.parametrize(
    ("news", "says"),
    [
        (LATER_FRAME, "frame 7; expected frame 1"),
        (TOO_LONG, f"frame of {FRAME_BYTES_MAX + 1} bytes; limit {FRAME_BYTES_MAX}"),
        (NO_MESSAGE, "frame of 3 bytes is not a valid message"),
        (encode(Welcome(fake_info())), "a second Welcome"),
    ],
    ids=["out of order", "64 MiB", "no message", "Welcome twice"],
)
async def test_an_engine_that_breaks_the_protocol_later_is_lost(news: bytes, says: str) -> None:
    """A gap between frames means that events are lost. It is asked again, with growing pauses."""
    async with (
        false_engine("e1", news=news) as false,
        fleet_of("e0", others={"e1": false.port}, waits=False) as fleet,
    ):
        told = await fleet.has_told("replica_lost", "e1", 3)
        await fleet.has_told("replica_ready", "e0")
        answers = await answers_of(fleet)

    assert told["reason"] == f"connection lost: {says}"
    assert answers == [WHOLE[:4]] * 4


async def test_a_stuck_step_is_ended_by_its_keeper_and_the_request_goes_on() -> None:
    """The engine's event loop lives, so its connection is no silent one."""
    patient = replace(CONFIG, step_timeout_s=2.0)
    async with fleet_of("e0", "e1", faults={"e0": "hang"}, config=patient) as fleet:
        streams: list[RequestStream] = []
        while not streams or await fleet.serving(streams[-1].request_id) != "e0":
            streams.append(fleet.replicas.submit(other_prompt(len(streams))))
        events = [await rest(stream) for stream in streams]
        lost = await fleet.has_told("replica_lost", "e0")

    for number, found in enumerate(events):
        assert ids(found) == solo_output(other_prompt(number).tokens, GREEDY, 0, 8, VOCAB)
    assert lost["reason"] == "connection lost"
    assert "e1" not in [one["replica"] for one in fleet.told("replica_lost")]


async def test_an_engine_that_is_stuck_in_a_step_gets_no_further_request() -> None:
    """Long before its keeper ends it, and although its connection is awake."""
    async with fleet_of("e0", "e1", faults={"e0": "hang"}) as fleet:
        streams: list[RequestStream] = []
        while not streams or await fleet.serving(streams[-1].request_id) != "e0":
            streams.append(fleet.replicas.submit(other_prompt(len(streams))))
        async with asyncio.timeout(PATIENCE_S):
            while not fleet.replica("e0").is_stuck:  # noqa: ASYNC110 (nothing tells it)
                await asyncio.sleep(0.02)
        later = [fleet.replicas.submit(other_prompt(100 + number)) for number in range(8)]
        served = {await fleet.serving(stream.request_id) for stream in later}
        answers = [ids(await rest(stream)) for stream in later]
        await fleet.kept["e0"].kill()
        events = [ids(await rest(stream)) for stream in streams]

    assert served == {"e1"}
    for number, answer in [*enumerate(events), *enumerate(answers, 100)]:
        assert answer == solo_output(other_prompt(number).tokens, GREEDY, 0, 8, VOCAB)


def other_prompt(number: int) -> Any:
    """Return a request whose prompt shares nothing with those of other numbers."""
    return replace(
        request(f"r{number}", 8), tokens=tuple((number + n) % VOCAB for n in range(1, 40))
    )


# -- where the replicas are ------------------------------------------------------------------------


@asynccontextmanager
async def fleet_of_file(file: Path, text: str) -> AsyncIterator[Fleet]:
    """Start engines e0 and e1 and a gateway that follows a file, in which $e0 is e0's address."""
    settings = ReplicaSettings(replicas_file=str(file))
    async with fleet_of("e0", "e1", settings=settings, waits=False) as fleet:
        write_places(file, fleet, text)
        yield fleet


def write_places(file: Path, fleet: Fleet, text: str) -> None:
    """Write a file anew, as a whole."""
    for name, kept in fleet.kept.items():
        text = text.replace(f"${name}", f"127.0.0.1:{kept.port}")
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


async def test_a_file_is_followed_and_a_running_request_finishes(tmp_path: Path) -> None:
    """What leaves the file gets nothing new; what it runs ends as if nothing were."""
    file = tmp_path / "replicas"
    async with fleet_of_file(file, "# both\n\ne0=$e0\ne1=$e1\n") as fleet:
        for name in ("e0", "e1"):
            await fleet.has_told("replica_ready", name)
        running = fleet.replicas.submit(request())
        begun = await until(running, Tokens)
        leaves = await fleet.serving("a")
        stays = {"e0": "e1", "e1": "e0"}[leaves]
        write_places(file, fleet, f"{stays}=${stays}\n")
        await fleet.has_told("replica_removed", leaves)
        left = fleet.replica(leaves).state
        late = fleet.replicas.submit(request("late", 4))
        served = await fleet.serving("late")
        answer = ids(await rest(late))
        events = begun + await rest(running)
        write_places(file, fleet, "e0=$e0\ne1=$e1\n")
        await fleet.has_told("replica_ready", leaves, 2)

    assert ids(events) == WHOLE
    assert (left, served, answer) == ("draining", stays, WHOLE[:4])
    assert fleet.told("request_moved") == []


async def test_a_file_that_names_nobody_or_is_gone_leaves_the_last_list(tmp_path: Path) -> None:
    """One line for each says what is wrong with which file, and the replicas serve on."""
    file = tmp_path / "replicas"
    async with fleet_of_file(file, "e0=$e0\ne1=$e1\n") as fleet:
        await fleet.has_told("replica_ready", "e0")
        before = len(fleet.told("replicas_unknown"))
        write_places(file, fleet, "# nobody\n")
        for said in ("names no replica; expected lines of NAME=HOST:PORT", "No such file"):
            while not any(said in one["reason"] for one in fleet.told("replicas_unknown")[before:]):
                await fleet.changed()
            file.unlink(missing_ok=True)
        told = fleet.told("replicas_unknown")
        answers = await answers_of(fleet)

    assert all(str(file) in one["reason"] for one in told)
    assert answers == [WHOLE[:4]] * 4
    assert fleet.told("replica_removed") == []


async def test_an_engine_that_a_name_leads_to_twice_serves_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second Hello would take the place of the first connection, over and over."""
    name = "engines.test"
    look_up = socket.getaddrinfo

    def resolve(host: Any, port: Any, *more: Any, **settings: Any) -> Any:
        if host != name:
            return look_up(host, port, *more, **settings)
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*kind, (place, int(port))) for place in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    proxy = Proxy(0)
    await proxy.open("127.0.0.2")
    settings = ReplicaSettings(replicas_dns=f"{name}:{proxy.port}")
    async with fleet_of("e0", settings=settings, waits=False, ports={"e0": proxy.port}) as fleet:
        proxy.lead_to(proxy.port)
        while not (told := fleet.told("replica_wrong")) or not fleet.replicas.ready():
            await fleet.changed()
        stream = fleet.replicas.submit(request())
        events = await rest(stream)
    await proxy.close()

    assert told[0]["reason"] == "Another replica has the name e0; expected each name once."
    assert told[0]["address"] in (f"127.0.0.1:{proxy.port}", f"127.0.0.2:{proxy.port}")
    assert ids(events) == WHOLE
    assert fleet.told("replica_lost") == []
