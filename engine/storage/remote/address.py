"""The address of a remote store: what can be one, and how the store is opened.

It is the only module that imports `cloud_objects`, and with it the optional package `obstore`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from engine.api import Count
from engine.config import RemoteConfig
from engine.storage.remote.objects import FolderObjects, RemoteRefused, RemoteStore

SCHEMES = ("file", "s3", "gs", "az")
CLOUD_EXTRA = "a remote store needs the extra `remote`: pip install 'trunkline[remote]'"


class RemoteSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The remote store below the disk: its address, its bound (0: none), how long any call of it
    may take, and whether replicas share it. Credentials come from the environment."""

    url: str
    bytes_max: Count = 0
    timeout_s: float = 2.0
    is_shared: bool = False


def remote_settings(config: RemoteConfig) -> RemoteSettings | None:
    """Return the remote store's address and bounds; None without one."""
    if not config.url:
        return None
    return RemoteSettings(
        config.url, int(config.gib * 2**30), config.timeout_ms / 1_000, config.shared
    )


def check_remote_url(url: str) -> str:
    """Return why an address cannot be one of a remote store, or "". Quotes no password."""
    try:
        parts = urlsplit(url)
        has_secret = parts.password is not None or "@" in parts.netloc
    except ValueError:
        return "not an address; expected s3://BUCKET/PREFIX or file:///FOLDER"
    if parts.scheme not in SCHEMES:
        return f"scheme {parts.scheme[:20]!r}; expected one of {', '.join(SCHEMES)}"
    if has_secret:
        return "an address with credentials; expected them in the environment"
    if parts.scheme == "file":
        is_folder = not parts.netloc and unquote(parts.path).startswith("/")
        return "" if is_folder and len(parts.path) > 1 else "expected file:///FOLDER"
    return "" if parts.netloc else f"no bucket; expected {parts.scheme}://BUCKET/PREFIX"


def can_reach(url: str) -> bool:
    """Return whether the package is installed that an address needs."""
    return urlsplit(url).scheme == "file" or find_spec("obstore") is not None


def open_remote(url: str, timeout_s: float) -> RemoteStore:
    """Open a remote store; credentials come from the environment, by the store's own names.

    Raises RemoteRefused, RemoteFailed.
    """
    if problem := check_remote_url(url):
        raise RemoteRefused(f"engine.levels.remote.url: {problem}.")
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FolderObjects(Path(unquote(parts.path)))
    try:
        from engine.storage.remote.cloud_objects import CloudObjects
    except ImportError as error:
        raise RemoteRefused(f"{CLOUD_EXTRA}.") from error
    return CloudObjects(url, timeout_s)
