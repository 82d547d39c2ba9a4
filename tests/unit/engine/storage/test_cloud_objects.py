"""The remote store over the protocol of S3: obstore against a server that speaks it (moto)."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.storage.remote.address import RemoteSettings, open_remote
from engine.storage.remote.objects import ObjectMissing, RemoteFailed, RemoteStore
from engine.storage.slabs.record import pack_run
from tests.fakes import FakeClock
from tests.unit.engine.storage.local_storage import write_key
from tests.unit.engine.storage.shared_rig import check_processes
from tests.unit.engine.storage.storage_rig import LONG, RUN, A, DiskRig, content_of
from tests.unit.engine.storage.test_remote_store import MASTER, await_objects

pytest.importorskip("obstore", reason="the extra remote is not installed")
pytest.importorskip("moto", reason="moto is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Return the port of a server that speaks as S3 does, with a bucket."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    found = 0
    for line in process.stderr:
        if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            found = int(match[1])
            break
    assert found, "the server did not start"
    connection = http.client.HTTPConnection("127.0.0.1", found, timeout=60)
    connection.request("PUT", "/bucket", headers={"Host": f"127.0.0.1:{found}"})
    assert connection.getresponse().read() is not None
    connection.close()
    yield found
    process.kill()
    process.wait(60)
    process.stderr.close()


@pytest.fixture
def store(port: int, monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    """Return the bucket's part below a prefix, opened as an operator would."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    return open_remote("s3://bucket/prefix", 10.0)


def test_objects_are_put_read_listed_and_deleted(store: RemoteStore) -> None:
    """What is not there is said so, and its deletion is none."""
    data = bytes(range(256)) * 1_000
    store.put("one/00/01", memoryview(data))
    store.put("one/00/02", memoryview(b"second"))
    store.put("two/00/01", memoryview(b"third"))

    assert bytes(store.get("one/00/01", len(data) + 5)) == data
    assert bytes(store.get("one/00/01", 10)) == data[:10]
    assert sorted(store.names("one/", 9)) == ["one/00/01", "one/00/02"]
    assert len(store.names("one/", 1)) == 1
    store.delete(["one/00/01", "one/00/02", "one/none"])
    store.delete(["one/none"])
    assert store.names("one/", 9) == []
    with pytest.raises(ObjectMissing):
        store.get("one/00/01", 10)


def test_an_object_is_put_once_and_a_prefix_is_cleared(store: RemoteStore) -> None:
    """Of two owners one has put it; what lies beside the prefix stays."""
    assert store.put_new("shared/o/1", memoryview(b"first"))
    assert not store.put_new("shared/o/1", memoryview(b"second"))
    assert bytes(store.get("shared/o/1", 10)) == b"first"
    store.put("shared/m/1", memoryview(b"third"))
    store.put("beside/o/1", memoryview(b"fourth"))
    assert store.clear("shared/", 9) == (2, 10)
    assert store.clear("shared/", 9) == (0, 0)
    assert store.names("beside/", 9) == ["beside/o/1"]
    store.delete(["beside/o/1"])


@pytest.mark.usefixtures("store")
def test_processes_share_a_bucket_and_an_erasure_empties_it(tmp_path: Path) -> None:
    """As they share a folder."""
    check_processes(tmp_path, "s3://bucket/shared-by-two")


def test_a_bucket_that_is_not_there_and_a_server_that_is_away(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors say their kind, and quote neither address nor key."""
    with pytest.raises(RemoteFailed):
        open_remote("s3://no-such-bucket/x", 5.0).names("probe/", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    away = open_remote("s3://bucket/x", 0.5)
    with pytest.raises(RemoteFailed) as failed:
        away.put("one", memoryview(b"content"))

    assert "127.0.0.1" not in str(failed.value)
    assert "secret" not in str(failed.value)


def test_promised_records_lie_sealed_in_the_bucket(store: RemoteStore, tmp_path: Path) -> None:
    """The whole way, and back to nothing by an erasure."""
    remote = RemoteSettings("s3://bucket/kv", timeout_s=10.0)
    bucket = open_remote("s3://bucket/kv", 10.0)
    with closing(
        DiskRig(
            tmp_path / "levels",
            FakeClock(1_000.0),
            seal=write_key(tmp_path / "key", MASTER),
            remote=remote,
        )
    ) as rig:
        rig.store(A, LONG, promise_s=60.0)
        await_objects(rig, 5)
        found = [bytes(bucket.get(name, 2**20)) for name in names_of(bucket)]
        receipt = rig.erase(A, tokens=LONG[:RUN])

        assert len(found) == 5
        for data in found:
            assert pack_run(LONG[:RUN]) not in data
            assert content_of(A, LONG[:RUN])[:32] not in data
        assert (receipt.code, receipt.records) == ("", 5)
        assert names_of(bucket) == []


def names_of(bucket: RemoteStore) -> list[str]:
    """Return all names of a bucket's part."""
    return bucket.names("", 9)
